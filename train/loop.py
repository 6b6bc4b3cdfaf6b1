"""The training loop. Read ``train_step`` first: it is the whole of an optimizer step; then ``train`` and ``repeat``."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from model import Losses, indexer_recall
from model.dspark import DraftLosses
from model.vision import START as IMAGE_START
from optim import clip_, load_statistics, update_router_biases_
from train.build import Run
from train.checkpoint import run_state
from train.checkpoint.run_state import Background, TrainerState
from train.config.schema import TaskConfig
from train.distributed.engine import World
from train.evaluation.exact_match import ExactMatch
from train.logging.log import Reporter, memory_gib

Batch = dict[str, torch.Tensor]
MODALITIES = ("text", "image")
PROBE_TOKENS = 1024  # the recall of the indexers costs the square of this


class NonFiniteError(RuntimeError):
    """A loss or gradient was NaN or infinite; the step was not applied."""


class Interrupted(Exception):
    """The process was asked to stop; the run state is saved."""


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
        step, tokens: done before this step; they place it on the schedule.
        losses_of: the losses of one micro-batch, divided by the step's denominators; None: ``model.losses``.
        dummy_batches: how many of the last ``batches`` only keep this rank in step with the others; they count for
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
        with precision(run):
            losses = losses_of(batch, denominators)
        run.engine.backward(losses.total * real)
        for name, value in _loss_sums(losses).items():
            sums[name] = sums.get(name, 0) + value * real
    model.eval()
    run.engine.reduce()
    sums = sum_over_ranks(world, sums)
    norm = clip_(optimizer.active_parameters(), optim.clip, optimizer.parts)
    check_finite(sums["total"], norm, step + 1)
    run.engine.step()
    update_router_biases(run, sums["expert_load"])
    return {"lr": lr, "grad_norm": norm, "num_tokens": denominators.num_tokens, **sums}


def sum_over_ranks(world: World, sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same sums over all ranks, in one call for each dtype."""
    if world.size == 1:
        return sums
    found: dict[str, torch.Tensor] = {}
    for dtype in {value.dtype: None for value in sums.values()}:
        names = [name for name, value in sums.items() if value.dtype == dtype]
        flat = world.sum_(torch.cat([sums[name].flatten() for name in names]))
        parts = flat.split([sums[name].numel() for name in names])
        found |= {name: part.view_as(sums[name]) for name, part in zip(names, parts, strict=True)}
    return found


def update_router_biases(run: Run, load: torch.Tensor) -> None:
    """Move each modality's biases by its own load, both by the total (``shared``), or none.

    ``load``: int64 [layers, 2, experts] of the whole step.
    """
    optim = run.config.optim
    if optim.router_bias_mode == "shared":
        load = load.sum(1, keepdim=True).expand_as(load)
    if optim.router_bias_mode != "off":
        update_router_biases_(run.model.router_biases(), load, optim.router_bias_rate)


@torch.no_grad()
def evaluate(run: Run, stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
    """Cross-entropy on the held-out rows, in nats per token and bits per byte; how even their expert load is; and how
    much of the true top-k attention mass the indexers find on the first of them. Of conversations also how many answers
    are right to the last token. Changes no state. None as soon as ``stop`` says so, on any rank.
    """
    started = time.perf_counter()
    nats = torch.zeros((), dtype=torch.float64)
    targets, load, probe = torch.zeros((), dtype=torch.int64), 0, Probe(run)
    chat, answers = run.config.task.kind == "sft", torch.zeros(2, dtype=torch.int64)
    for batch in run.valid_batches:
        if run.world.any(stop()):
            return None
        batch, real = with_a_token(to_device(batch, run.device))
        with precision(run):
            judge = ExactMatch() if chat else None
            losses = run.model.losses(**batch, denominators=run.model.loss_denominators(**batch), objective=judge)
            probe.add(batch)
        nats, targets = nats + float(losses.lm_sum), targets + int(losses.supervised)
        load = load + losses.expert_load * real
        if judge:
            answers += judge.count(batch["seq_lens"], batch["input_ids"].shape[1]).cpu()
    right, asked = run.world.sum_(answers).tolist()
    nats, targets = float(run.world.sum_(nats)), int(run.world.sum_(targets))
    loss, load = nats / targets, run.world.sum_(load)
    return {
        "loss": loss,
        "bits_per_byte": loss / math.log(2) / run.valid_batches.bytes_per_token,
        "targets": targets,
        **({"exact_match": right / asked, "answers": asked} if chat else {}),
        "index_recall": probe.recall,
        "expert_load": load_record(load),
        "seconds": time.perf_counter() - started,
    }


def with_a_token(batch: Batch) -> tuple[Batch, bool]:
    """The batch, and whether it has a token. One of padding alone (a rank's share of the last rows can be that) gets
    one, unsupervised, for all ranks must run the model together.
    """
    if batch["seq_lens"].any():
        return batch, True
    lengths = batch["seq_lens"].clone()
    lengths[0, 0] = 1
    return {**batch, "seq_lens": lengths}, False


@dataclass
class Probe:
    """``model.indexer_recall`` of every index source on the first held-out documents, at most ``PROBE_TOKENS``: the
    same ones whatever the number of processes and of rows in a batch.
    """

    run: Run
    recall: list[float | None] = field(default_factory=list)  # None where no query sees more entries than the top-k
    seen: int = 0  # tokens of the batches so far, of all ranks
    sums: torch.Tensor | float = 0.0

    def add(self, batch: Batch) -> None:
        """Take all ranks' next ``batch`` into account; all call it together."""
        if self.seen >= PROBE_TOKENS:
            return
        lengths, world, seen = batch["seq_lens"], self.run.world, self.seen
        sizes = world.gather(int(lengths.sum()))
        self.seen += sum(sizes)
        end = seen + sum(sizes[: world.rank]) + lengths.flatten().cumsum(0)
        kept = torch.where(end <= PROBE_TOKENS, lengths.flatten(), 0).view_as(lengths)
        if not world.any(bool(kept.any())):
            if seen or "pixel_values" in batch:
                return
            if world.first:  # the first document alone is longer
                kept[0, 0] = PROBE_TOKENS
        recall = indexer_recall(self.run.model, _first_documents(batch, kept), self._all)
        self.recall = [None if math.isnan(value) else value for value in recall.tolist()]

    def _all(self, sums: torch.Tensor) -> torch.Tensor:
        self.sums = self.run.world.sum_(sums) + self.sums
        return self.sums


def _first_documents(batch: Batch, kept: torch.Tensor) -> Batch:
    """The batch with ``kept``, the lengths of its first documents and then zeros, in place of ``seq_lens``."""
    probe, _ = with_a_token({**batch, "seq_lens": kept})
    if "pixel_values" in batch:
        real = torch.arange(batch["input_ids"].shape[1], device=kept.device) < kept.sum(1, keepdim=True)
        grids = batch["image_grid_hws"][: ((batch["vision_token_types"] == IMAGE_START) & real).sum()]
        probe.update(image_grid_hws=grids, pixel_values=batch["pixel_values"][: grids.prod(1).sum()])
    return probe


def train(run: Run, state: TrainerState, report: Reporter) -> None:
    """Train on ``run.train_batches`` to the end of the run, see ``repeat``."""
    batches = iter(run.train_batches)

    def step(stopped: Callable[[], bool]) -> dict[str, Any] | None:
        if run.world.any(stopped()):
            return None
        started = time.perf_counter()
        micro_batches = [to_device(next(batches), run.device) for _ in range(run.micro_batches)]
        waited = time.perf_counter() - started
        numbers = train_step(run, micro_batches, state.step, state.tokens)
        return _advance(run, state, numbers, waited, started)

    repeat(run, state, report, step, partial(evaluate, run), partial(save, run))


def repeat(
    run: Run,
    state: TrainerState,
    report: Reporter,
    step: Callable[[Callable[[], bool]], dict[str, Any] | None],
    evaluate: Callable[[Callable[[], bool]], dict[str, Any] | None],
    save: Callable[[TrainerState, Background | None], Path],
    publish: Callable[[], None] = lambda: None,
) -> None:
    """The loop of every task: make steps until ``task.tokens``, evaluating and saving on the way.

    Args:
        step: makes a step, moves ``state`` past it and returns its record; or returns None, on all ranks, once what it
            is given to call says on any of them that the run is to stop.
        evaluate: the record of an evaluation; or None, on all ranks, as in a step. One that was stopped is made again
            when the run is continued.
        save: writes the run state.
        publish: called before the first step and after every one, as soon as the weights are new.

    Raises:
        Interrupted: after saving, on SIGUSR1, SIGTERM or Ctrl-C of any rank; all stop after the same step.
        NonFiniteError: the last saved state is the one before.
    """
    task, saving = run.config.task, run.config.checkpoint

    def stopped() -> bool:
        return bool(received)

    def evaluated() -> bool:
        """Evaluate if it is time; whether that is done."""
        if not _evaluation_due(task, state):
            return True
        if state.first_valid is None:
            report.log("evaluating before the first step ...")
        result = evaluate(stopped)
        if result is None:
            return False
        state.last_valid = {"step": state.step, "tokens": state.tokens, **result}
        state.first_valid = state.first_valid or state.last_valid
        report.evaluation(state.last_valid)
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
            report.step(record)
            if background:
                background.check()
            publish()
            unsaved = True
        stop(run, state, received, save, background)


def _evaluation_due(task: TaskConfig, state: TrainerState) -> bool:
    """Whether a run evaluates before it goes on from here, unless it just has."""
    if state.last_valid is None:
        return True
    wanted = state.tokens >= task.tokens or state.step % task.eval_every == 0
    return wanted and state.last_valid.get("step", state.step) != state.step


def save(run: Run, state: TrainerState, background: Background | None = None) -> Path:
    """Write the run state, all ranks together; with ``background`` while training goes on."""
    return run_state.save(
        run.config.run_dir / "checkpoints",
        state,
        model=run.checkpoint_module,
        optimizer=run.optimizer,
        data=run.train_batches.state_dict(),
        model_config=run.model_config.to_dict(),
        keep=run.config.checkpoint.keep,
        background=background,
    )


def resume(run: Run, folder: Path) -> TrainerState:
    """Continue from a checkpoint of this run."""
    return run_state.load(
        folder,
        model=run.checkpoint_module,
        optimizer=run.optimizer,
        set_data=run.train_batches.load_state_dict,
        model_config=run.model_config.to_dict(),
    )


def precision(run: Run) -> torch.autocast:
    """bf16 autocast over fp32 parameters, or nothing."""
    return torch.autocast(run.device.type, torch.bfloat16, enabled=run.config.parallel.precision == "bf16")


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The same batch where the model is."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def check_finite(loss: torch.Tensor, norm: torch.Tensor, step: int) -> None:
    """Raise ``NonFiniteError`` naming what is not a finite number. Call it before the update."""
    for name, value in (("loss", float(loss)), ("gradient norm", float(norm))):
        if not math.isfinite(value):
            raise NonFiniteError(
                f"the {name} is {value} at step {step}; the update was not applied, the last checkpoint stands. Lower "
                "optim.schedule.peak, lengthen optim.schedule.warmup_steps or look at the data, then run it again"
            )


@contextmanager
def stop_signals() -> Iterator[list[str]]:
    """A list that receives the names of SIGUSR1, SIGTERM and SIGINT. A second Ctrl-C acts as usual, at once.

    Slurm sends SIGUSR1 ahead of the time limit, and SIGTERM once more to processes that a job script has signalled
    already, and to those that end after the first: a repeated one ends neither the save that the first began nor, after
    ``Interrupted``, the orderly exit.
    """
    received: list[str] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)
        if number == signal.SIGINT:
            signal.signal(number, before[number])

    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, note)
    ends = False
    try:
        yield received
    except Interrupted:
        ends = True
        raise
    finally:
        for number, handler in before.items():
            if not ends or number == signal.SIGINT:
                signal.signal(number, handler)


def stop(
    run: Run,
    state: TrainerState,
    received: list[str],
    save: Callable[[TrainerState, Background | None], Path],
    background: Background | None,
) -> NoReturn:
    """Save by ``save`` what a run has that was asked to stop before its end. All ranks call it together.

    Raises:
        Interrupted: in the end, naming the signal that any rank received.
    """
    where = f"state saved in {save(state, background)}" if state.step else "nothing trained yet"
    if background:
        background.wait()
    cause = next(filter(None, run.world.gather("".join(received[:1]))))
    raise Interrupted(f"Stopped by {cause} after step {state.step}, {where}. Run the same command to continue.")


def _loss_sums(losses: Losses | DraftLosses) -> dict[str, torch.Tensor]:
    """What adds up over micro-batches; stays on the device, so that no micro-batch waits for the CPU."""
    return {name: value.detach() for name, value in losses._asdict().items()}


def _advance(run: Run, state: TrainerState, numbers: dict[str, Any], waited: float, started: float) -> dict[str, Any]:
    """Move the counters past a finished step; returns its record."""
    real = int(numbers["num_tokens"])
    seconds = time.perf_counter() - started
    state.step, state.tokens, state.seconds = state.step + 1, state.tokens + real, state.seconds + seconds
    queries, targets = numbers["index_queries"].clamp(min=1), int(numbers["supervised"])
    return {
        "step": state.step,
        "tokens": state.tokens,
        "loss": float(numbers["lm_sum"]) / targets if targets else None,  # conversations can be cut to nothing taught
        "total_loss": float(numbers["total"]),
        "grad_norm": float(numbers["grad_norm"]),
        "lr": numbers["lr"],
        "tokens_per_second": real / seconds,
        "data_wait": waited / seconds,
        "seconds": seconds,
        "memory_gib": memory_gib(run.device),
        "index_kl": (numbers["index_kl_sum"] / queries).tolist(),
        "expert_load": load_record(numbers["expert_load"]),
    }


def load_record(load: torch.Tensor) -> dict[str, dict[str, list[float]]]:
    """Per modality that had tokens: load max/mean and entropy (nats) of every layer. ``load``: [layers, 2, experts]."""
    worst, entropy = load_statistics(load)
    present = load.sum((0, 2)) > 0
    return {
        name: {"max_over_mean": worst[:, i].tolist(), "entropy": entropy[:, i].tolist()}
        for i, name in enumerate(MODALITIES)
        if present[i]
    }
