"""Signals that ask a run to stop: recorded at once, obeyed after the step, with the run state saved."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from train.errors import Interrupted


@contextmanager
def stop_signals() -> Iterator[list[str]]:
    """A list that receives the names of SIGUSR1, SIGTERM and SIGINT. A second Ctrl-C acts as usual, at once.

    Slurm sends SIGUSR1 before the time limit. It sends SIGTERM again to processes that a job script has already
    signalled, and to those that end after the first one. A repeated signal therefore interrupts neither the save that
    the first one started nor, after ``Interrupted``, the orderly exit.
    """
    received: list[str] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)
        if number == signal.SIGINT:
            signal.signal(number, before[number])

    for each in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        before[each] = signal.signal(each, note)
    ends = False
    try:
        yield received
    except Interrupted:
        ends = True
        raise
    finally:
        for signum, handler in before.items():
            if not ends or signum == signal.SIGINT:
                signal.signal(signum, handler)
