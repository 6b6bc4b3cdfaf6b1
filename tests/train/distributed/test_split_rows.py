"""What is summed by response, by pair or by conversation, where two processes have the tokens of the same rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from model.parallel.ranks import RankGroup
from tests import processes
from tests.model.test_parallel import ranks_of
from train.config.dpo import DpoConfig
from train.config.rl import PolicyLoss
from train.dpo.objective import PreferenceObjective
from train.evaluation.exact_match import ExactMatch
from train.rl.loss import PolicyObjective

pytestmark = pytest.mark.distributed

LENGTH, CUT = 12, 5  # one row; answers 0 to 3 have 3 tokens each, so that the cut divides the second
ANSWER = (torch.arange(LENGTH) // 3)[None]


def tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(7, 4, generator=draw)
    # The tokens of the second answer before the cut look on-policy, those behind it do not; its mean is above 1.
    old = -2.0 + torch.tensor([0, 0, 0, 0, 0, 6.0, 0, 0, 0, 0, 0, 0])[None]
    return {"hidden": 0.2 * torch.randn(LENGTH, 4, generator=draw), "weight": weight, "old": old,
            "targets": torch.randint(0, 7, (LENGTH,), generator=draw)}  # fmt: skip


def found(own: slice, context: RankGroup) -> dict[str, Any]:
    """Losses, statistics and gradients of the tokens `own` of the row."""
    given, results = tensors(), {}
    places = torch.arange(LENGTH)[own]
    policy = PolicyObjective(
        PolicyLoss(clip_low=0.2, clip_high=0.28, kl=0.0, off_policy_threshold=1.0), 1.0, given["old"],
        torch.full((1, LENGTH), -1.0), ANSWER, context=context,
    )  # fmt: skip
    pairs = PreferenceObjective(DpoConfig(beta=0.5, label_smoothing=0.1), ANSWER, given["old"], 2, context)
    for name, objective in {"policy": policy, "pairs": pairs}.items():
        hidden = given["hidden"][own].requires_grad_()
        loss = objective(hidden, given["weight"], given["targets"][own], places)
        loss.backward()
        results[name] = {"loss": loss.detach(), "gradient": hidden.grad, **objective.sums}
    judge = ExactMatch()
    judge.places, judge.hits = places, torch.tensor([1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1])[own]
    results["answers"] = {"right": judge.count(torch.tensor([[3, 3, 3, 3]]), LENGTH, context)}
    return results


def part(rank: int) -> dict[str, Any]:
    return found(slice(CUT) if rank == 0 else slice(CUT, None), ranks_of(2))


def test_numbers_of_split_rows_are_those_of_whole_rows() -> None:
    expected, (first, second) = found(slice(None), RankGroup()), processes.run(2, part)
    assert expected["policy"]["off_policy"] == 3, "the second response is left out"
    assert expected["answers"]["right"].tolist() == [3, 4]
    for objective, values in expected.items():
        for name, value in values.items():
            ours, theirs = first[objective][name], second[objective][name]
            whole = torch.cat([ours, theirs]) if name == "gradient" else ours + theirs
            torch.testing.assert_close(whole, value, msg=lambda text, at=(objective, name): f"{at}: {text}")
