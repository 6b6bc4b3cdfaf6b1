"""Prompts: an endless, seeded order over the records of the configured tasks, for any number of processes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data import DataError
from train.errors import InputError
from train.rl.worker import load

Check = Callable[[dict[str, Any]], Any]


class Prompts:
    """Prompt number n is a pure function of the seed: a task drawn by lot, and its next record.

    ``sources``: of each task a JSONL file of records, or the name of a function that draws one (see
    ``train/rl/tasks.py``). A file is gone through in a new order every epoch (of several tasks, by those of its records
    whose numbers fall to it). ``check`` is shown every record of a file, and raises for one that cannot be asked.

    Raises:
        DataError, InputError: a record of a file is none, or ``check`` refuses it; a function cannot be loaded.
    """

    def __init__(self, sources: list[str], seed: int | str, check: Check = lambda record: None):
        self.seed = seed
        self.sources = [_open(source, check) for source in sources]
        self._order: tuple[int, int, list[int]] = -1, -1, []  # of the file and epoch last asked for

    def at(self, number: int) -> tuple[int, dict[str, Any]]:
        """(task, record) of prompt ``number``."""
        task = random.Random(f"{self.seed}/{number}/task").randrange(len(self.sources))
        source = self.sources[task]
        if not isinstance(source, list):
            return task, source(random.Random(f"{self.seed}/{number}/record"))
        epoch, place = divmod(number, len(source))
        if self._order[:2] != (task, epoch):
            order = list(range(len(source)))
            random.Random(f"{self.seed}/{task}/{epoch}").shuffle(order)
            self._order = task, epoch, order
        return task, source[self._order[2][place]]


def messages_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation of a record: its ``messages``, or its ``prompt`` as what a user says."""
    return record["messages"] if "messages" in record else [{"role": "user", "content": record["prompt"]}]


def _open(source: str, check: Check) -> Any:
    if Path(source).suffix == ".jsonl":
        return _read(Path(source).expanduser(), check)
    try:
        return load(source)
    except Exception as error:  # of the user's module: anything
        raise InputError(f"rl.tasks: prompts {source!r} cannot be used: {type(error).__name__}: {error}") from error


def _read(path: Path, check: Check) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataError(str(path), 0, "missing file", "rl.tasks: prompts must be a JSONL file or module:function")
    records = []
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(str(path), line, "invalid JSON", str(error)) from None
        if not isinstance(record, dict) or not (
            isinstance(record.get("prompt"), str) or isinstance(record.get("messages"), list)
        ):
            raise DataError(str(path), line, "no prompt", "a record needs `prompt` (text) or `messages` (a list)")
        try:
            check(record)
        except DataError as error:
            raise DataError(str(path), line, error.reason, error.detail) from None
        except InputError as error:
            raise InputError(f"{path}:{line}: {error}") from None
        records.append(record)
    if not records:
        raise DataError(str(path), 0, "no records")
    return records
