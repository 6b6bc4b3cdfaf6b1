"""A drafter's step on a micro-batch that is split over the ranks of context parallelism, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from model import Drafter, build_drafter
from model.dspark import DraftDenominators
from model.parallel.context import gather_chunks
from model.parallel.ranks import ONE_PROCESS, Parallel
from tests import processes
from tests.model.test_context_parallel import BATCHES
from tests.model.test_parallel import part_of, ranks_of
from tests.model.tiny import DRAFTER, assert_same, lively, switch_rounding_off, tiny_model

pytestmark = pytest.mark.distributed

NAMES = ("one document", "inside a group", "at the cut", "chunks shorter than the window", "two rows with padding",
         "image across the cut")  # fmt: skip


def drafter_of(parallel: Parallel, vision: bool) -> Drafter:
    whole = tiny_model(engram=True, vision=vision, **DRAFTER)
    return lively(build_drafter(whole if parallel == ONE_PROCESS else part_of(whole, parallel)), 100)


def anchors_of(batch: dict[str, Tensor]) -> Tensor:
    """Every third place behind two tokens of a document whose token and the next are real; an odd number of them."""
    lengths = batch.get("seq_lens", torch.full((1, 1), batch["input_ids"].shape[1]))
    rows = []
    for row in lengths.tolist():
        ends = torch.tensor(row).cumsum(0).tolist()
        starts = [end - length for end, length in zip(ends, row, strict=True)]
        rows.append([at for start, end in zip(starts, ends, strict=True) for at in range(start + 2, end - 1)][::3])
    anchors = torch.full((len(rows), max(3, *map(len, rows))), -1)
    for line, places in zip(anchors, rows, strict=True):
        line[: len(places)] = torch.tensor(places)
    return anchors


def step(drafter: Drafter, name: str, denominators: DraftDenominators) -> dict[str, Any]:
    batch = BATCHES[name]
    batch = {**batch, "anchors": anchors_of(batch)}
    losses = drafter.losses(**batch, layout=drafter.lay_out(**batch), denominators=denominators)
    losses.total.backward()
    assert all(parameter.grad is None for parameter in drafter.backbone.parameters())
    sums = {key: value.detach() for key, value in losses._asdict().items()}
    return {"sums": sums, "gradients": {key: parameter.grad for key, parameter in drafter.named_parameters()}}


def counted(drafter: Drafter, name: str) -> Tensor:
    batch = BATCHES[name]
    return drafter.loss_denominators(**batch, anchors=anchors_of(batch)).to_tensor()


def train(rank: int) -> list[dict[str, Any]]:
    switch_rounding_off(setattr)
    found = []
    for name in NAMES:
        drafter = drafter_of(Parallel(context=ranks_of(2)), "image" in name)
        total = counted(drafter, name)
        torch.distributed.all_reduce(total)
        found.append(step(drafter, name, DraftDenominators.from_tensor(total)))
    rows = torch.arange(6.0)[:, None] if rank else torch.arange(-7.0, 0)[:, None]
    assert torch.equal(gather_chunks(rows, 13, ranks_of(2)), torch.arange(-7.0, 6)[:, None])
    return found


@pytest.mark.slow
def test_two_ranks_are_one(monkeypatch) -> None:
    """Losses, counts, calibration and gradients add up to those of one process; the backbone has no gradient."""
    switch_rounding_off(monkeypatch.setattr)
    for name, *ranks in zip(NAMES, *processes.run(2, train), strict=True):
        drafter = drafter_of(ONE_PROCESS, "image" in name)
        whole = step(drafter, name, DraftDenominators.from_tensor(counted(drafter, name)))
        assert whole["sums"]["slots"][0] > 0 and all(rank["sums"]["slots"][0] > 0 for rank in ranks)
        for key, expected in whole["sums"].items():
            found = sum(rank["sums"][key] for rank in ranks)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5, msg=lambda text, key=key: f"{key} {text}")
        gradients = {
            key: sum(r["gradients"][key] for r in ranks if r["gradients"][key] is not None)
            for key in drafter.state_dict()
            if key in whole["gradients"] and whole["gradients"][key] is not None
        }
        assert_same(gradients, {key: whole["gradients"][key] for key in gradients}, 5e-4)
