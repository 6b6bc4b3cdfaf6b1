"""Starts the processes of a test: rank by rank, on a free port, with a time limit, and none outlives it."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """How a process ended; a negative code is the signal that ended it."""

    code: int
    output: str


class Group:
    """``size`` processes of one command, with the environment that torchrun would give them."""

    def __init__(self, size: int, command: list[str], folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = [folder / f"rank{rank}.log" for rank in range(size)]
        port = str(free_port())
        self.processes = []
        for rank, log in enumerate(self.logs):
            places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            with open(log, "w") as file:
                process = subprocess.Popen(
                    [sys.executable, *command], cwd=ROOT, env={**os.environ, **places, **meeting, **own},
                    stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            self.processes.append(process)

    def finish(self, seconds: float = 600) -> list[Ended]:
        """Wait for all; what still runs after so long is killed and fails the test."""
        end = time.monotonic() + seconds
        try:
            for process in self.processes:
                process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s\n{self.outputs()}") from None
        finally:
            self.kill()
        return [Ended(p.returncode, log.read_text()) for p, log in zip(self.processes, self.logs, strict=True)]

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def outputs(self) -> str:
        return "\n".join(f"--- rank {rank}\n{log.read_text()[-3000:]}" for rank, log in enumerate(self.logs))

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
