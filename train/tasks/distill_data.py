"""``task=distill_data``: trains a student to match a frozen teacher's distribution at every token of given text.

A step is ``train.loop.train_step`` with the objective of ``train/teacher.py``; no text is generated, unlike in
``task=distill``. The teacher may have another size than the student, and its weights stay packed if its checkpoint is
quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from model import LossDenominators, Losses
from train.build import Batch, Run, build
from train.checkpoint.run_state import TrainerState
from train.config.schema import Config
from train.errors import user_errors
from train.evaluation.evaluate import evaluate
from train.logging.log import Reporter
from train.loop import advance_counters, layer_record, over_batches, repeat, source_record, train_step
from train.rl.batch import add_sums
from train.session import begin, report_end, run_logger, run_session
from train.teacher import Teacher


class DistillationReporter(Reporter):
    """The ``Reporter`` of a run with a teacher, whose step lines also show the KL divergence between teacher and
    student.
    """

    def step_line(self, record: Mapping[str, Any]) -> str:
        return f"{super().step_line(record)} kl={record['kl']:.4f}"


def run(config: Config) -> None:
    """Train the run in ``config.run_dir`` from the start or from its last checkpoint, and print the results.

    Raises:
        InputError, DataError, OSError: the configuration, a checkpoint or the data cannot be used.
        NonFiniteError, Interrupted: the run ended early, see ``train.loop.repeat``.
    """
    with run_session(config) as (world, folder, changes):
        with user_errors():
            objects = build(config, world, draw=folder is None and config.init_from is None)
            teacher = Teacher(objects)
            state = objects.resume(folder) if folder else begin(objects)
        with run_logger(objects, state, folder, changes, DistillationReporter) as reporter:
            take = over_batches(objects, state, partial(step, objects, teacher, state), reporter.log)
            repeat(objects, state, reporter, take, partial(evaluate, objects, say=reporter.log), objects.save)
            _summarise(objects, state, reporter)


def step(
    run: Run,
    teacher: Teacher,
    state: TrainerState,
    read: list[Batch],
    waited: float,
    started: float,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Take one optimizer step on ``read``, the micro-batches of this process.

    Updates the counters in ``state`` and returns the step's record: ``loss`` is the cross-entropy on the text, ``kl``
    the divergence from the teacher, both in nats per token.
    """
    sums: dict[str, torch.Tensor] = {}

    def losses_of(batch: Batch, denominators: LossDenominators) -> Losses:
        objective = teacher.objective(batch)
        inputs = {name: value for name, value in batch.items() if name != "for_teacher"}
        found = run.model.losses(**inputs, denominators=denominators, objective=objective)
        add_sums(sums, objective.sums)
        return found

    micro_batches = [teacher.prepared(batch) for batch in read]
    numbers = train_step(run, micro_batches, state.step, state.tokens, losses_of, stopped=stopped)
    ce, kl = torch.stack([run.world.sum_all(sums)[name] for name in ("ce", "kl")]).tolist()
    targets = max(int(numbers["supervised"]), 1)
    return {
        **advance_counters(run, state, numbers, waited, started),
        "loss": ce / targets,
        "kl": kl / targets,
        "total_loss": float(numbers["total"]),
        **layer_record(numbers),
        **source_record(run, numbers),
    }


def _summarise(run: Run, state: TrainerState, reporter: Reporter) -> None:
    """Log the last lines of a run: its results, and the files that it wrote."""
    first, last = state.first_valid, state.last_valid
    assert first is not None and last is not None
    reporter.stop_bar()
    result = (
        f"validation loss: first {first['loss']:.4f} final {last['loss']:.4f} nats per token, "
        f"final {last['bits_per_byte']:.4f} bits per byte"
    )
    report_end(run, state, reporter, [result])
