"""How runs of several processes end: one is killed, one is told to stop; and that the run then goes on as if nothing
had happened, on another number of processes if need be.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from ranks import Group, free_port

from tests.python_server import Program
from train.distributed.failure_detector import _accepts, message

pytestmark = pytest.mark.distributed

SETTINGS = (
    "model=tiny", "data.source=text", "task.seq_len=64", "task.micro_batch=2", "task.global_batch_rows=4",
    "task.tokens=3000", "task.eval_every=100", "data.validation_rows=5", "task.sample_tokens=3", "optim=report",
    "optim.schedule.warmup_steps=0", "optim.schedule.peak=1.0e-4", "optim.schedule.floor=1.0e-5",
    "optim.settings.adamw.eps=1.0e-4", "checkpoint.every=2",
    # Nothing is rounded or selected, so that the last bits of a sum cannot become a jump some steps later.
    "runtime.kv_quant=false", "runtime.candidate_pool=false", "model.text_config.index_topk=64",
    "checkpoint.keep=100",
    "logger.progress=false", "parallel.device=cpu",
)  # fmt: skip


def start(corpus: Path, name: str, size: int, layout: str, *more: str, at: tuple[str, ...] = ()) -> Group:
    """``at``: what happens to it and when, see ``tests/at_step.py``."""
    data = (f"data.paths=[{corpus}/text]", f"data.validation_paths=[{corpus}/text/token.txt]")
    place = (f"data.cache_dir={corpus}/cache", f"output={corpus}/runs", f"name={name}", f"parallel={layout}")
    logs = corpus / f"logs-{name}-{time.monotonic_ns()}"
    program = ["tests/at_step.py", *at] if at else ["-m", "train"]
    return Group(size, [*program, *more, *SETTINGS, *data, *place], logs)


def records(corpus: Path, name: str, kind: str) -> list[dict]:
    lines = (corpus / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


@pytest.mark.slow
def test_a_run_outlives_a_killed_process_and_a_signal(corpus: Path) -> None:
    with start(corpus, "broken", 2, "ep2", at=("5", "SIGKILL:1")) as group:
        victim = group.processes[1]
        first, second = group.finish()
    assert (first.code, second.code) == (4, -signal.SIGKILL)
    assert all(f"memory of rank {rank}: weights " in first.output for rank in (0, 1))
    gone = f"rank 1 (process {victim.pid} on {socket.gethostname()}) is gone"
    assert re.findall("error: (.*)", first.output) == [message(gone)]

    more = ("checkpoint.asynchronous=true", "parallel.dense_shards=2")
    with start(corpus, "broken", 2, "ep2", *more, at=("7", "SIGTERM:1")) as group:  # from step 2 or 4
        first, second = group.finish()
    assert (first.code, second.code) == (75, 75)
    assert "continuing from" in first.output and "Stopped by SIGTERM after step 7" in first.output
    assert "Stopped" not in second.output  # rank 0 says it for both

    with start(corpus, "broken", 1, "single") as group, start(corpus, "whole", 1, "single") as other:
        for ended in (*group.finish(), *other.finish()):
            assert ended.code == 0, ended.output
    # A gradient jumps where a score of the indexer crosses zero, which the loss does not.
    train, valid = {"loss": 1e-6, "grad_norm": 1e-2, "tokens": 0}, {"loss": 1e-6, "targets": 0}
    for kind, limits in (("train", train), ("valid", valid)):
        broken, whole = records(corpus, "broken", kind), records(corpus, "whole", kind)
        assert [record["step"] for record in broken] == [record["step"] for record in whole]
        for ours, theirs in zip(broken, whole, strict=True):
            for key, limit in limits.items():
                assert ours[key] == pytest.approx(theirs[key], rel=limit), f"{key} of step {ours['step']}"


@pytest.mark.slow
def test_the_end_of_rank_0_is_told_by_another(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("NARROWS_FAULT_FILE", str(tmp_path / "fault"))
    with start(corpus, "headless", 2, "ep2", at=("2", "SIGKILL:0")) as group:
        _, second = group.finish()
    assert second.code == 4
    name = f"rank 0 (process {group.processes[0].pid} on {socket.gethostname()})"
    (said,) = re.findall("error: (.*)", second.output)
    assert said in (message(f"{name} is gone"), message(f"{name} no longer answers"))  # whichever is noticed first
    assert not (tmp_path / "fault").exists(), "a lost rank is no fault that would come again"


def test_the_wrong_number_of_processes_is_refused_once(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("NARROWS_FAULT_FILE", str(tmp_path / "fault"))
    with start(corpus, "refused", 2, "ep4", "--local_rank=0") as group:  # which DeepSpeed's launcher adds
        first, second = group.finish()
    assert (first.code, second.code) == (2, 2) and not second.output
    assert "parallel.world_size = 4: 2 processes were started. Start that number (torchrun" in first.output
    assert set((tmp_path / "fault").read_text().split()) == {"2"}


@pytest.fixture
def lone(tmp_path: Path):
    """``lone(VARIABLE=value, ...)``: rank 0 of two as srun starts it, whose other rank does not come."""
    started = []

    def start(**environment: str) -> Program:
        place = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "MASTER_ADDR": "127.0.0.1"}
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        command = ["-m", "train", "experiment=demo", "parallel.world_size=2", f"output={tmp_path}"]
        given = {**kept, **place, "MASTER_PORT": str(free_port()), **environment}
        started.append(Program(command, tmp_path / "log", given))
        return started[-1]

    yield start
    for program in started:
        program.kill()


@pytest.mark.slow
def test_where_processes_cannot_meet_is_refused_in_one_line(lone) -> None:
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        for name, value in (("MASTER_PORT", port), ("MASTER_ADDR", "no..host"), ("SLURM_PROCID", "2")):
            program = lone(**{name: value})
            assert program.wait() == 2
            assert re.fullmatch(f"error: {name}={re.escape(value)} .*\n", program.output), program.output


def test_ctrl_c_ends_a_rank_that_waits_for_others(lone) -> None:
    port = free_port()
    program = lone(MASTER_PORT=str(port))
    program.until(lambda: _accepts("127.0.0.1", port))
    os.kill(program.pid, signal.SIGINT)
    assert program.wait() == -signal.SIGINT


@pytest.mark.slow
def test_a_rank_that_lives_but_does_not_arrive_is_ended_with_its_stack(corpus: Path) -> None:
    more = ("parallel.hang_timeout=3", "parallel.collective_timeout=600")
    with start(corpus, "hanging", 2, "ep2", *more, at=("3", "sleep:1")) as group:
        first, second = group.finish()
    assert (first.code, second.code) == (4, 4)
    (said,) = re.findall("error: (.*)", first.output)
    name = f"rank 1 (process {group.processes[1].pid} on {socket.gethostname()})"
    assert re.match(
        rf"{re.escape(name)} has not arrived in all_reduce \(sum_ in train/distributed/world.py:\d+\), ", said
    )
    assert "it is at train_step in tests/at_step.py:" in said
    folder = corpus / "runs" / "hanging" / "stacks"
    stacks = [(folder / f"rank-{rank}.txt").read_text() for rank in range(2)]
    assert all(name in one.splitlines()[0] for one in stacks)
    assert "in all_reduce" in stacks[0] and "at_step.py" in stacks[1] and "in train_step" in stacks[1]
