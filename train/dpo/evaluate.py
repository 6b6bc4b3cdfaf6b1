"""Evaluates a ``task=dpo`` run: computes loss, accuracy and rewards on the held-out preference pairs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from train.build import Batch, Run
from train.dpo.objective import PreferenceObjective, answer_numbers, pair_count
from train.evaluation.probe import with_a_token
from train.logging.records import load_record
from train.rl.reference import Reference, log_probs_under


def prepared(run: Run, batch: Batch) -> dict[str, Any]:
    """Prepare a CPU batch of pairs for the model. The prepared batch also has the entries ``answer`` (see
    ``answer_numbers``) and ``pairs``, the number of pairs.
    """
    seq_lens, length = batch["seq_lens"], batch["input_ids"].shape[1]
    answer, pairs = answer_numbers(seq_lens, length), pair_count(seq_lens)
    return {**run.prepare(batch), "answer": answer.to(run.device), "pairs": pairs}


def objective_of(run: Run, batch: Mapping[str, Any], reference: Reference) -> PreferenceObjective:
    """Run the reference policy on a prepared batch and return the DPO objective. Call this function under
    ``run.autocast``.
    """
    assert run.config.dpo is not None
    with reference.model() as model:
        log_probs = log_probs_under(model, batch)
    context = run.world.parallel.context
    return PreferenceObjective(run.config.dpo, batch["answer"], log_probs, batch["pairs"], context)


def inputs_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a prepared batch that ``model.losses`` takes."""
    return {name: value for name, value in batch.items() if name not in ("answer", "pairs")}


def means(sums: Mapping[str, torch.Tensor], pairs: int) -> dict[str, float]:
    """Divide the sums of ``PreferenceObjective`` by the number of pairs."""
    values = torch.stack([sums[name] for name in PreferenceObjective.NAMES]).tolist()  # one transfer from the device
    return {name: value / pairs for name, value in zip(PreferenceObjective.NAMES, values, strict=True)}


@torch.no_grad()
def evaluate(run: Run, reference: Reference, stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
    """Evaluate the model on the held-out pairs. Returns a dictionary with the result of ``means`` over the pairs, and
    the balance of the expert load.

    Nothing in ``run`` changes. Returns None as soon as ``stop`` returns True on any rank.
    """
    started, world = time.perf_counter(), run.world
    sums = {name: torch.zeros((), dtype=torch.float64, device=run.device) for name in PreferenceObjective.NAMES}
    pairs, load = torch.zeros((), dtype=torch.int64), torch.zeros(())
    for batch in run.valid_batches:
        if world.any(stop()):
            return None
        batch, real = with_a_token(batch)
        batch = prepared(run, batch)
        inputs = inputs_of(batch)
        with run.autocast():
            objective = objective_of(run, batch, reference)
            denominators = run.model.loss_denominators(**inputs)
            losses = run.model.losses(**inputs, denominators=denominators, objective=objective)
        sums = {name: value + objective.sums[name] for name, value in sums.items()}
        pairs, load = pairs + batch["pairs"] * world.counts_rows, load + losses.expert_load * real
    count = int(world.sum_(pairs))
    return {
        **means(world.sum_all(sums), count),
        "pairs": count,
        "expert_load": load_record(world.sum_(load)),
        "seconds": time.perf_counter() - started,
    }
