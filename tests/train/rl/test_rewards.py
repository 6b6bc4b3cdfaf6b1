"""Reward functions in processes of their own: what they return, and what happens when they do not."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.python_server import Program
from train.errors import InputError
from train.rl.rewards import builtin
from train.rl.rewards.pool import Outcome, Rewards

MODULE = """
from __future__ import annotations
import dataclasses, os, subprocess, sys, time
import numpy

@dataclasses.dataclass
class Known:  # needs its module to be found by name
    half: float = 0.5

def grade(record, answer, reasoning):
    do = record["do"]
    if do == "hang":
        time.sleep(6000)
    if do == "hang with a child":
        children = [subprocess.Popen(["sleep", "6000"], start_new_session=apart) for apart in (False, True)]
        open(record["file"], "w").write(" ".join(str(child.pid) for child in children) + "\\n")
        time.sleep(6000)
    if do == "fork" and not os.fork():
        return 100.0
    if do == "crash":
        os._exit(3)
    if do == "exit":
        sys.exit(3)
    if do == "raise":
        raise KeyError("no such thing")
    if do == "print":
        print('{"reward": 100}', flush=True)
        os.system("echo noise")
    if do == "read":
        return float(sys.stdin.read() == "")
    if do == "numpy":
        return numpy.float32(Known().half)
    if do == "torch":
        import torch
        return torch.tensor(0.5)
    if do == "numpy bool":
        return numpy.bool_(True)
    if do == "numpy array":
        return numpy.array([0.5, 0.5])
    known = {"half": 0.5, "fork": 1, "nan": float("nan"), "text": "1", "none": None, "print": 0.25, "true": True}
    return known.get(do, len(answer))

async def other(record, answer, reasoning):
    import asyncio
    await asyncio.sleep(0)
    if record.get("do") == "raise":
        raise KeyError("no such thing")
    return len(reasoning)

constant = 1

def two(record, answer):
    return 1.0
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(MODULE)
    return str(path)


@pytest.fixture(scope="module")
def pool(module: str):
    rewards = Rewards(
        [f"{module}:grade", f"{module}:other", "train.rl.rewards.builtin:exact"], workers=2, seconds=300.0
    )
    yield rewards
    rewards.close()


def graded(pool: Rewards, *kinds: str, **more: str) -> list[Outcome]:
    coming = [pool.submit(0, {"do": kind, **more}, "four", "reasoning") for kind in kinds]
    return [future.result(timeout=600) for future in coming]


def test_rewards_come_back_in_order_from_every_function(pool: Rewards) -> None:
    outcomes = graded(pool, "half", "length", "true", "numpy", *["half"] * 20)
    assert [outcome.reward for outcome in outcomes] == [0.5, 4, 1, 0.5, *[0.5] * 20]
    assert pool.submit(1, {}, "a", "abc").result() == Outcome(3.0), "a coroutine is awaited"
    assert pool.submit(1, {"do": "raise"}, "a", "abc").result().detail == "KeyError: 'no such thing'"
    assert [outcome.reward for outcome in graded(pool, "numpy bool", "torch")] == [1.0, 0.5]
    assert pool.submit(2, {"solution": "7"}, " 7\n", "").result() == Outcome(1.0)
    assert pool.submit(2, {"solution": "7"}, "77", "").result() == Outcome(0.0)
    assert pool.submit(2, {"solution": 7}, "7", "").result() == Outcome(1.0)


@pytest.mark.parametrize(
    ("kind", "failure", "detail"),
    [
        ("crash", "crash", "the reward function ended its process"),
        ("exit", "crash", "the reward function ended its process"),
        ("raise", "error", "KeyError: 'no such thing'"),
        ("nan", "error", "nan"),
        ("text", "error", "'1'"),
        ("none", "error", "None"),
        ("numpy array", "error", "array"),
    ],
)
def test_a_failure_is_a_zero_reward_with_its_reason(pool: Rewards, kind: str, failure: str, detail: str) -> None:
    bad, *good = graded(pool, kind, "half", "half", "half")
    assert (bad.reward, bad.failure) == (0.0, failure) and detail in bad.detail
    assert good == [Outcome(0.5)] * 3


def test_a_function_that_hangs_is_given_up(pool: Rewards, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pool, "seconds", 1.0)
        assert graded(pool, "hang") == [Outcome(0.0, "time", "the reward function did not return within 1 s")]
    assert graded(pool, "half", "half", "half") == [Outcome(0.5)] * 3


def test_what_a_function_prints_or_reads_is_not_mistaken_for_an_answer(pool: Rewards) -> None:
    assert graded(pool, "print", "read", "half") == [Outcome(0.25), Outcome(1.0), Outcome(0.5)]


def test_a_copy_of_the_process_that_returns_too_answers_nothing(pool: Rewards) -> None:
    outcomes = graded(pool, *["fork"] * 4, *["length"] * 20)
    assert [outcome.reward for outcome in outcomes] == [1] * 4 + [4] * 20


def has_ended(pid: int) -> bool:
    """Waits a while for it."""
    for _ in range(2000):
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.05)
                continue
        return True
    return False


def test_a_hanging_function_ends_with_all_that_it_started(pool: Rewards, tmp_path: Path, monkeypatch) -> None:
    file, seconds = tmp_path / "pids", 1.0
    while not (file.exists() and file.read_text().endswith("\n")):  # given up before it had started anything
        monkeypatch.setattr(pool, "seconds", seconds)
        outcome, *_ = graded(pool, "hang with a child", file=str(file))
        assert outcome.failure == "time" and seconds < 300
        seconds *= 4
    assert all(has_ended(int(pid)) for pid in file.read_text().split())


@pytest.mark.slow
def test_nothing_hangs_on_when_the_trainer_is_killed(module: str, tmp_path: Path) -> None:
    script = (
        "import sys; from train.rl.rewards.pool import Rewards\n"
        f"Rewards(['{module}:grade'], 1, 600.0).submit(0, dict(do='hang with a child', file=sys.argv[1]), '', '')\n"
        "import time; time.sleep(6000)\n"
    )
    file = tmp_path / "pids"
    trainer = Program(["-c", script, str(file)], tmp_path / "log")
    trainer.until(lambda: file.exists() and file.read_text().endswith("\n"))
    inside = int(file.read_text().split()[0])
    guard, worker = os.getpgid(inside), psutil.Process(inside).ppid()
    trainer.send(signal.SIGKILL)
    trainer.wait()
    assert all(has_ended(pid) for pid in (guard, worker, inside))
    os.kill(int(file.read_text().split()[1]), signal.SIGKILL)  # in a session of its own, out of reach


def test_a_process_that_cannot_start_again_costs_one_reward(tmp_path: Path) -> None:
    """What a crash leaves behind may stop the next import; the run goes on, and so does the pool once it loads."""
    path = tmp_path / "fragile.py"
    path.write_text(
        "import os\n"
        "left = __file__ + '.left'\n"
        "if os.path.exists(left):\n"
        "    os.remove(left)\n"
        "    raise RuntimeError('left over')\n"
        "def grade(record, answer, reasoning):\n"
        "    if record:\n"
        "        open(left, 'w').close()\n"
        "        os._exit(3)\n"
        "    return 2.0\n"
    )
    rewards = Rewards([f"{path}:grade"], workers=1, seconds=600.0)
    coming = [rewards.submit(0, {"do": do} if do else {}, "", "") for do in ("crash", "", "")]
    first, second, third = (future.result(timeout=600) for future in coming)
    rewards.close()
    assert (first.failure, second.failure, third) == ("crash", "crash", Outcome(2.0))
    assert "left over" in second.detail


def test_closing_ends_the_processes_whatever_they_do(module: str) -> None:
    rewards = Rewards([f"{module}:grade"], workers=1, seconds=60)
    rewards.submit(0, {"do": "hang"}, "", "")
    pid = rewards._workers[0].process.pid
    rewards.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("{module}:missing", "mine.py:missing: AttributeError"),
        (
            "{module}:two",
            r"mine.py:two: TypeError: a reward function is called with \(record, answer, reasoning\), but too",
        ),
        ("{module}:constant", "is not a function"),
        ("no.such.module:grade", "ModuleNotFoundError"),
        ("grade", "must look like package.module:function"),
        ("/nowhere/mine.py:grade", "FileNotFoundError"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_at_the_start(module: str, name: str, reason: str) -> None:
    with pytest.raises(InputError, match=f"rl.tasks: .*{reason}"):
        Rewards([f"{module}:grade", name.format(module=module)], workers=1, seconds=1.0)


def test_the_solutions_of_arithmetic_are_right_at_every_level() -> None:
    records = [builtin.arithmetic(random.Random(seed)) for seed in range(500)]
    assert {record["level"] for record in records} == set(range(1, builtin.LEVELS + 1))
    for record in records:
        assert eval(record["prompt"].removesuffix(" = ?")) == int(record["solution"])


def test_the_solutions_of_letters_are_right() -> None:
    records = [builtin.letters(random.Random(seed)) for seed in range(50)]
    assert {record["prompt"].split()[0] for record in records} == {"reverse", "sort"}
    for record in records:
        order, word = record["prompt"].split()[0], record["prompt"].split(": ")[1]
        assert record["solution"] == ("".join(sorted(word)) if order == "sort" else "".join(reversed(word)))


def test_tasks_draw_the_same_from_the_same_seed() -> None:
    for task in (builtin.arithmetic, builtin.letters, builtin.highest):
        assert task(random.Random("a/1")) == task(random.Random("a/1")) != task(random.Random("a/2"))
