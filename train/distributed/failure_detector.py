"""Detects processes of a run that did not start, died or hang; names these processes in one message and ends the
remaining processes.

Before the processes create a process group, they wait for each other at a TCPStore (`rendezvous`), in which every
process that has started registers itself, so that missing processes can be named.

If a process is lost during training, a collective call on another rank fails with a network error that does not name
the lost rank, or waits forever. To detect a lost process, every process runs a `FailureDetector`, a thread that writes
heartbeats into the store of the process group and checks other processes: processes on the same host by their process
id, and processes on other hosts by their heartbeats (rank 0 checks all ranks, rank 1 checks rank 0).
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from train.distributed.launchers import LauncherError
from train.distributed.stacks import Whereabouts, whereabouts, write_stacks
from train.errors import LOST, RankLost

HEARTBEAT_INTERVAL = 1.0  # seconds
EXIT_GRACE = 10.0  # seconds that a process has to end by itself after another process is lost
STORE_FAILURES = 3  # consecutive failed calls after which the process or launcher that hosts the store counts as lost
STACKS_GRACE = 2.0  # seconds in which all processes write their stack traces after one of them has been found to hang
HANGS = "has not arrived"  # in the text about a rank that lives but does not arrive at a collective call
REMINDER_INTERVAL = 60.0  # seconds between messages that name the processes that have not started yet
POLL_INTERVAL = 0.1  # seconds between checks of which processes have started
LOOKUPS = 3  # attempts to find the address of a host by its name, a second apart
LOOKUP_LIMIT = 120.0  # seconds for all of them
OWN_ADDRESS_LIMIT = 30.0  # seconds within which rank 0 must reach its own store at MASTER_ADDR
STORE_LIMIT = 60.0  # seconds for the answer of a store that accepts connections
AGAIN = "Start the same command again to continue from the last checkpoint"


def rendezvous(rank: int, size: int, local_rank: int, timeout: float) -> dist.Store:
    """Wait until all processes of a run have started.

    Returns the store at which the processes registered; the caller must keep the store until the process group has been
    created. While the processes wait, rank 0 prints which ranks are missing; until rank 0 has started, one process on
    each host prints that rank 0 is missing.

    Raises:
        LauncherError: no store can be opened or found at MASTER_ADDR and MASTER_PORT, so waiting for other processes
            would not help.
        RankLost: some processes have not started within ``timeout`` seconds; the message names their ranks.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # Else the launcher hosts the store
    hosts_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    reporter = rank == 1 or local_rank == 0
    _check_name(host, reported=rank > 0 and local_rank > 0)
    if hosts_store:
        shared = _open_store(port, size)
        if _wait(lambda: _accepts(host, port), str, OWN_ADDRESS_LIMIT, reporter=False):
            rule = (
                f"MASTER_ADDR={host} does not lead to {socket.gethostname()}, where rank 0 runs and port {port} is open"
            )
            raise LauncherError(f"{rule}. It must be an address of that host")
    else:
        missing = f"rank 0 of {size} (nothing at {host}:{port})"
        message = _wait(lambda: _accepts(host, port), lambda: missing, timeout, reporter)
        if message:
            raise RankLost(message, reported=not reporter)
        shared = _find_store(host, port, size, reported=not reporter)
    store = dist.PrefixStore("start", shared)
    store.set(str(rank), "")
    if rank == 0:
        everyone = [str(other) for other in range(size)]
        message = _wait(lambda: store.check(everyone), lambda: _absent(store, size), timeout, reporter=True)
        store.set("all", message)
    else:
        try:
            # Rank 0 started earlier and ends after its own `timeout`, with a message for all.
            silent = _wait(lambda: store.check(["all"]), lambda: f"rank 0 of {size}", timeout + 60, reporter=False)
            if silent:
                raise RankLost(f"the store at {host}:{port} answers, but {silent}", reported=not reporter)
            message = store.get("all").decode()
        except dist.DistError as error:
            raise RankLost(f"rank 0 ended before all ranks had started. {AGAIN}", reported=not reporter) from error
    if message:
        time.sleep(10 * POLL_INTERVAL if rank == 0 else 0)  # until all ranks have read it
        raise RankLost(message, reported=rank > 0)
    return store


def _check_name(host: str, reported: bool) -> None:
    """Raise ``LauncherError`` if no address is found for a host name after several attempts."""

    def look_up() -> None:
        for number in range(1, LOOKUPS + 1):
            try:
                socket.getaddrinfo(host, None)
                return
            except (OSError, UnicodeError):
                if number == LOOKUPS:
                    raise
                time.sleep(1)

    try:
        _in_thread(look_up, LOOKUP_LIMIT)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error) or f"no answer within {LOOKUP_LIMIT:g} s"
        rule = f"MASTER_ADDR={host} has no address on {socket.gethostname()}: {reason}"
        raise LauncherError(f"{rule}. It must name the host of rank 0", reported) from error


def _in_thread(call: Callable[[], Any], limit: float) -> Any:
    """Run ``call`` in a separate thread, since it may never return, and return its result.

    Raises:
        TimeoutError: ``call`` has not returned within ``limit`` seconds; its thread is not stopped.
    """
    found: Future[Any] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found.result(limit)


def _open_store(port: int, size: int) -> dist.Store:
    """Open the store of the run at a port of this host, on rank 0."""
    try:
        return dist.TCPStore("127.0.0.1", port, size, True, wait_for_workers=False, multi_tenant=True)
    except dist.DistError as error:
        reason = str(error).partition("\n")[0].rpartition("message: ")[2]
        rule = f"MASTER_PORT={port} cannot be opened on {socket.gethostname()}, where rank 0 runs: {reason}"
        raise LauncherError(f"{rule}. Choose another port, or end the program that uses it") from error


def _find_store(host: str, port: int, size: int, reported: bool) -> dist.Store:
    """Connect to the store of rank 0 or of the launcher, at a port that accepts connections. If another program accepts
    the connection but never answers, TCPStore would wait for ever, whatever its own time limit is.
    """
    try:
        return _in_thread(lambda: dist.TCPStore(host, port, size, False, wait_for_workers=False), STORE_LIMIT)
    except (dist.DistError, TimeoutError) as error:
        rule = f"what answers at MASTER_ADDR={host}, MASTER_PORT={port} is not rank 0 of this run"
        raise LauncherError(f"{rule}. Choose another port", reported) from error


def _wait(done: Callable[[], bool], missing: Callable[[], str], timeout: float, reporter: bool) -> str:
    """Wait until ``done()`` is true and return an empty text, or after ``timeout`` seconds return an error message.

    missing: returns a text that says which ranks have not started. reporter: True if this process prints reminders
    while it waits.
    """
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
    """Return whether a server accepts connections at ``host:port``.

    This function is called before a TCPStore is created, because a TCPStore that waits for its server prints pages of
    warnings.
    """
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def _absent(store: dist.Store, size: int) -> str:
    """Format the ranks that have not started, such as "ranks 1, 4-7 of 8"."""
    ranks = [rank for rank in range(size) if not store.check([str(rank)])]
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    spans = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(spans)} of {size}"


class FailureDetector(threading.Thread):
    """A thread that writes the heartbeats of this process and checks whether other processes are alive.

    Args:
        store: a separate connection to the store; on a shared connection, a call that waits would delay the heartbeats.
        timeout: seconds without a heartbeat after which a process counts as lost.
        hang_timeout: once other ranks have waited this many seconds in one collective call, a rank that has not entered
            the call counts as lost, although its process is running.
        stacks: folder for the stack traces that all ranks write if a rank hangs; None: the current folder.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: float,
        hang_timeout: float = math.inf,
        stacks: Path | None = None,
    ):
        super().__init__(name="failure detector", daemon=True)
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.hang_timeout, self.stacks = hang_timeout, stacks or Path(".")
        self._last_sent = ""  # the last heartbeat of this process
        self._where, self._waited = Whereabouts(""), 0  # where this process is; heartbeat intervals waited there
        self.failure: str | None = None  # which process is lost, as text for the message
        self._found, self._closed = threading.Event(), threading.Event()
        # Times are counted in heartbeat intervals, because a clock would continue while a job is suspended.
        self._last: dict[int, tuple[bytes, int]] = {}  # rank -> last heartbeat, number of checks since it changed
        self._beats: dict[int, bytes] = {}  # the last heartbeat of every rank that this process checks
        self._unanswered = 0  # heartbeat intervals since the store last answered
        store.set(f"process/{rank}", f"{socket.gethostname()} {os.getpid()}")
        store.set(f"heartbeat/{rank}", self._heartbeat(0))
        found = store.multi_get([f"process/{other}" for other in range(size)])
        self.processes = [one.decode().split() for one in found]  # host and process id of every rank
        # Ranks whose process is visible here: on the same host and not in another container.
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
        hangs = HANGS in self.failure
        if hangs:
            with suppress(OSError):  # a full disk must not keep the process from ending
                write_stacks(self.stacks / f"rank-{self.rank}.txt", self.failure)
        if not self._closed.wait(STACKS_GRACE if hangs else EXIT_GRACE):  # the main thread hangs in a collective call
            self.report()
            os._exit(LOST)

    def _exchange(self) -> None:
        """Write heartbeats and check other processes, in a separate thread, since calls to a hanging store block."""
        count = failures = 0
        while self.failure is None and not self._closed.wait(HEARTBEAT_INTERVAL):
            count += 1
            try:
                self.store.set(f"heartbeat/{self.rank}", self._heartbeat(count))
                self.failure = self._check() or self.failure
                self._unanswered = failures = 0
            except RuntimeError:
                failures += 1
                if failures == STORE_FAILURES:
                    self.failure = self._store_is_lost()

    def _heartbeat(self, count: int) -> str:
        """Return the text (JSON) that this process writes into the store: a counter, how many seconds the process has
        waited in its present collective call, the name of the call, and the function that the process is executing.
        """
        now = whereabouts()
        self._waited = self._waited + 1 if now.collective is not None and now == self._where else 0
        self._where = now
        self._last_sent = json.dumps([count, self._waited * HEARTBEAT_INTERVAL, now.collective, now.place])
        return self._last_sent

    def _hanging(self, beats: Mapping[int, bytes]) -> str | None:
        """Return a text that names a running rank that has not entered the collective call in which other ranks have
        waited for `hang_timeout` seconds, or None. If all ranks wait, they are in different calls, and the text names a
        rank that has waited for the shortest time.

        beats: the last heartbeat of every rank.
        """
        found = {rank: json.loads(beat) for rank, beat in beats.items()}
        waiting = {rank: seconds for rank, (_, seconds, _, _) in found.items() if seconds}
        if not waiting or (longest := max(waiting.values())) < self.hang_timeout:
            return None
        rank = min(found, key=lambda rank: (found[rank][1], rank))
        other = max(waiting, key=lambda rank: (waiting[rank], -rank))
        _, seconds, collective, place = found[rank]
        here = f"waits in {collective} ({place})" if collective and seconds else f"is at {place}"
        _, _, collective, place = found[other]
        return (
            f"{self.name_of(rank)} {HANGS} in {collective} ({place}), where rank {other} has waited for it for "
            f"{longest:.0f} s; it {here}. The stack traces of all ranks are in {self.stacks}"
        )

    def _store_is_lost(self) -> str:
        holder = "the launcher" if "TORCHELASTIC_RUN_ID" in os.environ else self.name_of(0)
        return f"{holder} no longer answers"

    def announce(self, reason: str) -> None:
        """Tell the other processes, through the store, why this process ends."""
        try:
            self.store.compare_set("lost", "", f"{self.name_of(self.rank)} stopped: {reason}")
        except RuntimeError:  # the store is gone too, so the other processes have already noticed a failure
            pass

    def wait_for_failure(self, seconds: float) -> str | None:
        """Wait until a process is found to be lost, but at most ``seconds``. Returns a text that names the lost
        process, or None.
        """
        self._found.wait(seconds)
        return self.failure

    def close(self) -> None:
        """Stop the heartbeats and checks. Called when all processes leave the run together."""
        self._closed.set()

    def name_of(self, rank: int) -> str:
        host, pid = self.processes[rank]
        return f"rank {rank} (process {pid} on {host})"

    def is_reporter(self) -> bool:
        """Return whether this process prints the failure: rank 0 does, or rank 1 if rank 0 ended without a message."""
        assert self.failure is not None
        silent = self.failure.startswith("rank 0 ") and "stopped:" not in self.failure
        return self.rank == (1 if silent else 0)

    def report(self) -> None:
        if self.is_reporter():
            assert self.failure is not None
            print(f"error: {message(self.failure)}", file=sys.stderr, flush=True)

    def _check(self) -> str | None:
        """Return a text that names the lost process, or None. All processes name the same lost process, since its name
        is recorded in the store.
        """
        if self.store.check(["lost"]):
            return self.store.get("lost").decode()
        gone = [rank for rank in self.neighbours if not _lives(int(self.processes[rank][1]))]
        if not gone and self.rank < 2:  # rank 1 checks rank 0; a launcher's store outlives rank 0
            gone = self._silent(list(range(1, self.size)) if self.rank == 0 else [0])
        if not gone:
            hanging = self._hanging(self._beats) if self.rank == 0 else None
            return hanging and (self.store.compare_set("lost", "", hanging).decode() or hanging)
        time.sleep(HEARTBEAT_INTERVAL / 2)  # a process that ended by itself announces it within this time
        found = f"{self.name_of(gone[0])} is gone"
        return self.store.compare_set("lost", "", found).decode() or found

    def _silent(self, ranks: list[int]) -> list[int]:
        """Return the ranks in ``ranks`` whose last heartbeat is older than the timeout."""
        silent = []
        beats = self.store.multi_get([f"heartbeat/{rank}" for rank in ranks]) if ranks else []
        own = self._last_sent.encode()
        self._beats = {self.rank: own, **dict(zip(ranks, beats, strict=True))}
        for rank, beat in zip(ranks, beats, strict=True):
            last, checks = self._last.get(rank, (b"", 0))
            checks = checks + 1 if beat == last else 0
            self._last[rank] = beat, checks
            if checks * HEARTBEAT_INTERVAL > self.timeout:
                silent.append(rank)
        return silent


def message(failure: str) -> str:
    """Format the error message about a lost process."""
    return f"{failure}; the other processes ended too. {AGAIN}"


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
