"""Evaluates a language model on held-out rows, for runs that train on text or conversations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from data.loader import MixedValidation
from data.progress import Advance, progress
from train.build import Run
from train.evaluation.exact_match import ExactMatch
from train.evaluation.probe import Probe, with_a_token
from train.logging.records import load_record


@torch.no_grad()
def evaluate(
    run: Run, stop: Callable[[], bool] = lambda: False, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any] | None:
    """Evaluate the model on the held-out rows and return the record of the evaluation.

    The record contains the cross-entropy in nats per token and in bits per byte, the balance of the expert load, and
    the recall of the indexers on the first documents. For conversations, the record also contains the share of answers
    in which every token is right. Nothing in ``run`` changes. Returns None as soon as ``stop`` returns True on any
    rank. ``say`` receives lines about the progress of a long evaluation.
    """
    with progress("evaluating", len(run.valid_batches), say) as advance:
        return _evaluate(run, stop, advance)


def _evaluate(run: Run, stop: Callable[[], bool], advance: Advance) -> dict[str, Any] | None:
    started = time.perf_counter()
    nats = torch.zeros((), dtype=torch.float64)
    targets, probe = torch.zeros((), dtype=torch.int64), Probe(run)
    load: Any = 0
    chat, answers = run.config.task.kind == "sft", torch.zeros(2, dtype=torch.int64)
    mixed = isinstance(run.valid_batches, MixedValidation)
    by_source = {name: torch.zeros(2, dtype=torch.float64) for name in (run.valid_batches.parts if mixed else ())}
    for batch in run.valid_batches:
        if run.world.any(stop()):
            return None
        batch, real = with_a_token(batch)
        inputs = run.prepare(batch)
        with run.autocast():
            judge = ExactMatch() if chat else None
            losses = run.model.losses(**inputs, denominators=run.model.loss_denominators(**inputs), objective=judge)
            probe.add(run.to_device(batch))
        nats, targets = nats + float(losses.lm_sum), targets + int(losses.supervised)
        if mixed:
            by_source[run.valid_batches.current] += torch.tensor(
                [float(losses.lm_sum), int(losses.supervised)]
            ).double()
        load = load + losses.expert_load * real
        advance(1)
        if judge:
            answers += judge.count(inputs["seq_lens"], batch["input_ids"].shape[1], run.world.parallel.context).cpu()
    right, asked = run.world.sum_(answers).tolist()
    count = int(run.world.sum_(targets))
    loss, load = float(run.world.sum_(nats)) / count, run.world.sum_(load)
    each = {name: run.world.sum_(sums).tolist() for name, sums in by_source.items()}
    counts = run.source_counts() if mixed else None
    progress = run.train_batches.sources(counts if counts is None else run.world.sum_(counts)) if mixed else {}
    sources = {name: {"loss": sums[0] / sums[1], **progress[name]} for name, sums in each.items()}
    return {
        "loss": loss,
        "bits_per_byte": loss / math.log(2) / run.valid_batches.bytes_per_token,
        "targets": count,
        **({"sources": sources} if mixed else {}),
        **({"exact_match": right / asked, "answers": asked} if chat else {}),
        "index_recall": probe.recall,
        "expert_load": load_record(load),
        "seconds": time.perf_counter() - started,
    }
