"""Starts Python programs for tests without the seconds that their imports take.

A server, one for each test process, imports torch and the project once and forks for every program.
``Program(["-m", "train", ...], log)`` then runs what ``python -m train ...`` would, and ``executable(path)`` writes a
command that does so in the place of ``python``. It differs from a new interpreter in that modules are loaded already,
that it has one thread, that strings hash alike in all of them, and that it ends as ``os._exit`` does, after the
functions of atexit. Tests of just these things start a new interpreter.

Clients need the standard library only.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = ("train.tasks.pretrain", "train.tasks.rl", "deepspeed", "hydra", "matplotlib.pyplot", "pytest")


class Program:
    """A running ``python ARGUMENTS``, in a session of its own.

    Args:
        arguments: ``-m MODULE``, ``-c CODE`` or a file, and what it finds in ``sys.argv``.
        log: its output and error output are written here, from the beginning.
        environment: all of it; by default this process's.
    """

    def __init__(
        self, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, cwd: Path = ROOT
    ):
        self.log = log
        with open(log, "wb") as file, open(os.devnull) as nothing:
            streams = (nothing.fileno(), file.fileno(), file.fileno())
            self._forked = Forked(server(), arguments, environment or os.environ, cwd, streams)
        self.pid = self._forked.pid

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8")

    @property
    def returncode(self) -> int | None:
        """None while it runs; -N after signal N."""
        return self._forked.wait(0.0)

    def wait(self, seconds: float = 600.0) -> int:
        """Its exit code.

        Raises:
            AssertionError: it runs on; it is killed.
        """
        code = self._forked.wait(seconds)
        if code is None:
            self.kill()
            raise AssertionError(f"still running after {seconds} s\n{self.output[-3000:]}")
        return code

    def until(self, condition: Callable[[], object], seconds: float = 600.0) -> None:
        """Wait until this is true.

        Raises:
            AssertionError: it ended before, or so many seconds were not enough; it is killed.
        """
        end = time.monotonic() + seconds
        while not condition():
            ended = self.returncode is not None
            if (ended and not condition()) or time.monotonic() > end:
                self.kill()
                raise AssertionError(f"the program did not come to that point\n{self.output[-3000:]}")
            time.sleep(0.02)

    def send(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """It and what it started in its session."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._forked.wait(None)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Forked:
    """A process that the server at ``address`` forks. It is killed when its connection, held here, closes early."""

    def __init__(
        self, address: str, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, streams: Sequence[int]
    ):
        request = {"arguments": list(arguments), "environment": dict(environment), "cwd": str(cwd)}
        self._code: int | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(address)
        socket.send_fds(self._connection, [json.dumps(request).encode()], list(streams))
        self.pid = self._receive()

    def wait(self, seconds: float | None) -> int | None:
        """The exit code, or None after so many seconds."""
        if self._code is None:
            try:
                self._connection.settimeout(seconds)
                self._code = self._receive()
            except (TimeoutError, BlockingIOError):
                return None
            self._connection.close()
        return self._code

    def _receive(self) -> int:
        answer = self._connection.recv(100)
        assert answer, "the server has ended, see its messages above"
        return int(answer)


@cache
def server() -> str:
    """Start this process's server, if it has none. Its address."""
    folder = tempfile.mkdtemp(prefix="python-server-")
    address = f"{folder}/socket"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    command = [sys.executable, "-m", "tests.python_server", str(listener.fileno())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, pass_fds=[listener.fileno()], stdin=subprocess.PIPE, start_new_session=True
    )
    listener.close()
    pid = os.getpid()

    def end() -> None:
        if os.getpid() == pid:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return address


def serve(listener: socket.socket) -> None:
    """Fork for every connection, and report exit codes, until the standard input ends."""
    children: dict[int, socket.socket] = {}
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    with selectors.DefaultSelector() as selector:
        for readable in (listener, woken, 0):
            selector.register(readable, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if 0 in ready:
                break
            if listener in ready:
                connection, _ = listener.accept()
                request, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
                pid = os.fork()
                if not pid:
                    os.setsid()
                    connection.sendall(str(os.getpid()).encode())
                    selector.close()
                    for inherited in (listener, connection, *children.values()):
                        inherited.close()
                    _become(**json.loads(request), streams=streams)
                for stream in streams:
                    os.close(stream)
                children[pid] = connection
                selector.register(connection, selectors.EVENT_READ)
            for pid, connection in children.items():
                if connection in ready:  # nobody waits for it any longer
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                    selector.unregister(connection)
            with suppress(BlockingIOError):
                os.read(woken, 4096)
            while children:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                connection = children.pop(pid)
                with suppress(OSError):
                    connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                with suppress(KeyError):
                    selector.unregister(connection)
                connection.close()
    for pid in children:
        os.killpg(pid, signal.SIGKILL)


def _become(arguments: list[str], environment: dict[str, str], cwd: str, streams: list[int]) -> None:
    """In the forked process: be the program, and end."""
    import runpy
    import threading
    import traceback

    code: object = 0
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have what runs behind them ignore it
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        kind, *rest = arguments
        if kind == "-m":
            sys.path.insert(0, cwd)
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.path.insert(0, cwd)
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
        else:
            sys.path.insert(0, str(Path(kind).resolve().parent))
            sys.argv = arguments
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as at every end
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(int(code or 0) & 0xFF if isinstance(code, int) or code is None else 1)


def executable(path: Path) -> str:
    """Write a file there that can stand where a Python interpreter is asked for."""
    command = f'exec "{sys.executable}" -SE "{Path(__file__).resolve()}" client "{server()}" "$@"'
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)
    return str(path)


def client(address: str, arguments: list[str]) -> None:
    """``python ARGUMENTS`` by the server at ``address``: the same streams, signals and exit code."""
    program = Forked(address, arguments, os.environ, Path.cwd(), (0, 1, 2))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: os.kill(program.pid, number))
    code = program.wait(None)
    assert code is not None
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def main(descriptor: int) -> None:
    """The server."""
    import importlib
    import warnings

    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as the engine sets it before it imports DeepSpeed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in PRELOADED:
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    if sys.argv[1] == "client":
        client(sys.argv[2], sys.argv[3:])
    else:
        main(int(sys.argv[1]))
