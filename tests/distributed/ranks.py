"""Starts the processes of a test: rank by rank, on a free port, with a time limit, and none outlives it."""

from __future__ import annotations

import os
import random
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.python_server import ROOT, Program


@dataclass(frozen=True)
class Ended:
    """How a process ended; a negative code is the signal that ended it."""

    code: int
    output: str


class Group:
    """``size`` processes of one command, with the environment that torchrun would give them."""

    def __init__(self, size: int, command: list[str], folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        port = str(free_port())
        self.processes = []
        for rank in range(size):
            places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            environment = {**os.environ, **places, **meeting, **own}
            self.processes.append(Program(command, folder / f"rank{rank}.log", environment))

    def finish(self, seconds: float = 600) -> list[Ended]:
        """Wait for all; what still runs after so long is killed and fails the test."""
        end = time.monotonic() + seconds
        try:
            for process in self.processes:
                process.wait(max(0.0, end - time.monotonic()))
        except AssertionError:
            raise AssertionError(f"still running after {seconds} s\n{self.outputs()}") from None
        finally:
            self.kill()
        return [Ended(process.wait(), process.output) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def outputs(self) -> str:
        return "\n".join(f"--- rank {rank}\n{one.output[-3000:]}" for rank, one in enumerate(self.processes))

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def free_port() -> int:
    """Where nobody listens. Of those that the system gives to nobody by itself until it is used."""
    while True:
        port = random.SystemRandom().randrange(15_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
