"""Writes the metrics of a run: a log line per step, ``metrics.jsonl``, a progress bar, a plot, Weights & Biases, and
TensorBoard.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data.errors import naming
from train.checkpoint.run_state import TrainerState
from train.config.schema import Config
from train.logging import wandb
from train.logging.plot import Panel, Series, available, draw
from train.logging.records import scalars
from train.logging.tensorboard import TensorBoard
from train.logging.text import visible

MOST_POINTS = 5000  # number of records kept for the plot


class Reporter:
    """Writes the record of every step and evaluation to the log, ``metrics.jsonl``, the plot, W&B and TensorBoard.

    A resumed run appends to the files in the run directory. The records of steps that will be repeated are first
    removed from ``metrics.jsonl``, but the log lines of these steps stay in ``train.log``. The id of the W&B run is
    also stored in the run directory, so that a resumed run continues the same W&B run.
    """

    picture = "loss.png"
    drawn: tuple[str, ...] = ("kind", "tokens", "loss")  # fields of a record that are kept for the plot

    def __init__(self, config: Config, state: TrainerState):
        self.directory = config.run_dir
        self.total_tokens = config.task.tokens
        self.points = self._reopen(state.step)
        self.jsonl = open(self.directory / "metrics.jsonl", "a", encoding="utf-8", buffering=1)
        self.text = open(self.directory / "train.log", "a", encoding="utf-8", buffering=1)
        self.console = Console(soft_wrap=True, highlight=False, markup=False)
        self.bar = self._start_bar(state) if config.logger.progress and self.console.is_terminal else None
        self.trackers: list[Any] = [wandb.start(config)] if config.logger.wandb else []
        if config.logger.tensorboard:
            self.trackers.append(TensorBoard(self.directory / "tensorboard", state.step + 1))
        if config.logger.wandb:
            self.log(wandb.place(self.trackers[0], config))
        if not available():
            self.log(f"{self.picture} is not drawn: matplotlib is not installed (pip install matplotlib)")

    def log(self, line: str) -> None:
        """Write a line of text to the screen and to ``train.log``."""
        line = visible(line)
        self.console.print(line)
        with naming(self.text.name):
            self.text.write(line + "\n")

    def step(self, record: dict[str, Any]) -> None:
        """Write the metrics of one optimizer step."""
        self.log(self.step_line(record))
        self._record({"kind": "train", **record})
        if self.bar is not None:
            loss, done = record.get("loss"), min(record["tokens"], self.total_tokens)
            numbers = {"loss": math.nan if loss is None else loss, "speed": record["tokens_per_second"]}
            self.bar.update(self.task, completed=done, **numbers)

    def evaluation(self, record: dict[str, Any]) -> None:
        """Write the metrics of one evaluation."""
        self.log(self.evaluation_line(record))
        for name, result in record.get("tasks", {}).items():
            self.log(f"step={record['step']} {task_line(name, result)}")
        self._record({"kind": "valid", **record})
        self.plot()

    def plot(self) -> Path | None:
        """Draw the plot of all records so far. Returns its path, or None if matplotlib is not installed."""
        if not available():
            return None
        path = self.directory / self.picture
        self.draw(self.points, path)
        return path

    def step_line(self, record: Mapping[str, Any]) -> str:
        return step_line(record)

    def evaluation_line(self, record: Mapping[str, Any]) -> str:
        return evaluation_line(record)

    def draw(self, records: list[dict[str, Any]], path: Path) -> None:
        """Plot training and validation loss against the number of trained tokens."""
        chosen = {
            kind: [r for r in records if r["kind"] == kind and r["loss"] is not None] for kind in ("train", "valid")
        }
        series = [
            Series(kind, [r["tokens"] for r in some], [r["loss"] for r in some], kind) for kind, some in chosen.items()
        ]
        draw(path, [Panel("tokens", "loss (nats per token)", series)])

    def stop_bar(self) -> None:
        """Remove the progress bar from the screen when training is over."""
        if self.bar is not None:
            self.bar.stop()

    def close(self, exit_code: int = 0) -> None:
        """Write pending data and close all files. W&B is told the exit code of the process, so that W&B does not list a
        failed run as finished.
        """
        self.stop_bar()
        for tracker in self.trackers:
            tracker.finish(exit_code)
        self.jsonl.close()
        self.text.close()

    def _record(self, record: dict[str, Any]) -> None:
        self._remember(self.points, record)
        with naming(self.jsonl.name):
            self.jsonl.write(json.dumps(record) + "\n")
        kind = record["kind"]
        flat = {f"{kind}/{key}": value for key, value in scalars(record)} if self.trackers else {}
        for tracker in self.trackers:
            # Without its own step number, W&B would count the records of every offline folder from 0 again.
            tracker.log({**flat, "step": record["step"], "tokens": record["tokens"]}, step=record["step"])

    def _reopen(self, step: int) -> list[dict[str, Any]]:
        path = self.directory / "metrics.jsonl"
        if not path.exists():
            return []
        points: list[dict[str, Any]] = []
        end = 0  # length of the records that stay; records of later steps follow them
        with open(path, "r+b") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except ValueError:  # a killed process may leave an incomplete last line
                    break
                if step == 0 or record["step"] > step:
                    break
                self._remember(points, record)
                end += len(line)
            file.truncate(end)
        return points

    def _remember(self, points: list[dict[str, Any]], record: Mapping[str, Any]) -> None:
        """Append the plotted fields of a record to ``points``.

        If ``points`` has more than ``MOST_POINTS`` items, every second training record is removed from it.
        """
        points.append({key: record[key] for key in self.drawn if key in record})
        if len(points) > MOST_POINTS:
            train = [point for point in points if point["kind"] == "train"]
            gone = set(map(id, train[1::2]))
            points[:] = [point for point in points if id(point) not in gone]

    def _start_bar(self, state: TrainerState) -> Progress:
        bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:.0f} tok/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task = bar.add_task("train", total=self.total_tokens, completed=state.tokens, loss=math.nan, speed=0.0)
        bar.start()
        return bar


class NullReporter(Reporter):
    """A reporter that writes nothing, for all ranks except rank 0."""

    def __init__(self) -> None: ...

    def log(self, line: str) -> None: ...
    def step(self, record: dict[str, Any]) -> None: ...
    def evaluation(self, record: dict[str, Any]) -> None: ...
    def plot(self) -> Path:
        return Path()

    def stop_bar(self) -> None: ...
    def close(self, exit_code: int = 0) -> None: ...


def step_line(record: Mapping[str, Any]) -> str:
    """Format the record of a step as one line of ``key=value`` pairs.

    For each modality (text, images), the expert load of the least balanced layer is given as max/mean and entropy in
    nats.
    """
    parts = [
        f"step={record['step']}",
        f"loss={shown(record['loss'], '.4f')}",
        *speed_fields(record),
    ]
    if record["index_kl"]:
        parts.append("index_kl=" + ",".join(f"{value:.1e}" for value in record["index_kl"]))
    for modality, load in record["expert_load"].items():
        parts.append(f"load_{modality}={max(load['max_over_mean']):.2f}/{min(load['entropy']):.3f}")
    return " ".join(parts)


def speed_fields(record: Mapping[str, Any]) -> list[str]:
    """Return the ``key=value`` pairs that the step lines of all tasks that train on packed rows contain: the size of
    the update, the number of tokens, speed and memory.
    """
    return [
        f"grad_norm={record['grad_norm']:.3f}",
        f"lr={record['lr']:.3e}",
        f"tokens={record['tokens']}",
        f"tok/s={record['tokens_per_second']:.0f}",
        f"data_wait={record['data_wait']:.1%}",
        f"mem={record['memory_gib']:.2f}GiB",
    ]


def evaluation_line(record: Mapping[str, Any]) -> str:
    """Format the record of an evaluation as one line of ``key=value`` pairs.

    With a mixture of data sources, the line contains the loss on each source; the recall of the indexers comes last.
    """
    parts = [
        f"step={record['step']}",
        f"valid_loss={record['loss']:.4f}",
        f"bits_per_byte={record['bits_per_byte']:.4f}",
        f"valid_tokens={record['targets']}",
        *([f"exact_match={record['exact_match']:.1%} of {record['answers']}"] if "exact_match" in record else []),
        f"seconds={record['seconds']:.1f}",
    ]
    for name, source in record.get("sources", {}).items():
        parts.append(f"{name}: loss={source['loss']:.4f} tokens={source['tokens']} epochs={source['epochs']:.2f}")
    if record["index_recall"]:
        parts.append("index_recall=" + ",".join(shown(value, ".3f") for value in record["index_recall"]))
    return " ".join(parts)


def task_line(name: str, result: Mapping[str, Any]) -> str:
    """Format the results of an evaluation task as one line that is easy to search with grep: ``needle: accuracy=0.2500
    questions=40``.
    """
    numbers = [(key, value) for key, value in result.items() if not isinstance(value, Mapping)]
    shown = (f"{key}={value:.4f}" if isinstance(value, float) else f"{key}={value}" for key, value in numbers)
    return f"{name}: {' '.join(shown)}"


def shown(value: float | None, form: str) -> str:
    """Format a number; the value None, which means that there was nothing to measure, becomes a dash."""
    return "-" if value is None else format(value, form)


def memory_gib(device: torch.device) -> float:
    """Return the peak memory in GiB: allocated GPU memory with CUDA, resident memory of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
