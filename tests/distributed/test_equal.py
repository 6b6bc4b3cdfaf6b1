"""One process or several, experts and tables whole or split: the same losses and, after ten steps, the same model.

Made batches of unequal documents; in every step a row, and with it often a rank, has no target; no token may choose one
expert of the first layer, so that in the layouts with four parts a rank has nothing to do there. The gradients are
clipped in every step. Before the cases each rank makes sure that a loss which is no number on one rank stops all. One
case has images, whose parameters have no gradient on some ranks or on none. See steps.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import Group

pytestmark = pytest.mark.distributed

LAYOUTS = {2: ("passes@1", "recompute@2"), 4: ("passes@2", "both@4", "images@2")}


Pairs = dict[str, tuple[dict, dict]]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def pairs(request: pytest.FixtureRequest, corpus: Path, alone: Callable[[str], dict]) -> Pairs:
    """Case -> its results, and those of one process. The processes are started once for all cases."""
    size = request.param
    with Group(size, ["tests/distributed/steps.py", str(corpus), *LAYOUTS[size]], corpus / f"ranks{size}") as group:
        for rank, ended in enumerate(group.finish()):
            assert ended.code == 0, f"rank {rank}:\n{ended.output}"
    found = {case: torch.load(corpus / f"{size}-{case}.pt") for case in LAYOUTS[size]}
    return {case: (result, alone("images" if case.startswith("images") else "plain")) for case, result in found.items()}


def test_ten_steps_are_those_of_one_process(pairs: Pairs) -> None:
    for case, (result, expected) in pairs.items():
        torch.testing.assert_close(
            torch.tensor(result["losses"]), torch.tensor(expected["losses"]), rtol=1e-6, atol=1e-5,
            msg=lambda text, case=case: f"losses of {case}: {text}",
        )  # fmt: skip
        for name, count in expected["counts"].items():
            assert torch.equal(result["counts"][name], count), f"{name} of {case}"


def test_clipping_sees_the_norm_of_the_whole_gradient(pairs: Pairs) -> None:
    """Also the proof that gradients of split parameters are neither lost nor multiplied."""
    for case, (result, expected) in pairs.items():
        assert min(expected["norms"]) > 0.3, "nothing was clipped"
        assert result["norms"] == pytest.approx(expected["norms"], rel=2e-5), case


def test_every_parameter_after_ten_steps_is_that_of_one_process(pairs: Pairs) -> None:
    for case, (result, expected) in pairs.items():
        assert result["tensors"].keys() == expected["tensors"].keys()
        for name, tensor in expected["tensors"].items():
            far = (result["tensors"][name] - tensor).abs().max().item()
            assert far < 1e-5, f"{name} of {case} is off by {far:.1e}"


def test_optimizer_state_is_shared_out_evenly(pairs: Pairs) -> None:
    """Every byte of it lies with one rank, and none has much more than its share."""
    for case, (result, expected) in pairs.items():
        (total,) = expected["state"]
        assert sum(result["state"]) == total, case
        assert max(result["state"]) < 1.05 * total / len(result["state"]), case
