"""Signals that ask a run to stop.

A signal is only recorded; after the current step the run saves its state and ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from train.errors import Interrupted


@contextmanager
def stop_signals() -> Iterator[list[str]]:
    """Yield a list to which the name of each received SIGUSR1, SIGTERM or SIGINT is appended.

    A second Ctrl-C ends the program at once. Repeated SIGUSR1 and SIGTERM are only recorded, because Slurm sends them
    more than once: to processes that the job script has already signalled, and to processes that end later than the
    first one. Repeated signals must not interrupt the save that the first signal started, nor the exit after
    ``Interrupted``.
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


@contextmanager
def ctrl_c_ends() -> Iterator[None]:
    """Let Ctrl-C end the process at once, without a message, while there is nothing to save.

    While a library waits for other processes outside Python, Python's own handler for Ctrl-C is not called.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
