"""``python tests/at_step.py STEP WHAT KEY=VALUE...`` is ``python -m train KEY=VALUE...`` to which something happens as
a step begins, so that it happens in the middle of the run however fast or slow the machine is. WHAT: ``SIGKILL:1``,
rank 1 sends itself this signal; ``sleep:1``, rank 1 sleeps; ``wait``, every rank waits until it is told to stop.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train import __main__ as program  # noqa: E402
from train import loop  # noqa: E402
from train.config.compose import open_overrides  # noqa: E402
from train.distributed.launchers import run_to_the_end  # noqa: E402


def prepare(step: int, what: str) -> None:
    """Let it happen in this process."""
    signals, take_step = loop.stop_signals, loop.train_step
    name, _, rank = what.partition(":")
    heard: list[str] = []

    @contextmanager
    def stop_signals() -> Iterator[list[str]]:
        nonlocal heard
        with signals() as heard:
            yield heard

    def train_step(run: loop.Run, batches: list, done: int, tokens: int, **given: Any) -> dict[str, Any]:
        if done + 1 == step:
            while name == "sleep" and run.world.rank == int(rank):
                time.sleep(0.1)
            if name not in ("wait", "sleep") and run.world.rank == int(rank):
                os.kill(os.getpid(), signal.Signals[name])
            while name == "wait" and not heard:
                time.sleep(0.02)
        return take_step(run, batches, done, tokens, **given)

    loop.stop_signals, loop.train_step = stop_signals, train_step


if __name__ == "__main__":
    step, what, *arguments = sys.argv[1:]
    prepare(int(step), what)
    sys.argv[1:] = open_overrides(arguments)
    run_to_the_end(program.main)
