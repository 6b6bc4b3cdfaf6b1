"""Starts processes on this machine that do one piece of work together, such as converting a checkpoint.

Unlike the processes of a training run, these processes need no launcher, because the command itself starts and ends
them.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from model.parallel.ranks import ONE_RANK, RankGroup
from train.errors import InputError

# A process whose part is done waits for the others. The time limit only has to end work that will never finish.
TIMEOUT = timedelta(days=7)


def work_together(
    processes: int, work: Callable[..., Any], argument: Any, done: Callable[[float], None] = lambda share: None
) -> Any:
    """Call ``work(argument, ranks, done)`` in several new processes and return its result in the first process.

    Args:
        processes: number of processes. With 1, ``work`` is called in this process.
        work: a function that can be imported by its name. ``ranks`` is the group of the processes.
        argument: a value that can be pickled.
        done: called with each amount of work that any process reports by calling the ``done`` that its ``work``
            receives.

    Raises:
        InputError: one of the processes was killed; the other processes are ended too.
        Exception: an error that ``work`` raised in one of the processes.
    """
    if processes == 1:
        return work(argument, ONE_RANK, done)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        started: dict[Connection, Any] = {}
        try:
            for rank in range(processes):
                ours, theirs = context.Pipe(duplex=False)
                call = (rank, processes, Path(folder) / "store", theirs, work, argument)
                started[ours] = context.Process(target=_process, args=call)
                started[ours].start()
                theirs.close()
            return _collect(started, done)
        finally:
            for process in started.values():
                process.join(10)  # after an error, the first process removes what was written
                process.kill()


def _collect(started: dict[Connection, Any], done: Callable[[float], None]) -> Any:
    """Receive the progress of all processes until each has sent its result. Returns the result of the first one."""
    results: dict[Connection, Any] = {}
    errors: list[Exception] = []
    while len(results) < len(started):
        for ready in wait([pipe for pipe in started if pipe not in results]):
            pipe = cast(Connection, ready)
            try:
                kind, value = pipe.recv()
            except EOFError:
                results[pipe] = None
                errors.append(InputError(_killed(list(started).index(pipe), started[pipe])))
                continue
            if kind == "done":
                done(value)
                continue
            results[pipe] = value
            if kind == "error":
                errors.append(value)
    if errors:
        # A process whose own work went well raises OSError, and a process that lost another one RuntimeError.
        raise next((error for error in errors if not isinstance(error, OSError | RuntimeError)), errors[0])
    return next(iter(results.values()))


def _killed(rank: int, process: Any) -> str:
    process.join(10)
    return (
        f"process {rank} ended with exit code {process.exitcode} before its work was done (a negative code is the "
        "signal that killed it; 9 often means too little memory). Start again with fewer processes"
    )


def _process(rank: int, size: int, store: Path, pipe: Connection, work: Callable[..., Any], argument: Any) -> None:
    try:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
        if "lo" in (name for _, name in socket.if_nameindex()):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the name of this machine may not lead back to it
        dist.init_process_group("gloo", f"file://{store}", TIMEOUT, world_size=size, rank=rank)
        group = RankGroup(cast(dist.ProcessGroup, dist.group.WORLD), rank, size)
        sent = ("result", work(argument, group, lambda share: pipe.send(("done", share))))
    except Exception as error:
        sent = ("error", error)
    except KeyboardInterrupt:
        os._exit(130)  # the process that started this one ends with a message
    pipe.send(sent)
    pipe.close()
    os._exit(0)  # threads of gloo may still run, and could abort the interpreter while it ends
