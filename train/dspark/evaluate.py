"""Quality of a drafter's proposals: loss terms, expected accepted length, acceptance by slot, calibration,
expert load.
"""

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
    """Statistics from the sums of ``model.dspark.DraftLosses`` over a step or an evaluation.

    ce, l1, confidence: means of the loss terms. tau: expected accepted length of a block, including the backbone's own
    token. alpha: for each slot the mean probability of acceptance, over blocks in which it and all slots before it are
    supervised. ece: mean distance between predicted and true acceptance, over bins of the prediction. A value is None
    if no slot counts for it.
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
    """``measures`` on the held-out rows, with the same anchors in every evaluation and run. Changes no state. Returns
    None as soon as ``stop`` returns True on any rank. Raises ValueError if no held-out row has room for an anchor.
    """
    started, settings, world = time.perf_counter(), run.dspark, run.world
    sums: dict[str, torch.Tensor] = {}
    first_row = 0
    for batch in run.valid_batches:
        if world.any(stop()):
            return None
        batch, _ = with_a_token(batch)
        rows = len(batch["input_ids"])
        batch = with_anchors(batch, 0, first_row + world.rank * rows, settings.tokens_per_anchor, HELD_OUT)
        first_row += world.size * rows
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
        raise ValueError("no held-out row has a place to draft from: two supervised tokens in a row. Hold out more")
    return {"loss": loss_of(found, settings.objective), **found, "seconds": time.perf_counter() - started}


def loss_of(found: Mapping[str, Any], objective: Any) -> float | None:
    """The total loss from the terms that ``measures`` returned, weighted as the objective says; None without terms."""
    if found["ce"] is None:
        return None
    return objective.ce * found["ce"] + objective.l1 * found["l1"] + objective.confidence * found["confidence"]
