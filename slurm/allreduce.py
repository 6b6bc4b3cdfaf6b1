"""One all-reduce over all tasks of a job, and how far the nodes' clocks are apart; ``healthcheck.sh`` runs it.

Prints ``PASS|FAIL|SKIP node=NAME check=NAME: text``, and exits with 1 unless both passed. The tasks first report to a
store on the first node; where one is missing or has no usable GPU it is named, and nobody enters a collective
that could not end.
"""

from __future__ import annotations

import datetime
import os
import socket
import statistics
import sys
import time
from collections import Counter

import torch
import torch.distributed as dist

READY = "ready"
CLOCKS = 9  # readings of each: a busy node reads some of them late
NODE = os.environ.get("SLURMD_NODENAME", socket.gethostname())
RANK, TASKS, LOCAL = (int(os.environ[f"SLURM_{name}"]) for name in ("PROCID", "NTASKS", "LOCALID"))
SECONDS = float(os.environ["NARROWS_HEALTH_TIMEOUT_S"])
TIMEOUT = datetime.timedelta(seconds=SECONDS)


def main() -> bool:
    """Whether this task saw everything pass."""
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            TASKS,
            RANK == 0,
            2 * TIMEOUT,  # the first task takes one TIMEOUT to find out who is missing
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        # whose fault it is the first task knows, or its silence tells
        return report("SKIP", "all-reduce", f"rank {RANK} cannot reach {where}: {first_line(error)}")
    passed = rendezvous(store) and collectives(store)
    leave(store)
    return passed


def rendezvous(store: dist.Store) -> bool:
    """Whether every task is there and has its device; the nodes of those that are not are named."""
    problem = device_problem()
    store.set(f"task/{RANK}", f"{NODE} {problem or READY}")
    if RANK == 0:
        store.set("verdict", verdict(store))
    try:
        missing = store.get("verdict").decode()
    except RuntimeError as error:
        return report("SKIP", "all-reduce", f"rank {RANK} has lost the first node: {first_line(error)}")
    if problem:
        return report("FAIL", "all-reduce", f"rank {RANK}: {problem}")
    if missing and LOCAL == 0 and NODE not in missing.split():
        report("SKIP", "all-reduce", f"not tried, since not every task of these nodes is ready: {missing}")
    return not missing


def device_problem() -> str | None:
    """Why this task cannot use its GPU, if it should have one."""
    wanted = os.environ.get("NARROWS_GPUS_PER_NODE") or os.environ.get("SLURM_GPUS_ON_NODE") or "0"
    if int(wanted) == 0:
        return None
    try:
        torch.cuda.set_device(LOCAL % torch.cuda.device_count())
        torch.ones(1, device="cuda").sum().item()
    except (RuntimeError, ZeroDivisionError, AssertionError) as error:
        return f"no usable GPU for local task {LOCAL}, {torch.cuda.device_count()} are visible: {first_line(error)}"
    return None


def verdict(store: dist.Store) -> str:
    """The nodes that are not ready in time, separated by blanks; those nothing was heard of get their line here."""
    deadline, heard = time.monotonic() + SECONDS, {}
    while len(heard) < TASKS and time.monotonic() < deadline:
        for rank in range(TASKS):
            if rank not in heard and store.check([f"task/{rank}"]):
                heard[rank] = store.get(f"task/{rank}").decode().split(" ", 1)
        time.sleep(0.05)
    present = Counter(node for node, _ in heard.values())
    nodes = os.environ["NARROWS_NODES"].split()
    late = [node for node in nodes if len(heard) < TASKS and present[node] < TASKS / len(nodes)]
    for node in late:
        report("FAIL", "all-reduce", f"{present[node]} of its tasks reported within {SECONDS:.0f} s", node)
    return " ".join([*late, *sorted({node for node, state in heard.values() if state != READY} - set(late))])


def collectives(store: dist.Store) -> bool:
    """All-reduce the ranks' numbers, then compare the clocks."""
    gpu = torch.cuda.is_initialized()
    device, numbers = ("cuda", 2**24) if gpu else ("cpu", 2**20)
    try:
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=dist.PrefixStore("group", store),
            rank=RANK,
            world_size=TASKS,
            timeout=TIMEOUT,
        )
        dist.all_reduce(torch.ones(1, device=device))  # the first one connects
        values = torch.full((numbers,), RANK + 1.0, device=device)
        started = time.perf_counter()
        dist.all_reduce(values)
        wrong = int((values != TASKS * (TASKS + 1) / 2).sum())
        seconds = time.perf_counter() - started
        clocks: list = [None] * TASKS
        dist.all_gather_object(clocks, [read_clock() for _ in range(CLOCKS)])
    except RuntimeError as error:
        return report("FAIL", "all-reduce", f"rank {RANK}: {first_line(error)}")
    if wrong:
        return report("FAIL", "all-reduce", f"rank {RANK}: {wrong} of {numbers} sums are wrong")
    skew = min((own - statistics.median_low(all_) for own, *all_ in zip(clocks[RANK], *clocks, strict=True)), key=abs)
    good = abs(skew) <= float(os.environ["NARROWS_MAX_SKEW_S"])
    if LOCAL == 0:
        size = values.nbytes / 2**20
        report("PASS", "all-reduce", f"{size:.0f} MiB over {TASKS} tasks in {1000 * seconds:.1f} ms on {device}")
        report("PASS" if good else "FAIL", "clock", f"{skew:+.3f} s from the median of all tasks")
    return good


def read_clock() -> float:
    """Seconds, at the moment when all tasks are told to read them."""
    dist.barrier()
    return time.time()


def leave(store: dist.Store) -> None:
    """The first task keeps the store until all that have reported have read it."""
    store.set(f"left/{RANK}", "")
    deadline = time.monotonic() + SECONDS
    reported = [f"left/{rank}" for rank in range(TASKS) if RANK == 0 and store.check([f"task/{rank}"])]
    while time.monotonic() < deadline:
        try:
            if store.check(reported):
                return
        except dist.DistNetworkError:  # the first task has ended, and the store with it: nobody needs this one any more
            return
        time.sleep(0.05)


def report(result: str, check: str, text: str, node: str = NODE) -> bool:
    """Print a line; returns whether it says PASS. One write: lines of several tasks must not mix."""
    sys.stdout.write(f"{result} node={node} check={check}: {text}\n")
    sys.stdout.flush()
    return result == "PASS"


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


if __name__ == "__main__":
    passed = main()
    sys.stdout.flush()
    os._exit(0 if passed else 1)  # a broken process group would make a regular exit wait for it
