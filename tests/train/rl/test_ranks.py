"""task=rl and task=distill on two processes: with an adapter, ahead of the policy and stopped, over servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import Group

from tests.model.tiny import no_rounding  # noqa: F401
from tests.train.rl.test_task import AHEAD, assert_same_run, records, weights
from train.tasks import rl

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# `python -m train` without rounding.
PLAIN = """
import sys
from tests.model.tiny import switch_rounding_off
from train import __main__ as program
from train.config.compose import open_overrides
from train.distributed.launchers import run_to_the_end

switch_rounding_off(setattr)
sys.argv[1:] = open_overrides(sys.argv[1:])
run_to_the_end(program.main)
"""

# `python -m train`, but rank 1 stops itself in the middle of responses, as soon as it writes under a new policy.
STOPPED = """
import os, signal, sys
from train import __main__ as program
from train.config.compose import open_overrides
from train.distributed.launchers import run_to_the_end
from train.tasks.rl import LocalRollout

inner, polls = LocalRollout.poll, iter(range(10**6))

def poll(self):
    if os.environ["RANK"] == "1" and self.generator.version and next(polls) == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return inner(self)

LocalRollout.poll = poll
sys.argv[1:] = open_overrides(sys.argv[1:])
run_to_the_end(program.main)
"""


@pytest.fixture
def two_processes(rl_overrides: list[str], tmp_path: Path) -> Callable[..., None]:
    """``two_processes("key=value", ...)``: a run with these changes; ``code``: as which it must end."""

    def start(*changes: str, command: tuple[str, ...] = ("-m", "train"), code: int = 0) -> None:
        arguments = [*command, *rl_overrides, *changes, "parallel.world_size=2"]
        with Group(2, arguments, tmp_path / "ranks") as group:
            for rank, ended in enumerate(group.finish()):
                assert ended.code == code, f"rank {rank}:\n{ended.output}"

    return start


ADAPTER = ["lora=all", "optim=adamw", "lora.rank=4"]


@pytest.mark.parametrize(
    ("adapter", "rows"),
    [([], []), (ADAPTER, []), ([], ["parallel.context_parallel=2"]), (ADAPTER, ["parallel.context_parallel=2"])],
    ids=["whole", "adapter", "whole, rows split", "adapter, rows split"],
)
def test_two_processes_take_the_step_of_one(
    make_rl,
    two_processes,
    tmp_path: Path,
    adapter: list[str],
    rows: list[str],
    no_rounding,  # noqa: F811
) -> None:
    """The same responses, so the same measures; gradients and biases summed over both; and one log."""
    small = [*adapter, "task.tokens=300", "rl.loss.kl=0.1"]
    rl.run(make_rl("name=one", *small))
    two_processes("name=two", *small, *rows, command=("-c", PLAIN))
    one, two = make_rl("name=one", *small), make_rl("name=two", *small)
    for ours, theirs in zip(records(one), records(two), strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - {"kind", "failures", "efforts"}:
            assert theirs[name] == pytest.approx(ours[name], rel=1e-4, abs=1e-6), name
    one, two = weights(one), weights(two)
    for name, tensor in one.items():
        assert (two[name] - tensor).abs().max() < 1e-5, name
    assert len(list((tmp_path / "two" / "rollout").glob("*.pt"))) == 2


def test_ahead_of_the_policy_a_stopped_run_goes_on_exactly(make_rl, two_processes, tmp_path: Path) -> None:
    """Rank 1 is in the middle of collecting when it is stopped; rank 0 hears of it at the end of its own."""
    two_processes("name=whole", *AHEAD)
    two_processes("name=split", *AHEAD, command=("-c", STOPPED), code=75)
    begun = [torch.load(path, weights_only=True) for path in sorted((tmp_path / "split" / "rollout").glob("step-*.pt"))]
    assert any(sample["tokens"] for sample in begun[1]["rollout"]["running"]), "stopped in the middle"
    two_processes("name=split", *AHEAD)
    whole, split = (make_rl(f"name={name}", *AHEAD, "parallel.world_size=2") for name in ("whole", "split"))
    steps = [record for record in records(whole) if record["kind"] == "train"]
    assert any(step["version_lag"] > 0 for step in steps) and len(steps) > 2
    assert_same_run(whole, split)


@pytest.mark.parametrize("keys", [[], ["context_parallel"]], ids=["whole rows", "rows split"])
def test_a_spread_policy_is_taught_on_what_servers_write(
    make_rl, distill_changes, teachers, two_processes, make_server, servers_of, keys: list[str]
) -> None:
    """Two teachers, half of the experts on each process: the step that one process takes on its own responses."""
    fixed, server = [*distill_changes(teachers), "task.tokens=300"], make_server()
    split = [f"parallel.{key}=2" for key in ("world_size", "expert_parallel", "table_shards", *keys)]
    alone = make_rl(*fixed, "name=one")
    spread = make_rl(*fixed, *servers_of(server), *split, "name=two")
    rl.run(alone)
    two_processes(*fixed, *servers_of(server), *split, "name=two")
    ours, theirs = (record for config in (alone, spread) for record in records(config) if record["kind"] == "train")
    assert server.bodies and theirs["responses"] == ours["responses"] == 24 and ours["kl"] > 0
    for name in ("tokens", "kl", "grad_norm"):  # a draw may differ where rounding decides it
        assert theirs[name] == pytest.approx(ours[name], rel=0.05), name
