"""Detects ranks that never start or that die, names them, and ends the rest.

Before the processes form a group they wait for each other at a store (`meet`), which says who is missing.

Later, when a process dies, a collective call fails with a peer's address, or waits forever. So every process runs a
thread that writes a heartbeat to the store and watches the others: those of its own host by their process id, rank 0
all others by their heartbeats, and rank 1 rank 0 in the same way.
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

BEAT = 1.0  # seconds between heartbeats
SILENCE = 20.0  # seconds without a heartbeat after which a process counts as lost
GRACE = 10.0  # seconds that a process has to end by itself after another is lost
FAILURES = 3  # consecutive failed calls after which the store is lost, with the process or launcher that holds it
AGAIN = "Start the same command again to continue from the last checkpoint"
PATIENCE = 600.0  # seconds that the other processes have to start; reading Python from a slow disk takes long
REMINDER = 60.0  # seconds between lines that name the missing processes
POLL = 0.1  # seconds between checks of who has started


def meet(rank: int, size: int, local_rank: int) -> dist.Store:
    """Wait until all processes of a run have started. Keep the returned store until they have formed a group.

    Rank 0 says whom it waits for; until rank 0 arrives, one process per host prints the message.

    Raises:
        RankLost: some have not started after `PATIENCE` seconds; the message names them.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    holds = (
        rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    )  # otherwise the launcher holds the store
    speaks = rank == 1 or local_rank == 0
    if not holds:
        missing = _wait(lambda: "" if _answers(host, port) else f"rank 0 of {size} (nothing at {host}:{port})", speaks)
        if missing:
            raise RankLost(missing, told=not speaks)
    store = dist.TCPStore(host, port, size, holds, wait_for_workers=False, multi_tenant=True)
    store = dist.PrefixStore("start", store)
    store.set(str(rank), "")
    if rank == 0:
        missing = _wait(lambda: _absent(store, size), speaks=True)
        store.set("all", missing)
    else:
        try:
            while not store.check(["all"]):
                time.sleep(POLL)
            missing = store.get("all").decode()
        except dist.DistError as error:
            raise RankLost(f"rank 0 ended before all had started. {AGAIN}", told=not speaks) from error
    if missing:
        time.sleep(10 * POLL if rank == 0 else 0)  # until all have read it
        raise RankLost(missing, told=rank > 0)
    return store


def _wait(missing: Callable[[], str], speaks: bool) -> str:
    """Wait until nothing is missing, or until `PATIENCE` is over; then returns the message."""
    started = said = time.monotonic()
    while names := missing():
        now = time.monotonic()
        if now - started > PATIENCE:
            return f"{names} did not start within {PATIENCE:g} s. {AGAIN}"
        if speaks and now - said > REMINDER:
            said = now
            print(f"waiting for {names} to start", file=sys.stderr, flush=True)
        time.sleep(POLL)
    return ""


def _answers(host: str, port: int) -> bool:
    """Whether the store can be reached. A TCPStore that waits by itself prints pages of warnings."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def _absent(store: dist.Store, size: int) -> str:
    """The missing ranks in words ("ranks 1, 4-7 of 8"), or an empty string."""
    ranks = [rank for rank in range(size) if not store.check([str(rank)])]
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    spans = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(spans)} of {size}" if ranks else ""


class Watch(threading.Thread):
    """The watching thread. ``store``: a connection of its own, because a call that waits in a shared one would stop the
    heartbeat.
    """

    def __init__(self, store: dist.Store, rank: int, size: int):
        super().__init__(name="watch", daemon=True)
        self.store, self.rank, self.size = store, rank, size
        self.me = f"{socket.gethostname()} {os.getpid()}"
        self.lost: str | None = None
        self._found, self._closed = threading.Event(), threading.Event()
        self._beats: dict[
            int, tuple[bytes, int]
        ] = {}  # the last heartbeat, and how many checks have found no newer one
        self._unanswered = 0  # beats since the store last answered; a clock would go on while a job is suspended
        store.set(f"where/{rank}", self.me)
        store.set(f"beat/{rank}", "0")
        self.places = [store.get(f"where/{other}").decode().split() for other in range(size)]
        # Ranks of the same host, unless a container hides their processes.
        host = self.places[rank][0]
        self.neighbours = [r for r, (there, pid) in enumerate(self.places) if there == host and _lives(int(pid))]

    def run(self) -> None:
        threading.Thread(target=self._ask, name="watch's questions", daemon=True).start()
        while self.lost is None:
            if self._closed.wait(BEAT):
                return
            self._unanswered += 1
            if self._unanswered * BEAT > SILENCE:
                self.lost = self._store_is_lost()
        self._found.set()
        if not self._closed.wait(GRACE):  # the main thread waits in a collective that will never complete
            self.say()
            os._exit(LOST)

    def _ask(self) -> None:
        """Runs in a separate thread, because a store whose host is gone or hangs never answers, whatever its
        timeout.
        """
        count = failures = 0
        while self.lost is None and not self._closed.wait(BEAT):
            count += 1
            try:
                self.store.set(f"beat/{self.rank}", str(count))
                self.lost = self._look() or self.lost
                self._unanswered = failures = 0
            except RuntimeError:
                failures += 1
                if failures == FAILURES:
                    self.lost = self._store_is_lost()

    def _store_is_lost(self) -> str:
        holder = "the launcher" if "TORCHELASTIC_RUN_ID" in os.environ else self.name_of(0)
        return f"{holder} no longer answers"

    def leave_word(self, reason: str) -> None:
        """Record for the others why this process ends."""
        try:
            self.store.compare_set("lost", "", f"{self.name_of(self.rank)} stopped: {reason}")
        except RuntimeError:  # the store is gone too; the others have noticed
            pass

    def verdict(self, seconds: float) -> str | None:
        """What is lost; waits at most so many seconds for the answer."""
        self._found.wait(seconds)
        return self.lost

    def close(self) -> None:
        """To be called when this process ends by itself."""
        self._closed.set()

    def name_of(self, rank: int) -> str:
        host, pid = self.places[rank]
        return f"rank {rank} (process {pid} on {host})"

    def speaks(self) -> bool:
        """Whether this process reports the loss: rank 0, or rank 1 if rank 0 was lost without a message."""
        silent = self.lost.startswith("rank 0 ") and "stopped:" not in self.lost
        return self.rank == (1 if silent else 0)

    def say(self) -> None:
        if self.speaks():
            print(f"error: {message(self.lost)}", file=sys.stderr, flush=True)

    def _look(self) -> str | None:
        if self.store.check(["lost"]):
            return self.store.get("lost").decode()
        gone = [rank for rank in self.neighbours if not _lives(int(self.places[rank][1]))]
        if not gone and self.rank < 2:  # a launcher's store outlives rank 0
            others = range(1, self.size) if self.rank == 0 else [0]
            gone = [rank for rank in others if self._silent(rank)]
        if not gone:
            return None
        time.sleep(BEAT / 2)  # a process that ended by itself has recorded why
        found = f"{self.name_of(gone[0])} is gone"
        return self.store.compare_set("lost", "", found).decode() or found

    def _silent(self, rank: int) -> bool:
        beat = self.store.get(f"beat/{rank}")
        last, looks = self._beats.get(rank, (b"", 0))
        self._beats[rank] = beat, looks + 1 if beat == last else 0
        return self._beats[rank][1] * BEAT > SILENCE


def message(lost: str) -> str:
    """The message for the user."""
    return f"{lost}; the other processes ended too. {AGAIN}"


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
