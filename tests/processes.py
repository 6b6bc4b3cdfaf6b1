"""Runs a function in several processes that form a gloo group, for tests."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run(size: int, function: Callable, *arguments: Any, timeout: float = 300) -> list[Any]:
    """`function(rank, *arguments)` in `size` processes of one thread each; what they return, in their order.

    `function` must be importable. A process that fails ends the others; AssertionError with its traceback. Processes
    come from a server that has imported torch once, so that starting them is cheap.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "model", "tests.processes", "tests.model.tiny"])
    with tempfile.TemporaryDirectory() as folder:
        started = [
            context.Process(target=_work, args=(Path(folder), rank, size, function, arguments)) for rank in range(size)
        ]
        for process in started:
            process.start()
        try:
            _wait(started, timeout)
        finally:
            for process in started:
                process.kill()
                process.join()
        failures = [path.read_text() for path in sorted(Path(folder).glob("*.failed"))]
        if failures or any(process.exitcode for process in started):
            codes = [process.exitcode for process in started]
            raise AssertionError("\n".join(failures) or f"no end after {timeout} s, exit codes {codes}")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _wait(started: list, timeout: float) -> None:
    """Until all have ended well, one has failed (and others had a moment to fail themselves), or time is up."""
    end = time.monotonic() + timeout
    while any(process.is_alive() for process in started) and time.monotonic() < end:
        if any(process.exitcode for process in started):
            end = min(end, time.monotonic() + 2)
        time.sleep(0.02)


def _work(folder: Path, rank: int, size: int, function: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        torch.save(function(rank, *arguments), folder / f"{rank}.pt")
        dist.barrier()
    except BaseException:
        (folder / f"{rank}.failed").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
    dist.destroy_process_group()
