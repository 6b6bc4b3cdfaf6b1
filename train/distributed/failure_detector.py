"""Which process of a run did not start, died or hangs: found out, named in one message, and all others end too.

Before the processes form a group they wait for each other at a store (`rendezvous`), which knows who is missing.

A collective call fails with the address of a peer, or waits for one that will never come. So every process runs a
`FailureDetector`, a thread that writes heartbeats to the store of the group and checks the others: processes of its
own host by their process id; rank 0 checks the heartbeats of all, rank 1 those of rank 0.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable

import psutil
import torch.distributed as dist

from train.errors import LOST, RankLost

HEARTBEAT_INTERVAL = 1.0  # seconds
EXIT_GRACE = 10.0  # seconds that a process has to end by itself once another is lost
STORE_FAILURES = 3  # calls in a row that fail before the store is given up: its process or launcher has ended
REMINDER_INTERVAL = 60.0  # seconds between lines that name the processes that are missing at the start
POLL_INTERVAL = 0.1  # seconds between looks at who has started
AGAIN = "Start the same command again to continue from the last checkpoint"


def rendezvous(rank: int, size: int, local_rank: int, timeout: float) -> dist.Store:
    """Wait until all processes of a run have started. What is returned must be kept until they have formed a group.

    Rank 0 prints who is missing; while it is missing itself, one process of every host does.

    Raises:
        RankLost: some have not started within ``timeout`` seconds; the message names them.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else the launcher does
    reporter = rank == 1 or local_rank == 0
    if not hosts_store:
        missing = f"rank 0 of {size} (nothing at {host}:{port})"
        message = _wait(lambda: _accepts(host, port), lambda: missing, timeout, reporter)
        if message:
            raise RankLost(message, reported=not reporter)
    shared = dist.TCPStore(host, port, size, hosts_store, wait_for_workers=False, multi_tenant=True)
    store = dist.PrefixStore("start", shared)
    store.set(str(rank), "")
    if rank == 0:
        everyone = [str(other) for other in range(size)]
        message = _wait(lambda: store.check(everyone), lambda: _absent(store, size), timeout, reporter=True)
        store.set("all", message)
    else:
        try:
            while not store.check(["all"]):
                time.sleep(POLL_INTERVAL)
            message = store.get("all").decode()
        except dist.DistError as error:
            raise RankLost(f"rank 0 ended before all had started. {AGAIN}", reported=not reporter) from error
    if message:
        time.sleep(10 * POLL_INTERVAL if rank == 0 else 0)  # until all have read it
        raise RankLost(message, reported=rank > 0)
    return store


def _wait(done: Callable[[], bool], missing: Callable[[], str], timeout: float, reporter: bool) -> str:
    """Wait until ``done``, which gives an empty text; after ``timeout`` seconds a message with what is ``missing``."""
    started = reminded = time.monotonic()
    while not done():
        now = time.monotonic()
        if now - started > timeout:
            return f"{missing()} did not start within {timeout:g} s. {AGAIN}"
        if reporter and now - reminded > REMINDER_INTERVAL:
            reminded = now
            print(f"waiting for {missing()} to start", file=sys.stderr, flush=True)
        time.sleep(POLL_INTERVAL)
    return ""


def _accepts(host: str, port: int) -> bool:
    """Whether something listens there. A TCPStore that waits for it by itself prints pages meanwhile."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def _absent(store: dist.Store, size: int) -> str:
    """The ranks that have not started, as people write them: ranks 1, 4-7 of 8."""
    ranks = [rank for rank in range(size) if not store.check([str(rank)])]
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    spans = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(spans)} of {size}"


class FailureDetector(threading.Thread):
    """Writes this process's heartbeats and checks those of others.

    store: a connection of its own, for a call that waits in the shared one would delay the heartbeats. timeout: seconds
    without a heartbeat after which a process counts as lost.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float):
        super().__init__(name="failure detector", daemon=True)
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.failure: str | None = None  # who is lost, in words
        self._found, self._closed = threading.Event(), threading.Event()
        # Times are counted in heartbeat intervals: a clock would go on while a job is suspended.
        self._last: dict[int, tuple[bytes, int]] = {}  # a rank's last heartbeat, and checks since that found no other
        self._unanswered = 0  # intervals since the store's last answer
        store.set(f"process/{rank}", f"{socket.gethostname()} {os.getpid()}")
        store.set(f"heartbeat/{rank}", "0")
        found = store.multi_get([f"process/{other}" for other in range(size)])
        self.processes = [one.decode().split() for one in found]  # host and process id of every rank
        # Of the same host, and not hidden from here in a container of its own.
        host = self.processes[rank][0]
        self.neighbours = [r for r, (there, pid) in enumerate(self.processes) if there == host and _lives(int(pid))]

    def run(self) -> None:
        threading.Thread(target=self._exchange, name="heartbeats", daemon=True).start()
        while self.failure is None:
            if self._closed.wait(HEARTBEAT_INTERVAL):
                return
            self._unanswered += 1
            if self._unanswered * HEARTBEAT_INTERVAL > self.timeout:
                self.failure = self._store_is_lost()
        self._found.set()
        if not self._closed.wait(EXIT_GRACE):  # the main thread waits for a collective that nobody will answer
            self.report()
            os._exit(LOST)

    def _exchange(self) -> None:
        """Heartbeats and checks, in a thread of its own: calls to a store whose host hangs never return."""
        count = failures = 0
        while self.failure is None and not self._closed.wait(HEARTBEAT_INTERVAL):
            count += 1
            try:
                self.store.set(f"heartbeat/{self.rank}", str(count))
                self.failure = self._check() or self.failure
                self._unanswered = failures = 0
            except RuntimeError:
                failures += 1
                if failures == STORE_FAILURES:
                    self.failure = self._store_is_lost()

    def _store_is_lost(self) -> str:
        holder = "the launcher" if "TORCHELASTIC_RUN_ID" in os.environ else self.name_of(0)
        return f"{holder} no longer answers"

    def announce(self, reason: str) -> None:
        """Tell the others why this process ends."""
        try:
            self.store.compare_set("lost", "", f"{self.name_of(self.rank)} stopped: {reason}")
        except RuntimeError:  # the store is gone too; the others have noticed
            pass

    def wait_for_failure(self, seconds: float) -> str | None:
        """Who is lost, waiting for that at most so long."""
        self._found.wait(seconds)
        return self.failure

    def close(self) -> None:
        """This process ends in order, or at least by itself."""
        self._closed.set()

    def name_of(self, rank: int) -> str:
        host, pid = self.processes[rank]
        return f"rank {rank} (process {pid} on {host})"

    def is_reporter(self) -> bool:
        """Whether this process is the one that prints the failure: rank 0, or rank 1 if rank 0 was lost in silence."""
        assert self.failure is not None
        silent = self.failure.startswith("rank 0 ") and "stopped:" not in self.failure
        return self.rank == (1 if silent else 0)

    def report(self) -> None:
        if self.is_reporter():
            assert self.failure is not None
            print(f"error: {message(self.failure)}", file=sys.stderr, flush=True)

    def _check(self) -> str | None:
        """Who is lost, if anyone, agreed on with the others."""
        if self.store.check(["lost"]):
            return self.store.get("lost").decode()
        gone = [rank for rank in self.neighbours if not _lives(int(self.processes[rank][1]))]
        if not gone and self.rank < 2:  # rank 1 checks rank 0, whose store lives on where a launcher holds it
            gone = self._silent(list(range(1, self.size)) if self.rank == 0 else [0])
        if not gone:
            return None
        time.sleep(HEARTBEAT_INTERVAL / 2)  # one that ended by itself has announced it by then
        found = f"{self.name_of(gone[0])} is gone"
        return self.store.compare_set("lost", "", found).decode() or found

    def _silent(self, ranks: list[int]) -> list[int]:
        """Those of the ranks that have not written a heartbeat for too long."""
        silent = []
        beats = self.store.multi_get([f"heartbeat/{rank}" for rank in ranks]) if ranks else []
        for rank, beat in zip(ranks, beats, strict=True):
            last, checks = self._last.get(rank, (b"", 0))
            checks = checks + 1 if beat == last else 0
            self._last[rank] = beat, checks
            if checks * HEARTBEAT_INTERVAL > self.timeout:
                silent.append(rank)
        return silent


def message(failure: str) -> str:
    """What a person reads."""
    return f"{failure}; the other processes ended too. {AGAIN}"


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
