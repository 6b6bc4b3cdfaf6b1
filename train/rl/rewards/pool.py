"""Runs reward functions in separate processes with a time limit. If a call hangs or crashes, only its reward is lost.

A reward function is plain Python, ``reward(record, answer, reasoning) -> float``: ``record`` is the prompt's record,
``answer`` the text after ``</think>`` without the end-of-sequence token, and ``reasoning`` the text before
``</think>``. The configuration names a function as ``package.module:function`` or ``path/to/file.py:function``. The
function may be ``async``, and may return a scalar of NumPy or torch.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, cast

import psutil

from train.errors import InputError

START_SECONDS = 120.0  # time limit for importing the modules of the reward functions


@dataclass(frozen=True)
class Outcome:
    """The result of a reward call. If the function returned no reward, ``reward`` is 0, and ``failure`` says why: time,
    crash or error.
    """

    reward: float
    failure: str | None = None
    detail: str = ""
    called: bool = True  # False for a response that was cut off; no reward function is called for it


class Rewards:
    """A pool of worker processes that call reward functions. A process that hangs or crashes is replaced.

    Args:
        functions: names of the reward functions, as ``package.module:function`` or ``path/to/file.py:function``.
        workers: number of processes.
        seconds: time limit of one call of a reward function.

    Raises:
        InputError: a reward function cannot be loaded.
    """

    def __init__(self, functions: list[str], workers: int, seconds: float):
        self.functions, self.seconds = functions, seconds
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._workers: list[_Worker] = []
        self._threads = ThreadPoolExecutor(workers, "rewards")
        try:
            for _ in range(workers):
                worker = _Worker(functions)
                self._workers.append(worker)
                self._idle.put(worker)
            for worker in self._workers:
                worker.wait_ready()
        except BaseException:
            self.close()
            raise

    def submit(self, function: int, record: dict[str, Any], answer: str, reasoning: str) -> Future[Outcome]:
        """Request the reward of a response from the reward function with index ``function``. Returns a future of the
        outcome.
        """
        request = {"function": function, "record": record, "answer": answer, "reasoning": reasoning}
        return self._threads.submit(self._call, request)

    def close(self) -> None:
        """End all worker processes, even those in the middle of a call."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:  # a thread may have replaced a worker meanwhile
            worker.close()

    def _call(self, request: dict[str, Any]) -> Outcome:
        worker = self._idle.get()
        try:
            return worker.call(request, self.seconds)
        finally:
            self._idle.put(worker)


class _Worker:
    """One worker process. Only one thread at a time uses it."""

    def __init__(self, functions: list[str]):
        self.functions, self.closed, self.ready = functions, False, False
        self._start()

    ready: bool
    process: subprocess.Popen[bytes]

    def wait_ready(self) -> None:
        if self.ready:
            return
        line = self._read(START_SECONDS)
        if not line or "error" in line:
            gone = f"{', '.join(self.functions)}: importing took more than {START_SECONDS:g} s or ended the process"
            raise InputError(f"rl.tasks: a reward function cannot be used: {line['error'] if line else gone}")
        self.ready = True

    def call(self, request: dict[str, Any], seconds: float) -> Outcome:
        try:
            self.wait_ready()
        except InputError as error:  # the functions could be loaded before, so this is a crash
            self._replace()
            return Outcome(0.0, "crash", str(error))
        self._write(request)
        line = self._read(seconds)
        if not line:
            self._replace()
            if line is None:
                return Outcome(0.0, "time", f"the reward function did not return within {seconds:g} s")
            return Outcome(0.0, "crash", "the reward function ended its process")
        return Outcome(line["reward"]) if "reward" in line else Outcome(0.0, "error", line["error"])

    def close(self) -> None:
        self.closed = True
        self._end()

    def _replace(self) -> None:
        self._end()
        if not self.closed:
            self._start()

    def _start(self) -> None:
        self.ready, self._rest = False, b""
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # its own process group, so that `_end` can kill it
        )
        self._write({"path": [entry or os.getcwd() for entry in sys.path], "functions": self.functions})

    def _end(self) -> None:
        if self.process.returncode is not None:  # it has ended; its id may belong to another process now
            return
        started: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            started = psutil.Process(self.process.pid).children(recursive=True)  # may be outside the group
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _write(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended, which `_read` will detect
            pipe = cast(IO[bytes], self.process.stdin)
            pipe.write(json.dumps(message).encode() + b"\n")
            pipe.flush()

    def _read(self, seconds: float) -> dict[str, Any] | None:
        """Read the next line that the process writes, as JSON. Returns None if no line comes within ``seconds``, and {}
        if the process has ended.
        """
        assert self.process.stdout is not None
        end = time.monotonic() + seconds
        pipe = cast(IO[bytes], self.process.stdout)
        while b"\n" not in self._rest:
            left = end - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                return None
            read = os.read(pipe.fileno(), 65536)
            if not read:
                return {}
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)
