"""Inference servers as a rollout needs them: completions as streams of tokens, and weights loaded from a folder.

The servers speak the OpenAI completions API with what vLLM and SGLang add to it: token ids as prompts and in answers.
Transient failures (no connection, silence, a broken connection, 408, 425, 429, 5xx) are retried, here or at another
server. A server that fails too often in a row is left out until it has loaded the next weights. Permanent errors (any
other status, a malformed answer) end the run with a message.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from train.config.rollout import ServersConfig
from train.errors import InputError

PASSING = (408, 425, 429)  # transient, like 5xx: the same request may succeed later
LONGEST_WAIT = 60.0  # seconds: the longest wait between attempts, also if a server asks for more


class ServerError(InputError):
    """No server can answer, or one lacks something that is needed."""


class Failure(Exception):
    """A transient failure of one attempt. after: seconds that the server asks to wait."""

    def __init__(self, reason: str, after: float = 0.0):
        super().__init__(reason)
        self.after = after


class Server:
    """What is known about one server.

    alive: it answers and has the current weights. noted: the log already says that it does not. running: requests it
    works on. failures: how many in a row, with the last reason and the time from which it may be asked again.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.alive, self.noted, self.running, self.reason = False, False, 0, "it has not loaded any weights yet"
        self.failures, self.failed_at, self.ready_at = 0, 0.0, 0.0


class Servers:
    """The servers as this process sees them. Everything that waits for them runs in a separate thread: ``start`` or
    ``run`` a coroutine there. All other methods belong to that thread.
    """

    def __init__(self, config: ServersConfig):
        self.config = config
        self.servers = [Server(url) for url in config.urls]
        self.notes: list[str] = []  # messages for the log
        self._key = os.environ[config.key_variable] if config.key_variable else None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
        self._thread.start()
        self._client = self.run(self._open())

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.start(coroutine).result()

    def close(self) -> None:
        """End the thread and all connections."""
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> httpx2.AsyncClient:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # One connection for each answer: the server could close a kept one just when it is used again.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = self._timeout(self.config.silence_seconds)
        return httpx2.AsyncClient(headers=headers, limits=limits, timeout=timeout, trust_env=False)

    def _timeout(self, seconds: float) -> httpx2.Timeout:
        return httpx2.Timeout(seconds, connect=self.config.connect_seconds)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()

    async def pick(self) -> Server:
        """The least busy server, as soon as one may be asked. Raises ``ServerError`` if none is left."""
        while True:
            alive = [server for server in self.servers if server.alive]
            if not alive:
                raise self.nobody()
            now = time.monotonic()
            ready = [server for server in alive if server.ready_at <= now]
            if ready:
                return min(ready, key=lambda server: server.running)
            await asyncio.sleep(min(server.ready_at for server in alive) - now)

    def nobody(self) -> ServerError:
        lines = "".join(f"\n  - {server.url}: {server.reason}" for server in self.servers)
        remedy = "Mend them and run the same command to continue."
        return ServerError(f"rl.rollout.urls: no server is left:{lines}\n{remedy}")

    def failed(self, server: Server, started: float, failure: Failure) -> None:
        """Record a failed attempt that began at ``started``; leave the server out if it was one too many."""
        if started < server.failed_at:  # requests at one server fail together; this failure is already counted
            return
        server.failures, server.failed_at = server.failures + 1, time.monotonic()
        server.reason = str(failure)
        wait = self.config.backoff_seconds * 2 ** (server.failures - 1) * random.uniform(0.5, 1)
        server.ready_at = server.failed_at + min(max(failure.after, wait), LONGEST_WAIT)
        if server.alive and server.failures > self.config.retries:
            self.leave_out(server, f"{failure} ({server.failures} times in a row)")

    def answered(self, server: Server) -> None:
        server.failures = 0

    def leave_out(self, server: Server, reason: str) -> None:
        server.alive, server.reason = False, reason
        if not server.noted:
            self.notes.append(f"server {server.url} is left out until it loads new weights: {reason}")
        server.noted = True

    def take_back(self, server: Server) -> None:
        """The server has the current weights again."""
        if server.noted:
            self.notes.append(f"server {server.url} is back")
        server.alive, server.noted, server.failures, server.ready_at = True, False, 0, 0.0

    async def complete(self, server: Server, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed completion.

        Raises:
            Failure: it could not be obtained, or was interrupted.
            ServerError: it was refused, or the answer is not such a stream.
        """
        url = f"{server.url}/v1/completions"
        with self._attempt():
            async with self._client.stream("POST", url, json=body) as response:
                await self._check(server, response)
                kind = response.headers.get("Content-Type", "an unknown type")
                if not kind.startswith("text/event-stream"):
                    raise self.wrong(server, f"answers with {kind}, not with a stream of events")
                async for line in _lines(response.aiter_bytes()):
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield self._event(server, data)
        raise Failure("the connection ended in the middle of a response")

    def wrong(self, server: Server, what: str) -> ServerError:
        """An error that says what a server does wrong."""
        return ServerError(f"server {server.url} {self._clean(what)}")

    async def load(self, folder: Path, version: int) -> dict[str, str | None]:
        """Have all servers load the weights in ``folder``, including those left out; returns the errors by URL."""
        results = await asyncio.gather(*(self._load(server, folder, version) for server in self.servers))
        return {server.url: result for server, result in zip(self.servers, results, strict=True)}

    async def _load(self, server: Server, folder: Path, version: int) -> str | None:
        attempts = 0 if server.noted else self.config.retries
        for attempt in range(attempts + 1):
            try:
                await self._load_once(server, folder, version)
                return None
            except ServerError as error:
                return str(error)
            except Failure as failure:
                reason = str(failure)
            if attempt < attempts:
                await asyncio.sleep(min(self.config.backoff_seconds * 2**attempt, LONGEST_WAIT))
        return f"could not load weights: {reason}"

    async def _load_once(self, server: Server, folder: Path, version: int) -> None:
        for call in self.config.update:
            answer = await self._asked(server, "POST", call.path, json=_filled(call.body, folder, version))
            if isinstance(answer, dict) and answer.get("success") is False:
                raise self.wrong(server, f"did not do {call.path}: {str(answer.get('message', answer))[:500]}")
        if self.config.version is None:
            return
        answer = await self._asked(server, "GET", self.config.version)
        served = answer.get("weight_version") if isinstance(answer, dict) else None
        if served != str(version):
            rule = f"serves weights of version {served!r} after it was told to load version {str(version)!r}"
            raise self.wrong(server, f"{rule} (weight_version at {self.config.version})")

    async def _asked(self, server: Server, method: str, path: str, **options: Any) -> Any:
        """The JSON of a complete answer; None if it is not JSON."""
        options["timeout"] = self._timeout(self.config.update_seconds)
        with self._attempt():
            async with self._client.stream(method, server.url + path, **options) as response:
                await self._check(server, response)
                text = await response.aread()
        try:
            return json.loads(text)
        except ValueError:
            return None

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Around a request: turns network errors into a ``Failure``."""
        try:
            yield
        except httpx2.TimeoutException as error:
            raise Failure("no answer in time") from error
        except httpx2.HTTPError as error:
            raise Failure(self._clean(f"{type(error).__name__}: {error}")) from error

    async def _check(self, server: Server, response: httpx2.Response) -> None:
        """Raise the error for a status other than 200."""
        status = response.status_code
        if status == 200:
            return
        text = (await response.aread())[:500].decode(errors="replace").strip()
        said = f"status {status} for {response.url.path}" + (f": {text}" if text else "")
        self._refuse(server, status, said, _seconds(response.headers.get("Retry-After")))

    def _event(self, server: Server, data: bytes) -> dict[str, Any]:
        """The decoded event. Raises for an error that the server reports inside the stream, after status 200."""
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise self.wrong(server, f"sent an event that is no JSON object: {data[:200]!r}")
        error = event.get("error")
        if error is None and event.get("object") == "error":
            error = event
        if error is not None:
            code = error.get("code") if isinstance(error, dict) else None
            said = f"an error instead of tokens: {json.dumps(error)[:500]}"
            self._refuse(server, code if isinstance(code, int) else 500, said, 0.0)
        return event

    def _refuse(self, server: Server, status: int, said: str, after: float) -> None:
        if status in PASSING or status >= 500:
            raise Failure(self._clean(said), after)
        remedy = {
            401: ". Name the variable with its API key in rl.rollout.key_variable",
            403: ". Name the variable with its API key in rl.rollout.key_variable",
            404: ". Does it serve rl.rollout.model, and know this path?",
        }.get(status, "")
        raise self.wrong(server, f"refuses: {said}{remedy}")

    def _clean(self, text: str) -> str:
        """The text without the key, which a server may repeat."""
        return text.replace(self._key, "***") if self._key else text


async def _lines(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Complete lines of any length, without line ends."""
    parts: list[bytes] = []
    async for block in blocks:
        first, *others = block.split(b"\n")
        parts.append(first)
        for other in others:
            yield b"".join(parts)
            parts = [other]


def _filled(value: Any, folder: Path, version: int) -> Any:
    """``value`` with its placeholders replaced."""
    if isinstance(value, dict):
        return {key: _filled(item, folder, version) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, folder, version) for item in value]
    if isinstance(value, str):
        return value.replace("{folder}", str(folder)).replace("{version}", str(version))
    return value


def _seconds(text: str | None) -> float:
    """A Retry-After in seconds; a date counts as 0."""
    try:
        return max(float(text), 0.0) if text else 0.0
    except ValueError:
        return 0.0
