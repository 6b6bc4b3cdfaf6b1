"""One process or several, experts and tables whole or split: the same losses and, after ten steps, the same model.

Made batches of unequal documents; in every step a row, and with it often a rank, has no target; no token may choose one
expert of the first layer, so that in the layouts with four parts a rank has nothing to do there. The gradients are
clipped in every step. See steps.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import Group

pytestmark = pytest.mark.distributed

LAYOUTS = {2: ("passes@1", "recompute@2"), 4: ("passes@2", "both@4")}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, corpus: Path, alone: dict) -> dict[str, dict]:
    """The results of every case of so many processes, which were started once for all."""
    size = request.param
    with Group(size, ["tests/distributed/steps.py", str(corpus), *LAYOUTS[size]], corpus / f"ranks{size}") as group:
        for rank, ended in enumerate(group.finish()):
            assert ended.code == 0, f"rank {rank}:\n{ended.output}"
    return {f"{size}-{case}": torch.load(corpus / f"{size}-{case}.pt") for case in LAYOUTS[size]}


def test_ten_steps_are_those_of_one_process(found: dict[str, dict], alone: dict) -> None:
    for case, result in found.items():
        torch.testing.assert_close(
            torch.tensor(result["losses"]), torch.tensor(alone["losses"]), rtol=1e-6, atol=1e-5,
            msg=lambda text, case=case: f"losses of {case}: {text}",
        )  # fmt: skip
        for name, count in alone["counts"].items():
            assert torch.equal(result["counts"][name], count), f"{name} of {case}"


def test_clipping_sees_the_norm_of_the_whole_gradient(found: dict[str, dict], alone: dict) -> None:
    """Also the proof that gradients of split parameters are neither lost nor multiplied."""
    assert min(alone["norms"]) > 0.3, "nothing was clipped"
    for case, result in found.items():
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-5), case


def test_every_parameter_after_ten_steps_is_that_of_one_process(found: dict[str, dict], alone: dict) -> None:
    for case, result in found.items():
        assert result["tensors"].keys() == alone["tensors"].keys()
        for name, tensor in alone["tensors"].items():
            far = (result["tensors"][name] - tensor).abs().max().item()
            assert far < 1e-5, f"{name} of {case} is off by {far:.1e}"


def test_optimizer_state_is_shared_out_evenly(found: dict[str, dict], alone: dict) -> None:
    """Every byte of it lies with one rank, but for rows that pad the last part of a table to nothing."""
    (total,) = alone["state"]
    for case, result in found.items():
        assert sum(result["state"]) == total, case
        assert max(result["state"]) < 1.05 * total / len(result["state"]), case
