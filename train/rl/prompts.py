"""Draws an endless, seeded sequence of prompts from the records of the tasks in ``rl.tasks``."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data import DataError
from data.errors import BadRecordPolicy
from data.files import decode
from train.errors import InputError
from train.rl.rewards.worker import load

Check = Callable[[dict[str, Any]], Any]
NEEDED = "a record needs `prompt` (text) or `messages` (a list)"


class Prompts:
    """A sequence of prompts. Prompt number n depends only on n and the seed, so any process can compute it.

    A prompt consists of a randomly drawn task and a record of that task. The records of a file are used in a new random
    order in each epoch.

    Args:
        sources: for each task a JSONL file of records, or the name of a function that draws a record (see
            ``rewards/builtin.py``).
        check: called with every record; raises an error if the record cannot be used.

    Raises:
        DataError, InputError: a record is malformed or refused by ``check``; or a function cannot be loaded, or uses
            other randomness than the generator it is given. If a source is a function, only its first record is checked
            here; later records are checked when they are drawn.
    """

    def __init__(self, sources: list[str], seed: int | str, check: Check = lambda record: None):
        self.seed = seed
        self.sources = [_open(source, check) for source in sources]
        self._order: tuple[int, int, list[int]] = -1, -1, []  # task, epoch, order of the file used last
        for source in self.sources:
            if isinstance(source, _Function):
                source.check_repeats(self._draw(0))

    def at(self, number: int) -> tuple[int, dict[str, Any]]:
        """Return the index of the task and the record of prompt ``number``."""
        task = random.Random(f"{self.seed}/{number}/task").randrange(len(self.sources))
        source = self.sources[task]
        if not isinstance(source, list):
            return task, source.record(self._draw(number))
        epoch, place = divmod(number, len(source))
        if self._order[:2] != (task, epoch):
            order = list(range(len(source)))
            random.Random(f"{self.seed}/{task}/{epoch}").shuffle(order)
            self._order = task, epoch, order
        return task, source[self._order[2][place]]

    def _draw(self, number: int) -> str:
        """Return the seed with which a function draws the record of prompt ``number``."""
        return f"{self.seed}/{number}/record"


def messages_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation of a record: its ``messages``, or its ``prompt`` as a user message."""
    if record.get("messages") is not None:
        return record["messages"]
    return [{"role": "user", "content": record["prompt"]}]


def _open(source: str, check: Check) -> Any:
    """Return the list of records in a JSONL file, or a ``_Function`` if ``source`` names a function."""
    if Path(source).suffix == ".jsonl":
        return _read(Path(source).expanduser(), check)
    with _of_user(source, "cannot be used"):
        return _Function(source, load(source), check)


@dataclass(frozen=True)
class _Function:
    """A user's function that draws records."""

    name: str
    draw: Callable[[random.Random], Any]
    check: Check

    def record(self, seed: str) -> dict[str, Any]:
        """Draw a record with a random generator of this seed, and convert it as if it had been read from a file."""
        with _of_user(self.name, "did not return a JSON record"):
            record = _plain(self.draw(random.Random(seed)))
        if not _has_prompt(record):
            raise InputError(f"rl.tasks: prompts {self.name!r} returned {record!r:.200}, without a prompt: {NEEDED}")
        with _located(f"rl.tasks: prompts {self.name!r} returned {record!r:.200}"):
            self.check(record)
        return record

    def check_repeats(self, seed: str) -> None:
        """Raise InputError if the function returns different records for the same seed; such a run could not resume."""
        if (first := self.record(seed)) != (second := self.record(seed)):
            raise InputError(
                f"rl.tasks: prompts {self.name!r} returned {first!r:.100}, then {second!r:.100}, for two generators in "
                "the same state. The function must take all randomness from the generator that it is given"
            )


@contextmanager
def _of_user(name: str, what: str) -> Iterator[None]:
    """Context for code of the user: turns any exception into an InputError that names the function."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InputError(f"rl.tasks: prompts {name!r} {what}: {type(error).__name__}: {error}") from error


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Context for checking a record: adds the place of the record (file and line, or function) to error messages."""
    try:
        yield
    except DataError as error:
        raise InputError(": ".join(filter(None, (where, error.reason, error.detail)))) from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _has_prompt(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    if record.get("messages") is not None:
        return isinstance(record["messages"], list)
    return isinstance(record.get("prompt"), str)


def _plain(record: Any) -> Any:
    """Convert a record as if it were written to a JSON file and read again.

    Raises:
        TypeError: JSON cannot store a value of the record; the message names its key.
    """
    for key, value in record.items() if isinstance(record, dict) else ():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"{key} = {value!r:.100}: {error}") from None
    return json.loads(json.dumps(record, allow_nan=False))


def _read(path: Path, check: Check) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataError(str(path), 0, "missing file", "rl.tasks: prompts must be a JSONL file or file.py:function")
    records = []
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            text = decode(raw, str(path), BadRecordPolicy("stop"), line)
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise DataError(str(path), line, "invalid JSON", str(error)) from None
            if not _has_prompt(record):
                raise DataError(str(path), line, "no prompt", NEEDED)
            with _located(f"{path}:{line}"):
                check(record)
            records.append(record)
    if not records:
        raise DataError(str(path), 0, "no records")
    return records
