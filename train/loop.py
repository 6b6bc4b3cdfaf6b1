"""The training loop. Read ``train_step`` first: it is the whole of an optimizer step; then ``train`` and ``repeat``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
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
from train.errors import Interrupted, NonFiniteError
from train.evaluation.evaluate import evaluate
from train.logging.log import Reporter, memory_gib
from train.logging.records import load_record
from train.signals import stop_signals


def train_step(
    run: Run,
    batches: list[Batch],
    step: int,
    tokens: int,
    losses_of: Callable[[Batch, Any], Losses | DraftLosses] | None = None,
    dummy_batches: int = 0,
) -> dict[str, Any]:
    """One optimizer step over the micro-batches of all ranks: exactly the step that one batch of all their rows would
    make.

    Every loss is divided by the denominators of the whole step, so the gradients of micro-batches and ranks simply add
    up. The router biases move once, after the update, by the expert load of the whole step. The numbers returned are
    those of the whole step, the same on every rank.

    Args:
        batches: this rank's, equally many on every rank.
        step, tokens: done before this step; they determine the position in the schedule.
        losses_of: the losses of one micro-batch, divided by the step's denominators; None: ``model.losses``.
        dummy_batches: how many of the last ``batches`` only keep this rank in step with the others and count for
            nothing.

    Raises:
        NonFiniteError: on every rank, before anything is updated.
    """
    model, optimizer, optim, world = run.model, run.optimizer, run.config.optim, run.world
    losses_of = losses_of or (lambda batch, denominators: model.losses(**batch, denominators=denominators))
    lr = optim.schedule.lr(step, tokens)
    optimizer.set_lr(lr, optim.schedule.factors(tokens))
    is_real = [number < len(batches) - dummy_batches for number in range(len(batches))]
    each = [model.loss_denominators(**batch) for batch in batches]
    counted = sum(own.to_tensor() * real for own, real in zip(each, is_real, strict=True))
    denominators = type(each[0]).from_tensor(world.sum_(counted))
    sums: dict[str, torch.Tensor] = {}
    model.train()  # an adapter may have dropout
    for batch, real in zip(batches, is_real, strict=True):
        with run.autocast():
            losses = losses_of(batch, denominators)
        run.engine.backward(losses.total * real)
        for name, value in _loss_sums(losses).items():
            sums[name] = sums.get(name, 0) + value * real
    model.eval()
    run.engine.reduce()
    raise_faults(model)
    sums = world.sum_all(sums)
    norm = clip_(optimizer.active_parameters(), optim.clip, optimizer.parts)
    check_finite(sums["total"], norm, step + 1)
    run.engine.step()
    balance_routers(run, sums["expert_load"])
    return {"lr": lr, "grad_norm": norm, "num_tokens": denominators.num_tokens, **sums}


def balance_routers(run: Run, load: torch.Tensor) -> None:
    """Move each modality's biases by its own load (``separate``), both by the total (``shared``), or neither (``off``).

    ``load``: int64 [layers, 2, experts] of the whole step.
    """
    optim = run.config.optim
    if optim.router_bias_mode == "shared":
        load = load.sum(1, keepdim=True).expand_as(load)
    if optim.router_bias_mode != "off":
        balance_step_(run.model.router_biases(), load, optim.router_bias_rate)


def train(run: Run, state: TrainerState, reporter: Reporter) -> None:
    """Train on ``run.train_batches`` to the end of the run, see ``repeat``."""
    batches = iter(run.train_batches)

    def step(stopped: Callable[[], bool]) -> dict[str, Any] | None:
        if run.world.any(stopped()):
            return None
        started = time.perf_counter()
        micro_batches = [run.prepare(next(batches)) for _ in range(run.micro_batches)]
        waited = time.perf_counter() - started
        numbers = train_step(run, micro_batches, state.step, state.tokens)
        return _advance(run, state, numbers, waited, started)

    repeat(run, state, reporter, step, partial(evaluate, run), run.save)


def repeat(
    run: Run,
    state: TrainerState,
    reporter: Reporter,
    step: Callable[[Callable[[], bool]], dict[str, Any] | None],
    evaluate: Callable[[Callable[[], bool]], dict[str, Any] | None],
    save: Callable[[TrainerState, Background | None], Path],
    publish: Callable[[], None] = lambda: None,
) -> None:
    """The loop of every task: take steps until ``task.tokens``, evaluating and saving along the way.

    Args:
        step: takes a step, advances ``state`` and returns its record; or returns None on all ranks, as soon as the
            function it is given says on any rank that the run is to stop.
        evaluate: returns the record of an evaluation; or None on all ranks, as in a step. An interrupted evaluation is
            repeated when the run continues.
        save: writes the run state.
        publish: called before the first step and after every step, as soon as the weights are new.

    Raises:
        Interrupted: after saving, on SIGUSR1, SIGTERM or Ctrl-C of any rank; all stop after the same step.
        NonFiniteError: the last checkpoint is intact.
    """
    task, saving = run.config.task, run.config.checkpoint

    def stopped() -> bool:
        return bool(received)

    def evaluated() -> bool:
        """Evaluate if it is time; returns False if the evaluation was interrupted."""
        if not _evaluation_due(task, state):
            return True
        if state.first_valid is None:
            reporter.log("evaluating before the first step ...")
        result = evaluate(stopped)
        if result is None:
            return False
        state.last_valid = {"step": state.step, "tokens": state.tokens, **result}
        state.first_valid = state.first_valid or state.last_valid
        reporter.evaluation(state.last_valid)
        return True

    background = Background() if saving.asynchronous else None
    unsaved = False
    with stop_signals() as received, background or nullcontext():
        publish()
        while evaluated():
            done = state.tokens >= task.tokens
            if unsaved and (done or state.step % saving.every == 0):
                save(state, background)
            if done:
                return
            record = step(stopped)
            if record is None:
                break
            reporter.step(record)
            if background:
                background.check()
            publish()
            unsaved = True
        _stop(run, state, received, save, background)


def _evaluation_due(task: TaskConfig, state: TrainerState) -> bool:
    """Whether a run evaluates before its next step, unless it has just done so."""
    if state.last_valid is None:
        return True
    wanted = state.tokens >= task.tokens or state.step % task.eval_every == 0
    return wanted and state.last_valid.get("step", state.step) != state.step


def check_finite(loss: torch.Tensor, norm: torch.Tensor, step: int) -> None:
    """Raise ``NonFiniteError`` naming the number that is not finite. To be called before the update."""
    for name, value in (("loss", float(loss)), ("gradient norm", float(norm))):
        if not math.isfinite(value):
            raise NonFiniteError(
                f"the {name} is {value} at step {step}; the update was not applied, the last checkpoint stands. Lower "
                "optim.schedule.peak, lengthen optim.schedule.warmup_steps or look at the data, then run it again"
            )


def _stop(
    run: Run,
    state: TrainerState,
    received: list[str],
    save: Callable[[TrainerState, Background | None], Path],
    background: Background | None,
) -> NoReturn:
    """Save, by ``save``, the state of a run that was asked to stop before its end. All ranks call it together.

    Raises:
        Interrupted: always, at the end, naming the signal that some rank received.
    """
    where = f"state saved in {save(state, background)}" if state.step else "nothing trained yet"
    if background:
        background.wait()
    cause = next(filter(None, run.world.gather("".join(received[:1]))))
    raise Interrupted(f"Stopped by {cause} after step {state.step}, {where}. Run the same command to continue.")


def _loss_sums(losses: Losses | DraftLosses) -> dict[str, torch.Tensor]:
    """What is summed over micro-batches. It stays on the device, so that no micro-batch waits for the CPU."""
    return {name: value.detach() for name, value in losses._asdict().items()}


def _advance(run: Run, state: TrainerState, numbers: dict[str, Any], waited: float, started: float) -> dict[str, Any]:
    """Advance the counters past a finished step; returns its record."""
    real = int(numbers["num_tokens"])
    seconds = time.perf_counter() - started
    state.step, state.tokens, state.seconds = state.step + 1, state.tokens + real, state.seconds + seconds
    queries, targets = numbers["index_queries"].clamp(min=1), int(numbers["supervised"])
    return {
        "step": state.step,
        "tokens": state.tokens,
        "loss": float(numbers["lm_sum"]) / targets
        if targets
        else None,  # conversations can be cut so that no target is left
        "total_loss": float(numbers["total"]),
        "grad_norm": float(numbers["grad_norm"]),
        "lr": numbers["lr"],
        "tokens_per_second": real / seconds,
        "data_wait": waited / seconds,
        "seconds": seconds,
        "memory_gib": memory_gib(run.device),
        "index_kl": (numbers["index_kl_sum"] / queries).tolist(),
        "expert_load": load_record(numbers["expert_load"]),
        **({"sources": sources} if (sources := run.train_batches.sources()) else {}),
    }
