"""``task=check``: reads all data of a run and reports what they contain.

This task trains nothing and builds no model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from data import load_tokenizer
from data.check import SplitReport, check_data
from model import ModelConfig
from train.config.schema import Config, counted
from train.errors import InputError, user_errors
from train.logging.text import visible

BAR = 40  # width of the longest bar of a histogram in characters
SAMPLE_CHARACTERS = 1500
OPEN, CLOSE = "⟦", "⟧"  # printed around supervised tokens


def run(config: Config) -> None:
    """Print a table of both splits, a histogram of lengths, the records that are refused (with reasons), and three
    samples.

    Raises:
        InputError: the data cannot be opened, or contain records at which a training run would stop.
        DataError: a file is missing or cannot be read.
    """
    with user_errors():
        tokenizer = load_tokenizer(config.data)
        vision = ModelConfig.from_dict(config.model).vision
        reports = check_data(
            config.data, tokenizer, config.task.seq_len, None if vision is None else dataclasses.asdict(vision)
        )
    print("\n".join(report(config, reports)))
    refused = max(sum(number for number, _ in split.refusals.values()) for split in reports.values())
    if refused and config.data.on_error == "stop":
        raise InputError(f"{refused} records would stop a run; correct them, or skip them with data.on_error=skip")


def report(config: Config, reports: dict[str, SplitReport]) -> Iterator[str]:
    """Yield the lines of the report that ``task=check`` prints."""
    task = config.task
    yield f"data.source={config.data.source} data.paths={config.data.paths}, rows of {task.seq_len} tokens"
    yield from _table(reports)
    train = reports["training"]
    if train.rows and task.global_batch_rows:
        steps = -(-train.rows // task.global_batch_rows)
        yield f"an epoch is {counted(steps, 'step')} of {counted(task.global_batch_rows, 'row')}"
    shown: list[str] = []
    for name, split in reports.items():  # if records are split by content, both splits read all records
        lines = list(_details(split))
        if lines != shown:
            yield from (f"{name}: {line}" if not line.startswith(" ") else line for line in lines)
        shown = lines
    yield from _histogram(train.lengths, task.seq_len)
    for number, sample in enumerate(train.samples, 1):
        yield f"--- sample {number}: supervised tokens are in {OPEN}{CLOSE}"
        text = "".join(f"{OPEN}{visible(run)}{CLOSE}" if taught else visible(run) for run, taught in sample)
        left = len(text) - SAMPLE_CHARACTERS
        yield text if left <= 0 else f"{text[:SAMPLE_CHARACTERS]} ... ({left:,} more characters)"


def _table(reports: dict[str, SplitReport]) -> Iterator[str]:
    rows = {
        "records": lambda r: f"{r.records:,}",
        "documents": lambda r: f"{r.documents:,}",
        "turns": lambda r: f"{r.turns:,}",
        "bytes of text": lambda r: f"{r.bytes:,}",
        "tokens": lambda r: f"{r.tokens:,}",
        "supervised": lambda r: f"{r.supervised:,} ({r.supervised / max(1, r.tokens):.1%})",
        "longest": lambda r: f"{int(r.lengths.max(initial=0)):,}",
        "images": lambda r: f"{r.images:,}",
        "packed rows": lambda r: f"{r.rows:,} ({r.padding:.1%} padding)",
        "refused": lambda r: f"{sum(number for number, _ in r.refusals.values()):,}",
    }
    yield f"{'':<14}" + "".join(f"{name:>24}" for name in reports)
    for title, value in rows.items():
        yield f"{title:<14}" + "".join(f"{value(split):>24}" for split in reports.values())


def _details(split: SplitReport) -> Iterator[str]:
    for shape, number in sorted(split.formats.items()):
        yield f"{number:,} records were read as {shape} (to read them otherwise, set data.format)"
    if split.unused:
        keys = ", ".join(f"{key} ({number:,})" for key, number in sorted(split.unused.items()))
        yield f"keys of records that are not used: {keys}"
    for reason, number in sorted(split.repaired.items()):
        yield f"repaired {number:,} x {reason}"
    for reason, (number, examples) in split.refusals.items():
        yield f"refused {number:,} x {reason}"
        yield from (f"    {visible(example)}" for example in examples)


def _histogram(lengths: np.ndarray, seq_len: int) -> Iterator[str]:
    """Draw a histogram of the lengths of documents, with bins that are powers of two."""
    if not len(lengths):
        return
    steps = np.floor(np.log2(lengths)).astype(np.int64)
    counts = np.bincount(steps)
    yield f"number of documents by length in tokens (a row has {seq_len:,} tokens):"
    for step in range(int(steps.min()), len(counts)):
        bar = "█" * int(np.ceil(BAR * counts[step] / counts.max()))
        yield f"  {2**step:>9,} .. {2 ** (step + 1) - 1:>9,}  {counts[step]:>9,}  {bar}"
