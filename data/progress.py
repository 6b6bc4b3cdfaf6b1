"""How far long work has come, and how long the rest will take: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

QUIET = 2.0  # seconds; work that is done sooner shows nothing
LINE_AFTER, LINE_EVERY = 10.0, 30.0  # seconds to the first line, and between lines

Advance = Callable[[float], None]


@contextmanager
def progress(what: str, total: float, say: Callable[[str], None] | None = None) -> Iterator[Advance]:
    """Show the progress of the work inside the `with` block; it calls what it is given with each amount done.

    what: names the work, such as "tokenising". total: of the amounts, in any unit. say: takes the lines, for work that
    has a log of its own; None shows a bar if standard error is a terminal, and else writes lines there.
    """
    shown = _Bar(what, total) if say is None and sys.stderr.isatty() else _Lines(what, total, say or _to_stderr)
    try:
        yield shown.advance
    finally:
        shown.close()


class _Lines:
    """A line every half minute."""

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
    """A bar that disappears when the work is done."""

    def __init__(self, what: str, total: float):
        self.what, self.total, self.done = what, total, 0.0
        self.began = time.monotonic()
        self.bar: Any = None  # of rich, which takes a moment to import

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
    """Hours, minutes and seconds: `0:00:05`."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
