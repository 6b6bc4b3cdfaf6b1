"""Shows the progress of long work and the estimated remaining time: as a bar on a terminal, otherwise as log lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

QUIET = 2.0  # seconds; no progress is shown for work that takes less time
LINE_AFTER, LINE_EVERY = 10.0, 30.0  # seconds before the first progress line, and between progress lines

Advance = Callable[[float], None]


@contextmanager
def progress(
    what: str, total: float, say: Callable[[str], None] | None = None, shared: bool = False
) -> Iterator[Advance]:
    """A context manager that shows the progress of the work in its body. The context manager yields a function that the
    body calls with each amount of work done.

    what: the name of the work, such as "tokenising". total: the sum of all amounts of work, in any unit. say: a
    function that receives the progress lines, for work with its own log; if None, progress is shown on standard error,
    as a bar on a terminal and otherwise as lines. shared: whether all processes of a run do this work at the same time;
    then only the first process shows the progress.
    """
    if shared and not _is_first():
        say = _ignore
    shown = _Bar(what, total) if say is None and sys.stderr.isatty() else _Lines(what, total, say or _to_stderr)
    try:
        yield shown.advance
    finally:
        shown.close()


class _Lines:
    """Writes a progress line at most every 30 seconds."""

    def __init__(self, what: str, total: float, say: Callable[[str], None]):
        self.what, self.total, self.say, self.done = what, total, say, 0.0
        self.began = time.monotonic()
        self.next = self.began + LINE_AFTER

    def advance(self, amount: float) -> None:
        self.done += amount
        now = time.monotonic()
        if now < self.next or not self.done < self.total:
            return
        self.next = now + LINE_EVERY
        left = (now - self.began) * (self.total - self.done) / self.done if self.done else 0.0
        self.say(f"{self.what}: {self.done / self.total:.0%}, {duration(left)} left")

    def close(self) -> None:
        pass


class _Bar:
    """Shows a progress bar that disappears when the work is done."""

    def __init__(self, what: str, total: float):
        self.what, self.total, self.done = what, total, 0.0
        self.began = time.monotonic()
        self.bar: Any = None  # a progress bar of rich, which is slow to import

    def advance(self, amount: float) -> None:
        self.done += amount
        if self.bar is None:
            if time.monotonic() - self.began < QUIET:
                return
            self._start()
        self.bar.update(self.task, completed=min(self.done, self.total))

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, TextColumn("left"), console=Console(stderr=True), transient=True)
        self.task = self.bar.add_task(self.what, total=self.total)
        self.bar.start()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def duration(seconds: float) -> str:
    """Returns a duration as text with hours, minutes and seconds, such as `0:00:05`."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _is_first() -> bool:
    """Returns whether this process is the first one of its run. Without `torch.distributed` there is only one."""
    distributed: Any = sys.modules.get("torch.distributed")  # this module does not load torch
    connected = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return not connected or distributed.get_rank() == 0


def _ignore(line: str) -> None:
    """Show no progress line; for processes other than the first."""


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
