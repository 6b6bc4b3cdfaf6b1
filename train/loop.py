"""The training loop.

Read ``train_step`` first, which is one whole optimizer step; then read ``train`` and ``repeat``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from model import Losses
from model.dspark import DraftLosses
from model.no_wait import raise_faults
from optim import balance_step_, clip_
from train.build import Batch, Run
from train.checkpoint.background import Background
from train.checkpoint.run_state import TrainerState
from train.config.schema import TaskConfig
from train.errors import Interrupted, NonFiniteError, user_errors
from train.evaluation.evaluate import evaluate
from train.evaluation.tasks import measure, prepare
from train.logging.log import Reporter, memory_gib
from train.logging.profile import StepTrace
from train.logging.records import load_record
from train.signals import stop_signals


def train_step(
    run: Run,
    batches: list[Batch],
    step: int,
    tokens: int,
    losses_of: Callable[[Batch, Any], Losses | DraftLosses] | None = None,
    dummy_batches: int = 0,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Take one optimizer step over the micro-batches of all ranks and return its record.

    The step is the same as for a single batch with all rows: every loss is divided by the loss denominators of the
    whole step, so the gradients of micro-batches and ranks add up. The router biases are changed once, after the
    update, by the expert load of the whole step. The numbers in the record are sums or means over the whole step and
    the same on every rank.

    Args:
        batches: the micro-batches of this rank; their number must be the same on every rank. Micro-batches that are
            still on the CPU are moved to the model's device one at a time.
        step, tokens: number of steps and of tokens trained before this step; the schedule depends on them.
        losses_of: computes the losses of one micro-batch from the batch and the step's loss denominators; None means
            ``model.losses``.
        dummy_batches: number of micro-batches at the end of ``batches`` that add nothing to loss or gradient. They let
            a rank with less data take part in the communication of the other ranks.
        stopped: says whether this process was asked to stop. Entry ``stop`` of the record is the number of ranks that
            had been asked to stop before the end of the backward passes; the ranks exchange this number together with
            their losses.

    Raises:
        NonFiniteError: a loss or the gradient is not finite; raised on every rank, before any weight is updated.
    """
    model, optimizer, settings, world = run.model, run.optimizer, run.config.optim, run.world
    losses_of = losses_of or (lambda batch, denominators: model.losses(**batch, denominators=denominators))
    lr = settings.schedule.lr(step, tokens)
    optimizer.set_lr(lr, settings.schedule.factors(tokens))
    is_real = [number < len(batches) - dummy_batches for number in range(len(batches))]
    each = [model.loss_denominators(**batch) for batch in batches]
    counted = torch.stack([own.to_tensor() * real for own, real in zip(each, is_real, strict=True)]).sum(0)
    denominators = type(each[0]).from_tensor(world.sum_(counted.to(run.device)))
    sums: dict[str, torch.Tensor] = {}
    model.train()  # LoRA adapters may have dropout
    for number, (batch, real) in enumerate(zip(batches, is_real, strict=True), start=1):
        with run.autocast():
            losses = losses_of(run.to_device(batch), denominators)
        run.engine.backward(losses.total * real, last=number == len(batches))
        for name, value in _loss_sums(losses).items():
            sums[name] = sums.get(name, 0) + value * real
    model.eval()
    if (counts := run.source_counts()) is not None:
        sums["source_counts"] = counts
    # In the same exchange as the losses: which parameters have a gradient on some rank, and who was asked to stop.
    sums |= {"present": run.engine.present(), "stop": torch.tensor(int(stopped()), device=run.device)}
    sums = world.sum_all(sums)
    run.engine.reduce(sums.pop("present"))
    raise_faults(model)  # wrong token or expert ids, noted on the device during the step and read only here
    norm = clip_(optimizer.active_parameters(), settings.clip, optimizer.parts, optimizer.collected)
    check_finite(sums["total"], norm, step + 1)
    run.engine.step()
    balance_routers(run, sums["expert_load"])
    return {"lr": lr, "grad_norm": norm, "num_tokens": denominators.num_tokens, **sums}


def balance_routers(run: Run, load: torch.Tensor) -> None:
    """Update the router biases by the expert load of a step, as ``optim.router_bias_mode`` says.

    ``separate`` updates the text biases by the load of text tokens and the image biases by the load of image tokens,
    ``shared`` updates both by the total load, and ``off`` updates neither. load: number of tokens that each expert
    received in the whole step, int64 [layers, 2 (text, images), experts].
    """
    settings = run.config.optim
    if settings.router_bias_mode == "shared":
        load = load.sum(1, keepdim=True).expand_as(load)
    if settings.router_bias_mode != "off":
        balance_step_(run.model.router_biases(), load, settings.router_bias_rate)


def train(run: Run, state: TrainerState, reporter: Reporter) -> None:
    """Train on ``run.train_batches`` until ``task.tokens`` tokens are trained (see ``repeat``)."""

    def step(micro_batches: list[Batch], waited: float, started: float, stopped: Callable[[], bool]) -> dict[str, Any]:
        numbers = train_step(run, micro_batches, state.step, state.tokens, stopped=stopped)
        return pretrain_record(run, state, numbers, waited, started)

    take = over_batches(run, state, step, reporter.log)
    repeat(run, state, reporter, take, partial(evaluate, run, say=reporter.log), run.save)


def over_batches(
    run: Run,
    state: TrainerState,
    step: Callable[[list[dict[str, Any]], float, float, Callable[[], bool]], dict[str, Any]],
    say: Callable[[str], None] = lambda line: None,
) -> Callable[[Callable[[], bool]], dict[str, Any] | None]:
    """Return a function for ``repeat`` that reads the micro-batches of this process from ``run.train_batches`` and
    takes a step on them. A background thread reads the micro-batches of the next step and computes their layouts. Rows
    have the length that ``task.length_schedule`` gives for the tokens trained so far.

    Args:
        state: the counters of the run.
        step: ``step(micro_batches, seconds, began, stopped)`` takes the step and returns its record; `micro_batches`
            are on the CPU, with their layouts (see ``Run.lay_out``), `seconds` is the time spent waiting for them,
            `began` the time at which the wait began, and `stopped` is for ``train_step``. Entry ``stop`` of the record
            says whether some rank was asked to stop; the run then stops before the next step.
        say: receives a line for the log when rows become longer.
    """
    given = run.config.task
    batches: Generator[dict[str, Any], None, None] | None = None
    # Whether some rank was asked to stop. The record of each step says it; before the first step the ranks ask each
    # other.
    stop: bool | None = None

    def take(stopped: Callable[[], bool]) -> dict[str, Any] | None:
        nonlocal batches, stop
        if run.world.any(stopped()) if stop is None else stop:
            return None
        started, task = time.perf_counter(), given.at(state.tokens)
        count = task.division_of_step(run.world.row_groups)[1]
        if given.length_schedule and task.seq_len != run.train_batches.seq_len:
            position = run.position()
            if batches is not None:
                batches.close()
                batches = None
            run.continue_at(task, position)
            size = task.step_text(run.world.size, run.world.parallel.context.size)
            say(f"rows of {task.seq_len:,} tokens from step {state.step + 1} on; {size}")
        if batches is None:
            batches = run.train_batches.ahead(run.lay_out, count)
        read = [next(batches) for _ in range(count)]
        record = step(read, time.perf_counter() - started, started, stopped)
        stop = record.pop("stop")
        return record

    return take


def repeat(
    run: Run,
    state: TrainerState,
    reporter: Reporter,
    step: Callable[[Callable[[], bool]], dict[str, Any] | None],
    evaluation: Callable[[Callable[[], bool]], dict[str, Any] | None],
    save: Callable[[TrainerState, Background | None], Path],
    publish: Callable[[], None] = lambda: None,
) -> None:
    """Take steps until ``task.tokens`` tokens are trained, evaluating and saving along the way. Every training task
    uses this function.

    Args:
        step: ``step(stopped)`` takes a step, advances ``state`` and returns the step's record. ``stopped()`` says
            whether the run was asked to stop; if any rank was, ``step`` may return None on all ranks.
        evaluation: evaluates and returns the record, or None on all ranks if the run was asked to stop. An interrupted
            evaluation is repeated when the run continues.
        save: writes the run state.
        publish: called before the first step and after every step, to hand out the current weights.

    Raises:
        InputError, DataError: a task of ``task.eval_tasks`` cannot be run.
        Interrupted: a rank received SIGUSR1, SIGTERM or Ctrl-C; all ranks stop after the same step, and the state is
            saved before this is raised.
        NonFiniteError: a step had a loss or gradient that is not finite; the last checkpoint is unchanged.
    """
    task, saving = run.config.task, run.config.checkpoint
    with user_errors():
        positions = run.backbone.config.text.max_position_embeddings
        prepared = prepare(task.eval_tasks, run.tokenizer, positions, run.config.seed)

    def stopped() -> bool:
        return bool(received)

    def evaluate_if_due() -> bool:
        """Evaluate if an evaluation is due. Returns False if the evaluation was interrupted."""
        if not _evaluation_due(task, state):
            return True
        if state.first_valid is None:
            reporter.log("evaluating before the first step ...")
        result = evaluation(stopped)
        if result is not None and prepared:
            measured = measure(run, prepared, stopped, reporter.log)
            result = None if measured is None else {**result, "tasks": measured}
        if result is None:
            return False
        state.last_valid = {"step": state.step, "tokens": state.tokens, **result}
        state.first_valid = state.first_valid or state.last_valid
        reporter.evaluation(state.last_valid)
        return True

    background = Background() if saving.asynchronous else None
    has_stepped = False  # whether this process has taken a step
    trace = StepTrace(run.config.logger.profiled, run.config.run_dir / "profile", run.world.rank)
    with stop_signals() as received, background or nullcontext(), trace:
        publish()
        while evaluate_if_due():
            done = state.tokens >= task.tokens
            if has_stepped and (done or state.step % saving.every == 0):
                save(state, background)
            if done:
                return
            if not has_stepped:
                run.world.start.mark("evaluation")
            with trace.step(state.step + 1):
                record = step(stopped)
            if record is None:
                break
            if not has_stepped:
                run.world.start.mark("first step")
                reporter.log(str(run.world.start))
            reporter.step(record)
            if background:
                background.check()
            publish()
            has_stepped = True
        _stop(run, state, received, save, background)


def _evaluation_due(task: TaskConfig, state: TrainerState) -> bool:
    """Return whether the run has reached a step after which it evaluates."""
    if state.last_valid is None:
        return True
    wanted = state.tokens >= task.tokens or state.step % task.eval_every == 0
    return wanted and state.last_valid.get("step", state.step) != state.step


def check_finite(loss: torch.Tensor, norm: torch.Tensor, step: int) -> None:
    """Raise ``NonFiniteError`` if the loss or the gradient norm is not finite.

    ``train_step`` calls this function before it updates the weights.
    """
    for name, value in (("loss", float(loss)), ("gradient norm", float(norm))):
        if not math.isfinite(value):
            raise NonFiniteError(
                f"the {name} is {value} at step {step}; the update was not applied, the last checkpoint is unchanged. "
                "Lower optim.schedule.peak, raise optim.schedule.warmup_steps or check the data, then run it again"
            )


def _stop(
    run: Run,
    state: TrainerState,
    received: list[str],
    save: Callable[[TrainerState, Background | None], Path],
    background: Background | None,
) -> NoReturn:
    """Save the state of a run that was asked to stop, then raise ``Interrupted``. All ranks call this together.

    Raises:
        Interrupted: always, after saving; the message names the signal that a rank received.
    """
    where = f"state saved in {save(state, background)}" if state.step else "nothing trained yet"
    if background:
        background.wait()
    cause = next(filter(None, run.world.gather("".join(received[:1]))))
    raise Interrupted(f"Stopped by {cause} after step {state.step}, {where}. Run the same command to continue.")


def _loss_sums(losses: Losses | DraftLosses) -> dict[str, torch.Tensor]:
    """Return the numbers of a micro-batch that are summed over the step.

    The sums stay on the device, so that no micro-batch waits for the CPU.
    """
    return {name: value.detach() for name, value in losses._asdict().items()}


def pretrain_record(
    run: Run, state: TrainerState, numbers: dict[str, Any], waited: float, started: float
) -> dict[str, Any]:
    """Add a finished step to the counters in ``state`` and return the step's record for the log."""
    common, targets = advance_counters(run, state, numbers, waited, started), int(numbers["supervised"])
    # Conversations can be cut so short that no target token is left.
    loss = float(numbers["lm_sum"]) / targets if targets else None
    return {
        **common,
        "loss": loss,
        "total_loss": float(numbers["total"]),
        **layer_record(numbers),
        **source_record(run, numbers),
        **({"seq_len": run.train_batches.seq_len} if run.config.task.length_schedule else {}),
    }


def advance_counters(
    run: Run, state: TrainerState, numbers: dict[str, Any], waited: float, started: float
) -> dict[str, Any]:
    """Add a finished step to the counters in ``state``. Returns the part of the step's record that is the same for all
    tasks that train on ``run.train_batches``.

    numbers: the result of ``train_step``. waited: seconds spent waiting for data. started: time at which the step began
    (``time.perf_counter``).
    """
    real = int(numbers["num_tokens"])
    seconds = time.perf_counter() - started
    state.step, state.tokens, state.seconds = state.step + 1, state.tokens + real, state.seconds + seconds
    return {
        "step": state.step,
        "tokens": state.tokens,
        "grad_norm": float(numbers["grad_norm"]),
        "lr": numbers["lr"],
        "tokens_per_second": real / seconds,
        "data_wait": waited / seconds,
        "seconds": seconds,
        "memory_gib": memory_gib(run.device),
        "stop": bool(numbers["stop"]),  # for ``over_batches``, which takes it out
    }


def source_record(run: Run, numbers: dict[str, Any]) -> dict[str, Any]:
    """Return what has been read of each source of a mixture, from the numbers of ``train_step``; empty without a
    mixture.
    """
    sources = run.train_batches.sources(numbers.get("source_counts"))
    return {"sources": sources} if sources else {}


def layer_record(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return the KL divergence of every indexer and the expert load of every layer, from the numbers of
    ``train_step``.
    """
    queries = numbers["index_queries"].clamp(min=1)
    return {
        "index_kl": (numbers["index_kl_sum"] / queries).tolist(),
        "expert_load": load_record(numbers["expert_load"]),
    }
