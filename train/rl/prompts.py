"""Prompts: an endless, seeded order over the records of the configured tasks, for any number of processes."""

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
    """Prompt number n is a pure function of the seed: a randomly drawn task, and its next record.

    ``sources``: for each task, a JSONL file of records or the name of a function that draws one (see
    ``rewards/builtin.py``). A file is read in a new order every epoch (with several tasks, as far as the prompt numbers
    fall to it). ``check`` is called with every record and raises for one that cannot be used.

    Raises:
        DataError, InputError: a record is malformed, or ``check`` refuses it; a function cannot be loaded, or uses
            other randomness than the generator it is given. Only the first record of a function is checked here, the
            others as they are drawn.
    """

    def __init__(self, sources: list[str], seed: int | str, check: Check = lambda record: None):
        self.seed = seed
        self.sources = [_open(source, check) for source in sources]
        self._order: tuple[int, int, list[int]] = -1, -1, []  # of the file and epoch used last
        for source in self.sources:
            if isinstance(source, _Function):
                source.check_repeats(self._draw(0))

    def at(self, number: int) -> tuple[int, dict[str, Any]]:
        """(task, record) of prompt ``number``."""
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
        """The seed of a drawn record."""
        return f"{self.seed}/{number}/record"


def messages_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation of a record: its ``messages``, or its ``prompt`` as a user message."""
    if record.get("messages") is not None:
        return record["messages"]
    return [{"role": "user", "content": record["prompt"]}]


def _open(source: str, check: Check) -> Any:
    """The records of a file, or a ``_Function``."""
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
        """The record that a generator with this seed gives, as if it had been read from a file."""
        with _of_user(self.name, "gave no JSON record"):
            record = _plain(self.draw(random.Random(seed)))
        if not _has_prompt(record):
            raise InputError(f"rl.tasks: prompts {self.name!r} drew {record!r:.200}, which has no prompt: {NEEDED}")
        with _located(f"rl.tasks: prompts {self.name!r} drew {record!r:.200}"):
            self.check(record)
        return record

    def check_repeats(self, seed: str) -> None:
        """Raise InputError if the same seed gives another record: the run could be neither repeated nor resumed."""
        if (first := self.record(seed)) != (second := self.record(seed)):
            raise InputError(
                f"rl.tasks: prompts {self.name!r} drew {first!r:.100}, then {second!r:.100}, from a generator in the "
                "same state. It must take all randomness from the generator that it is given"
            )


@contextmanager
def _of_user(name: str, what: str) -> Iterator[None]:
    """Wraps a user's code, which may raise anything."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InputError(f"rl.tasks: prompts {name!r} {what}: {type(error).__name__}: {error}") from error


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Adds the place to the errors of a check that does not know where its record comes from."""
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
    """The record as reading it from a file would give it. Raises TypeError naming what JSON cannot hold."""
    for key, value in record.items() if isinstance(record, dict) else ():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"{key} = {value!r:.100}: {error}") from None
    return json.loads(json.dumps(record, allow_nan=False))


def _read(path: Path, check: Check) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataError(str(path), 0, "missing file", "rl.tasks: prompts must be a JSONL file or module:function")
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
