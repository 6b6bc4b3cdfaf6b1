"""What the processes of a run agree on: who is who, how a step is shared, who owns what, and who is gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig

from optim.ownership import assign_owners
from tests.distributed.ranks import free_port
from tests.python_server import ROOT
from train import __main__ as program
from train.config.problems import ConfigError
from train.distributed import failure_detector
from train.distributed.failure_detector import FailureDetector
from train.distributed.launch import launch
from train.distributed.launchers import LauncherError, ProcessInfo, find_process, note_fault
from train.distributed.world import World, pick_device
from train.signals import ctrl_c_ends

MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def test_every_launcher_is_understood() -> None:
    assert find_process({}) == ProcessInfo(0, 1, 0)
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", **MEETING}
    assert find_process(torchrun) == ProcessInfo(5, 8, 1)
    srun = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", **MEETING}
    assert find_process(srun) == ProcessInfo(5, 8, 1)
    assert find_process({**srun, **torchrun, "RANK": "6"}) == ProcessInfo(6, 8, 1)  # torchrun in a job of Slurm's
    # A job of one
    assert find_process({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}) == ProcessInfo()


RANK_5 = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", **MEETING}


@pytest.mark.parametrize(
    ("changes", "message", "reported"),
    [
        (
            {"LOCAL_RANK": "", "MASTER_PORT": ""},
            "8 processes were started, but the environment lacks LOCAL_RANK, ",
            True,
        ),
        ({"MASTER_ADDR": "", "RANK": "0"}, "8 processes were started, but the environment lacks MASTER_ADDR", False),
        ({"RANK": "8"}, "RANK=8 must be a whole number from 0 to 7, since there are 8 processes (WORLD_SIZE)", False),
        ({"RANK": "-1"}, "RANK=-1 must be a whole number from 0 to 7", False),
        ({"RANK": "first"}, "RANK=first must be a whole number from 0 to 7", False),
        ({"RANK": ""}, "RANK= must be a whole number from 0 to 7", False),
        ({"WORLD_SIZE": "1"}, "RANK=5 must be a whole number from 0 to 0", False),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 must be a whole number of at least 1", False),
        ({"LOCAL_RANK": "9"}, "LOCAL_RANK=9 must be a whole number from 0 to 7", False),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 must be a whole number from 1 to 65535", True),
        ({"MASTER_PORT": "http", "RANK": "0"}, "MASTER_PORT=http must be a whole number from 1 to 65535", False),
        ({"GLOO_SOCKET_IFNAME": "lo,none9"}, "has no network interface none9, but lo", True),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_one_line(changes, message: str, reported: bool) -> None:
    """Which another rank tells too, unless the value is this rank's own."""
    with pytest.raises(LauncherError) as refused:
        find_process({**RANK_5, **changes})
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert refused.value.reported == reported
    slurm = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    with pytest.raises(LauncherError):
        find_process({slurm.get(name, name): value for name, value in {**RANK_5, **changes}.items()})


def test_half_an_environment_is_refused_where_it_says_more_than_one_process(monkeypatch, capsys) -> None:
    assert find_process({"RANK": "0"}) == find_process({"WORLD_SIZE": "1"}) == ProcessInfo()
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        with pytest.raises(LauncherError, match=f"{name}=3 is set, but {other} is not"):
            find_process({name: "3"})
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit):
        program.fail(2, "made up")
    assert capsys.readouterr().err == "error: made up\n", "no other process prints it"


def test_a_fault_file_that_cannot_be_written_is_named(monkeypatch, capsys) -> None:
    monkeypatch.setenv("NARROWS_FAULT_FILE", "/nowhere/fault")
    note_fault(2)
    assert (
        capsys.readouterr().err
        == "warning: NARROWS_FAULT_FILE=/nowhere/fault cannot be written: No such file or directory\n"
    )


def test_a_lone_process_cannot_be_several(make_config) -> None:
    layout = make_config("parallel.world_size=2").parallel
    with pytest.raises(ConfigError, match=r"world_size = 2: 1 process was started\. Start that number \(torchrun"):
        launch(layout)


def test_the_pinned_deepspeed_is_installed() -> None:
    """The engine sets two attributes that DeepSpeed does not promise to keep: has_moe_layers, without which an
    engine fails on a split parameter, and enable_backward_allreduce; tests/distributed runs them.
    """
    assert version("deepspeed") == "0.19.8"


@pytest.mark.parametrize(
    ("micro", "passes", "ranks", "expected"),
    [(2, 4, 1, (2, 4)), (2, 4, 2, (2, 2)), (2, 4, 4, (2, 1)), (2, 4, 8, (1, 1)), (4, 3, 2, (2, 3)), (3, 4, 6, (1, 2))],
)
def test_a_step_has_the_same_rows_on_any_number_of_ranks(make_config, micro, passes, ranks, expected) -> None:
    task = make_config(
        f"task.micro_batch={micro}", f"task.global_batch_rows={micro * passes}", f"parallel.world_size={ranks}"
    ).task  # which also checks that the rows can be shared
    assert task.division_of_step(ranks) == expected
    assert expected[0] * expected[1] * ranks == micro * passes
    assert expected[0] <= micro and expected[1] <= passes


def test_owners_take_the_largest_first() -> None:
    assert assign_owners([10, 70, 30, 20, 60], 3) == [2, 0, 2, 2, 1]
    assert assign_owners([5] * 6, 3) == [0, 1, 2, 0, 1, 2]
    assert assign_owners([1, 2], 4) == [1, 0]
    assert assign_owners([], 2) == []


def test_the_device_is_the_process_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_device("cpu", ProcessInfo(3, 4, 1)) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for visible, index in ((4, 3), (1, 0)):  # Slurm can show each process one device only
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        assert pick_device("auto", ProcessInfo(7, 8, 3)) == torch.device("cuda", index)
    assert pick_device("auto") == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(LauncherError, match="this is process 3 of this host .* but it sees 2 GPUs"):
        pick_device("auto", ProcessInfo(7, 8, 3))


@pytest.mark.parametrize("code", [2, 3, 4, 75])
def test_a_process_that_ends_keeps_its_exit_code(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although srun sends a signal to the ranks that are still there when the first has ended."""
    signals = (signal.SIGUSR1, signal.SIGTERM)
    before = [signal.getsignal(number) for number in signals]
    monkeypatch.setattr(program, "run_task", lambda raw: program.fail(code, RuntimeError("made up")))
    try:
        with pytest.raises(SystemExit) as end:
            program.main(DictConfig({}))
        for number in signals:
            os.kill(os.getpid(), number)
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
    assert end.value.code == code


def test_numbers_of_a_lone_process_are_left_alone() -> None:
    world, tensor = World(torch.device("cpu")), torch.tensor([1, 2])
    assert world.sum_(tensor) is tensor and world.any(True) and not world.any(False)
    assert world.from_first("x") == "x" and world.gather(3) == [3] and world.first


@pytest.fixture
def arrive(monkeypatch: pytest.MonkeyPatch):
    """``arrive(size, ranks)``: ``rendezvous``'s result or error in each of those ranks, two ranks to a host."""
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(failure_detector, "REMINDER_INTERVAL", 1.0)

    def come(rank: int, size: int, timeout: float) -> object:
        try:
            return failure_detector.rendezvous(rank, size, rank % 2, timeout)
        except (failure_detector.RankLost, LauncherError) as refused:
            return refused

    def arrive(size: int, ranks: list[int], timeout: float) -> list:
        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(lambda rank: come(rank, size, timeout), ranks))

    return arrive


def test_all_wait_for_all(arrive) -> None:
    assert all(isinstance(store, dist.Store) for store in arrive(3, [0, 1, 2], timeout=100.0))


@pytest.mark.slow
def test_ranks_that_do_not_start_are_named(arrive, capfd: pytest.CaptureFixture) -> None:
    first, second = arrive(9, [0, 2], timeout=5.0)
    expected = f"ranks 1, 3-8 of 9 did not start within 5 s. {failure_detector.AGAIN}"
    assert all(isinstance(lost, failure_detector.RankLost) for lost in (first, second))
    assert [str(lost) for lost in (first, second)] == [expected] * 2
    assert (first.reported, second.reported) == (False, True)
    assert "waiting for ranks 1, 3-8 of 9 to start" in capfd.readouterr().err


def test_a_rank_0_that_does_not_start_is_named_once_a_host(arrive) -> None:
    found = arrive(6, [1, 2, 3], timeout=0.5)
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    expected = f"rank 0 of 6 (nothing at {place}) did not start within 0.5 s. {failure_detector.AGAIN}"
    assert [str(lost) for lost in found] == [expected] * 3
    assert [lost.reported for lost in found] == [False, False, True]


def test_a_port_that_is_taken_is_named(arrive) -> None:
    port = os.environ["MASTER_PORT"]
    with socket.create_server(("", int(port))):
        (refused,) = arrive(2, [0], timeout=100.0)
    host = socket.gethostname()
    assert str(refused) == (
        f"MASTER_PORT={port} cannot be opened on {host}, where rank 0 runs: address already in use. Choose another "
        "port, or end the program that uses it"
    )


def test_a_port_of_another_program_is_named(arrive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "STORE_LIMIT", 0.5)
    with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))):  # which says nothing
        (refused,) = arrive(2, [1], timeout=100.0)
    assert str(refused).startswith("what answers at MASTER_ADDR=127.0.0.1, MASTER_PORT=")


def test_an_address_that_is_none_is_named(arrive, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setenv("MASTER_ADDR", "node77")
    monkeypatch.setattr(failure_detector, "LOOKUPS", 1)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = arrive(4, [0, 1, 2], timeout=100.0)
    text = f"MASTER_ADDR=node77 has no address on {socket.gethostname()}: Name or service not known. It must name"
    assert all(str(refused).startswith(text) for refused in found)
    assert [refused.reported for refused in found] == [False, True, False]  # once on each host


def test_an_address_of_another_host_is_named(arrive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "OWN_ADDRESS_LIMIT", 0.2)
    monkeypatch.setattr(failure_detector, "_accepts", lambda host, port: False)
    (refused,) = arrive(2, [0], timeout=100.0)
    assert str(refused).startswith(f"MASTER_ADDR=127.0.0.1 does not lead to {socket.gethostname()}, where rank 0 runs")


def test_ctrl_c_ends_a_process_that_waits_for_others_in_a_library() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with ctrl_c_ends():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def detectors(monkeypatch: pytest.MonkeyPatch):
    """``detectors(size)``: failure detectors in one process and on one store, with short times."""
    monkeypatch.setattr(failure_detector, "HEARTBEAT_INTERVAL", 0.01)
    monkeypatch.setattr(failure_detector, "EXIT_GRACE", 60.0)
    store, made = dist.HashStore(), []

    def make(size: int) -> list[FailureDetector]:
        def start(rank: int) -> None:
            made.append(FailureDetector(store, rank, size, timeout=0.5))

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(made, key=lambda one: one.rank)

    yield make
    for one in made:
        one.close()


def test_a_silent_rank_is_named_to_all(detectors) -> None:
    first, second, silent = detectors(3)
    first.start(), second.start()  # the third never writes a heartbeat
    assert silent.name_of(2) == f"rank 2 (process {os.getpid()} on {socket.gethostname()})"
    assert first.wait_for_failure(120) == second.wait_for_failure(120) == f"{silent.name_of(2)} is gone"
    assert first.is_reporter() and not second.is_reporter()


def test_a_silent_rank_0_is_named_by_rank_1(detectors) -> None:
    """A launcher may hold the store, and then it answers whatever becomes of rank 0."""
    silent, second, third = detectors(3)
    second.start(), third.start()
    assert second.wait_for_failure(120) == third.wait_for_failure(120) == f"{silent.name_of(0)} is gone"
    assert second.is_reporter() and not third.is_reporter()


def test_a_job_that_was_suspended_goes_on(detectors, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock went on, but nobody could write a heartbeat."""
    first, _ = detectors(2)
    assert first._check() is None
    later = time.monotonic() + 3600
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert first._check() is None


def test_a_store_that_hangs_is_noticed(detectors, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose host has lost its power: no call returns or fails."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    _, second = detectors(2)
    second.store = SimpleNamespace(set=lambda *_: threading.Event().wait())
    second.start()
    assert second.wait_for_failure(120) == f"{second.name_of(0)} no longer answers"
    assert second.is_reporter()


def test_a_dead_process_is_named_by_its_neighbours(detectors) -> None:
    first, second = detectors(2)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    for one in (first, second):
        one.processes[0] = [one.processes[0][0], str(child.pid)]
    second.start()
    assert second.wait_for_failure(120) == f"{second.name_of(0)} is gone"
    assert second.is_reporter()  # for rank 0 cannot


def test_a_rank_that_ends_by_itself_leaves_word(detectors) -> None:
    first, second = detectors(2)
    first.start(), second.start()
    second.announce("DataError: no documents")
    assert first.wait_for_failure(120) == f"{second.name_of(1)} stopped: DataError: no documents"
    assert first.is_reporter()


def test_ranks_that_end_in_order_are_not_missed(detectors) -> None:
    first, second = detectors(2)
    first.start(), second.start()
    second.close(), first.close()
    for one in (first, second):
        one.join(600)
        assert not one.is_alive()
    assert first.failure is None and second.failure is None


PROGRAM = """
import atexit, os, sys, torch
from train.config.schema import HardwareConfig, ParallelConfig
from train.distributed.engine import Engine
from train.distributed.launch import launch
from train.distributed.launchers import run_to_the_end

class Kept:
    def __del__(self, write=os.write):
        write(1, b"taken apart")

kept = Kept()
atexit.register(print, "exit functions")

def main():
    if os.environ["WORLD_SIZE"] == "1":
        hardware = HardwareConfig(8, 1.0, 1.0, 1.0, 1.0, 1.0)
        world = launch(ParallelConfig("cpu", "fp32", 1, 1, 1, False, 1, 1, None, 20.0, 600.0, 1500.0, 1800.0, hardware))
        model = torch.nn.Linear(2, 2)
        engine = Engine(world, model, torch.optim.SGD(model.parameters(), 1.0))
        engine.backward(model(torch.ones(1, 2)).sum(), last=True), engine.reduce(engine.present()), engine.step()
        assert world.size == 1 and not torch.distributed.is_initialized() and "deepspeed" not in sys.modules
    sys.exit(75)

run_to_the_end(main)
"""


def test_how_processes_end() -> None:
    """A lone process needs no group and no DeepSpeed, and ends as every program of Python. One of several ends without
    taking the interpreter apart: while that goes on, a thread that comes back to Python aborts the process.
    """
    command = [sys.executable, "-c", PROGRAM]
    places = ({**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": size} for size in "12")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    for alone, process in zip((True, False), [subprocess.Popen(command, env=e, **pipes) for e in places], strict=True):
        output, errors = process.communicate()
        assert process.returncode == 75 and "exit functions" in output, errors
        assert ("taken apart" in output) == alone
