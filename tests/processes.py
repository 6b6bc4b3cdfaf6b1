"""Runs a function in several processes that form a gloo group, for tests."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.python_server import Program


def run(size: int, function: Callable, *arguments: Any, timeout: float = 300) -> list[Any]:
    """`function(rank, *arguments)` in `size` processes of one thread each; what they return, in their order.

    `function` must be importable. A process that fails ends the others; AssertionError with its traceback.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "call").write_bytes(pickle.dumps(sys.path) + pickle.dumps((size, function, arguments, timeout)))
        started = [Program(["-m", "tests.processes", name, str(rank)], folder / f"{rank}.log") for rank in range(size)]
        try:
            _wait(started, timeout)
        finally:
            for process in started:
                process.kill()
        failures = [path.read_text() for path in sorted(folder.glob("*.failed"))]
        codes = [process.returncode for process in started]
        if failures or any(codes):
            output = "\n".join(process.output for process in started)
            raise AssertionError("\n".join(failures) or f"no end within {timeout} s, exit codes {codes}\n{output}")
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _wait(started: list[Program], timeout: float) -> None:
    """Until all have ended well, one has failed (and others had a moment to fail themselves), or time is up."""
    end = time.monotonic() + timeout
    while any(process.returncode is None for process in started) and time.monotonic() < end:
        if any(process.returncode for process in started):
            end = min(end, time.monotonic() + 2)
        time.sleep(0.02)


def _work(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with open(folder / "call", "rb") as file:
        sys.path[:] = pickle.load(file)  # before the next, which imports the function's module
        size, function, arguments, timeout = pickle.load(file)
    patience = timedelta(seconds=timeout)  # gloo's own limit of half an hour is too short for the longest benchmark
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", timeout=patience, rank=rank, world_size=size)
    try:
        torch.save(function(rank, *arguments), folder / f"{rank}.pt")
        dist.barrier()
    except BaseException:
        (folder / f"{rank}.failed").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]))
