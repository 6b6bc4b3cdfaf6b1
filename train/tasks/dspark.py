"""``task=dspark``: trains a drafter (for speculative decoding) for a frozen backbone.

A step is ``train.loop.train_step`` on the drafter. The backbone runs once over each batch, without gradients; all
anchors of the batch (``train/dspark/anchors.py``) share this pass. Checkpoints contain only the drafter; the export
contains backbone and drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from model.dspark import DraftDenominators, DraftLosses
from train.build import Batch, Run, build
from train.checkpoint.run_state import TrainerState
from train.config.schema import Config
from train.dspark.anchors import with_anchors
from train.dspark.evaluate import evaluate, loss_of, measures
from train.dspark.log import DrafterReporter
from train.errors import user_errors
from train.logging.log import Reporter
from train.loop import advance_counters, over_batches, repeat, train_step
from train.session import begin, report_end, run_logger, run_session


def run(config: Config) -> None:
    """Train the run in ``config.run_dir`` from the start or from its last checkpoint, and print the results.

    Raises:
        InputError, DataError, OSError: the configuration or the data cannot be used.
        NonFiniteError, Interrupted: the run ended early, see ``train.loop.repeat``.
    """
    with run_session(config) as (world, folder, changes):
        with user_errors():
            objects = build(config, world)
            state = objects.resume(folder) if folder else begin(objects)
        with run_logger(objects, state, folder, changes, DrafterReporter) as reporter:
            train(objects, state, reporter)
            _summarise(objects, state, reporter)


def train(run: Run, state: TrainerState, reporter: Reporter) -> None:
    """Train on ``run.train_batches`` until the end of the run; see ``train.loop.repeat``."""
    repeat(run, state, reporter, over_batches(run, state, partial(step, run, state)), partial(evaluate, run), run.save)


def step(
    run: Run,
    state: TrainerState,
    read: list,
    waited: float,
    started: float,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Take one optimizer step on ``read``, the micro-batches of this process.

    Updates the counters in ``state`` and returns the step's record.
    """
    settings, groups = run.dspark, run.world.row_groups
    rows = run.config.task.division_of_step(groups)[0]
    first = state.step * rows * groups * run.micro_batches + run.world.row_group * rows
    micro_batches = [
        run.prepare(with_anchors(batch, run.config.seed, first + n * rows * groups, settings.tokens_per_anchor))
        for n, batch in enumerate(read)
    ]

    def losses_of(batch: Batch, denominators: DraftDenominators) -> DraftLosses:
        return run.model.losses(**batch, denominators=denominators, objective=settings.objective)

    numbers = train_step(run, micro_batches, state.step, state.tokens, losses_of, stopped=stopped)
    common, found = advance_counters(run, state, numbers, waited, started), measures(numbers)
    return {**common, "loss": loss_of(found, settings.objective), **found}


def _summarise(run: Run, state: TrainerState, reporter: Reporter) -> None:
    """Log the last lines of a run: its results, and the files that it wrote."""
    first, last = state.first_valid, state.last_valid
    assert first is not None and last is not None
    reporter.stop_bar()
    alpha = ", ".join(f"{value:.3f}" if value is not None else "-" for value in last["alpha"])
    result = (
        f"expected accepted length on held-out rows: first {first['tau']:.3f} final {last['tau']:.3f} tokens per "
        f"block; acceptance by slot {alpha}; calibration error {last['ece']:.3f}"
    )
    report_end(run, state, reporter, [result])
