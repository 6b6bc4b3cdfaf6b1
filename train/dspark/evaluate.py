"""Evaluation of a drafter: its losses, expected accepted length, acceptance per slot, calibration and expert load."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from model.dspark import slot_weights
from train.build import Run
from train.dspark.anchors import HELD_OUT, with_anchors
from train.evaluation.probe import with_a_token
from train.logging.records import load_record


def measures(sums: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Compute the metrics of a drafter from the sums of ``model.dspark.DraftLosses`` over a step or an evaluation.

    The metrics are:

    - ce, l1, confidence: the means of the loss terms;
    - tau: the expected accepted length of a block in tokens, including the token of the backbone itself;
    - alpha: for each slot of a block, the mean probability that its draft is accepted, over the blocks in which this
      slot and all slots before it are supervised;
    - ece: expected calibration error, the mean difference between predicted and true acceptance over bins.

    A metric is None if there is no slot to compute it from.
    """
    slots = sums["slots"].double()
    weight = float((slots * slot_weights(len(slots), slots.device)).sum())
    predicted, accepted = sums["calibration"][:, 1], sums["calibration"][:, 2]

    def mean(total: torch.Tensor, count: float) -> float | None:
        return float(total) / count if count else None

    return {
        **{
            name: mean(sums[key], weight)
            for name, key in (("ce", "ce_sum"), ("l1", "l1_sum"), ("confidence", "bce_sum"))
        },
        "tau": mean(sums["accepted_sum"], float(slots[0])),
        "alpha": [mean(total, count) for total, count in zip(sums["alpha_sum"], slots.tolist(), strict=True)],
        "ece": mean((predicted - accepted).abs().sum(), float(slots.sum())),
        "blocks": int(slots[0]),
        "expert_load": load_record(sums["expert_load"]),
    }


@torch.no_grad()
def evaluate(run: Run, stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
    """Compute ``measures`` on the held-out rows. Nothing in ``run`` changes.

    The anchors are the same in every evaluation and every run. Returns None as soon as ``stop`` returns True on any
    rank.

    Raises:
        ValueError: no held-out row has a position at which a draft block may begin.
    """
    started, settings, world = time.perf_counter(), run.dspark, run.world
    sums: dict[str, torch.Tensor] = {}
    first_row = 0
    for batch in run.valid_batches:
        if world.any(stop()):
            return None
        batch, _ = with_a_token(batch)
        rows = len(batch["input_ids"])
        batch = with_anchors(batch, 0, first_row + world.row_group * rows, settings.tokens_per_anchor, HELD_OUT)
        first_row += world.row_groups * rows
        batch = run.prepare(batch)
        with run.autocast():
            losses = run.model.losses(
                **batch, denominators=run.model.loss_denominators(**batch), objective=settings.objective
            )
        for name, value in losses._asdict().items():
            if name != "total":
                sums[name] = sums.get(name, 0) + value
    found = measures(world.sum_all(sums))
    if found["tau"] is None:
        raise ValueError("no held-out row has two successive supervised tokens to begin a draft. Hold out more data")
    return {"loss": loss_of(found, settings.objective), **found, "seconds": time.perf_counter() - started}


def loss_of(found: Mapping[str, Any], objective: Any) -> float | None:
    """Compute the total loss from the loss terms in a result of ``measures``, or None if the loss terms are None."""
    if found["ce"] is None:
        return None
    return objective.ce * found["ce"] + objective.l1 * found["l1"] + objective.confidence * found["confidence"]
