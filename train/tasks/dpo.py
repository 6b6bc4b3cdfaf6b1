"""``task=dpo``: direct preference optimisation on pairs of a chosen and a rejected answer.

A step is ``train.loop.train_step`` with the DPO objective (``train/dpo/objective.py``). The reference policy is the
model of ``init_from``. With LoRA, the reference policy is the trained model without its adapter. Otherwise, the
reference policy is a second, frozen model, which is split over the processes like the trained model, and whose weights
stay packed in memory if the checkpoint is quantised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from model import LossDenominators, Losses
from train.build import Batch, Run, build
from train.checkpoint.run_state import TrainerState
from train.config.schema import Config
from train.dpo.evaluate import evaluate, inputs_of, means, objective_of, prepared
from train.dpo.log import PreferenceReporter
from train.errors import user_errors
from train.logging.log import Reporter
from train.loop import advance_counters, layer_record, over_batches, repeat, train_step
from train.rl.batch import add_sums
from train.rl.reference import BaseModel, Copy, Reference, load_frozen
from train.session import begin, report_end, run_logger, run_session


def run(config: Config) -> None:
    """Train the run in ``config.run_dir`` from the start or from its last checkpoint, and print the results.

    Raises:
        InputError, DataError, OSError: the configuration or the data cannot be used.
        NonFiniteError, Interrupted: the run ended early, see ``train.loop.repeat``.
    """
    with run_session(config) as (world, folder, changes):
        with user_errors():
            objects = build(config, world, draw=folder is None and config.init_from is None)
            reference = make_reference(objects)
            state = objects.resume(folder) if folder else begin(objects)
        with run_logger(objects, state, folder, changes, PreferenceReporter) as reporter:
            train(objects, reference, state, reporter)
            _summarise(objects, state, reporter)


def make_reference(run: Run) -> Reference:
    """Return the reference policy: the policy of ``init_from``, before any training."""
    if run.config.lora.on:
        return BaseModel(run.model)
    return Copy(load_frozen(run, run.config.initial_checkpoint, run.world.parallel).eval())


def train(run: Run, reference: Reference, state: TrainerState, reporter: Reporter) -> None:
    """Train on ``run.train_batches`` until the end of the run; see ``train.loop.repeat``."""
    take = over_batches(run, state, partial(step, run, reference, state))
    repeat(run, state, reporter, take, partial(evaluate, run, reference), run.save)


def step(
    run: Run,
    reference: Reference,
    state: TrainerState,
    read: list[Batch],
    waited: float,
    started: float,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Take one optimizer step on ``read``, the micro-batches of this process.

    Updates the counters in ``state`` and returns the step's record.
    """
    micro_batches = [prepared(run, batch) for batch in read]
    pairs = run.world.sum_(torch.tensor(sum(batch["pairs"] for batch in micro_batches) * run.world.counts_rows))
    sums: dict[str, torch.Tensor] = {}

    def losses_of(batch: Batch, denominators: LossDenominators) -> Losses:
        objective = objective_of(run, batch, reference)
        per_pair = dataclasses.replace(denominators, supervised=pairs.to(denominators.supervised))
        found = run.model.losses(**inputs_of(batch), denominators=per_pair, objective=objective)
        add_sums(sums, objective.sums)
        return found

    numbers = train_step(run, micro_batches, state.step, state.tokens, losses_of, stopped=stopped)
    count = int(pairs)
    return {
        **advance_counters(run, state, numbers, waited, started),
        **means(run.world.sum_all(sums), count),
        "pairs": count,
        **layer_record(numbers),
    }


def _summarise(run: Run, state: TrainerState, reporter: Reporter) -> None:
    """Log the last lines of a run: its results, and the files that it wrote."""
    first, last = state.first_valid, state.last_valid
    assert first is not None and last is not None
    reporter.stop_bar()
    result = (
        f"held-out pairs: first loss {first['loss']:.4f}, final loss {last['loss']:.4f}; the chosen answer has the "
        f"higher reward in {last['accuracy']:.1%} of {last['pairs']} pairs; mean margin {last['margin']:.3f}"
    )
    report_end(run, state, reporter, [result])
