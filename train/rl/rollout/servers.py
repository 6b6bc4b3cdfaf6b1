"""Connections to inference servers: streams of tokens, and requests to load new weights from a folder.

The servers use the OpenAI completions API with the extensions of vLLM and SGLang: prompts and answers are token ids.
Transient failures (no connection, a timeout, a broken connection, status 408, 425, 429 or 5xx) are retried, on the same
server or on another one. A server that fails too many times in a row is not used until it has loaded the next weights.
Permanent errors (any other status, or a malformed answer) end the run with a message.
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
LONGEST_WAIT = 60.0  # longest wait between attempts in seconds, even if a server asks for a longer one


class ServerError(InputError):
    """No inference server can be used, or a server does not support something that is needed."""


class Failure(Exception):
    """A transient failure of one request, which may be retried. after: seconds that the server asks to wait."""

    def __init__(self, reason: str, after: float = 0.0):
        super().__init__(reason)
        self.after = after


class Server:
    """The state of one inference server, as this process knows it.

    - alive: the server answers and has the current weights;
    - noted: the log already says that the server is not alive;
    - running: number of requests that the server works on;
    - failures: number of failures in a row;
    - failed_at: time of the last failure;
    - reason: message of the last failure;
    - ready_at: time from which the server may be sent requests again.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.alive, self.noted, self.running, self.reason = False, False, 0, "it has not loaded any weights yet"
        self.failures, self.failed_at, self.ready_at = 0, 0.0, 0.0


class Servers:
    """All inference servers, as this process knows them. Requests to them run in a separate thread.

    ``start`` and ``run`` execute a coroutine in that thread. All other methods may only be called in that thread.
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
        """Close all connections and end the thread."""
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> httpx2.AsyncClient:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # Each request uses a new connection: a server might close a kept one just when it is used again.
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
        """Return the server with the fewest running requests, after waiting until one may be used.

        Raises:
            ServerError: no server is left.
        """
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
        remedy = "Repair or restart them, then run the same command to continue."
        return ServerError(f"rl.rollout.urls: no server is left:{lines}\n{remedy}")

    def failed(self, server: Server, started: float, failure: Failure) -> None:
        """Record a failed request that began at ``started``.

        After too many failures in a row the server is no longer used.
        """
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
        """Use a server again, because it has loaded the current weights."""
        if server.noted:
            self.notes.append(f"server {server.url} is back")
        server.alive, server.noted, server.failures, server.ready_at = True, False, 0, 0.0

    async def complete(self, server: Server, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Request a completion and yield the events of the streamed answer.

        Raises:
            Failure: the request failed or the stream was interrupted; the request may be retried.
            ServerError: the server refused the request, or its answer is not a stream of events.
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
        """Return an error that names the server and says what the server does wrong."""
        return ServerError(f"server {server.url} {self._clean(what)}")

    async def load(self, folder: Path, version: int) -> dict[str, str | None]:
        """Make all servers, also those left out, load the weights in ``folder``. Returns for each server's URL an error
        message, or None if the server has loaded the weights.
        """
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
        return f"the server could not load the weights: {reason}"

    async def _load_once(self, server: Server, folder: Path, version: int) -> None:
        for call in self.config.update:
            answer = await self._asked(server, "POST", call.path, json=_filled(call.body, folder, version))
            if isinstance(answer, dict) and answer.get("success") is False:
                said = str(answer.get("message", answer))[:500]
                raise self.wrong(server, f"reported that the request {call.path} failed: {said}")
        if self.config.version is None:
            return
        answer = await self._asked(server, "GET", self.config.version)
        served = answer.get("weight_version") if isinstance(answer, dict) else None
        if served != str(version):
            rule = f"serves weights of version {served!r} after it was told to load version {str(version)!r}"
            raise self.wrong(server, f"{rule} (weight_version at {self.config.version})")

    async def _asked(self, server: Server, method: str, path: str, **options: Any) -> Any:
        """Send a request and return the JSON of its whole answer, or None if the answer is not JSON."""
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
        """Context for a request: turns network errors into a ``Failure``."""
        try:
            yield
        except httpx2.TimeoutException as error:
            raise Failure("the server did not answer in time") from error
        except httpx2.HTTPError as error:
            raise Failure(self._clean(f"{type(error).__name__}: {error}")) from error

    async def _check(self, server: Server, response: httpx2.Response) -> None:
        """Raise an error if the HTTP status of a response is not 200."""
        status = response.status_code
        if status == 200:
            return
        text = (await response.aread())[:500].decode(errors="replace").strip()
        said = f"status {status} for {response.url.path}" + (f": {text}" if text else "")
        self._refuse(server, status, said, _seconds(response.headers.get("Retry-After")))

    def _event(self, server: Server, data: bytes) -> dict[str, Any]:
        """Decode an event of a stream. Raises an error if the event reports one, which may happen after status 200."""
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise self.wrong(server, f"sent an event that is not a JSON object: {data[:200]!r}")
        error = event.get("error")
        if error is None and event.get("object") == "error":
            error = event
        if error is not None:
            code = error.get("code") if isinstance(error, dict) else None
            said = f"it sent an error instead of tokens: {json.dumps(error)[:500]}"
            self._refuse(server, code if isinstance(code, int) else 500, said, 0.0)
        return event

    def _refuse(self, server: Server, status: int, said: str, after: float) -> None:
        if status in PASSING or status >= 500:
            raise Failure(self._clean(said), after)
        remedy = {
            401: ". Set rl.rollout.key_variable to the environment variable that contains its API key",
            403: ". Set rl.rollout.key_variable to the environment variable that contains its API key",
            404: ". Check that it serves rl.rollout.model and supports this path",
        }.get(status, "")
        raise self.wrong(server, f"refuses the request: {said}{remedy}")

    def _clean(self, text: str) -> str:
        """Replace the API key in a message by asterisks, since a server may repeat the key."""
        return text.replace(self._key, "***") if self._key else text


async def _lines(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Split a stream of byte blocks into complete lines of any length, without line ends."""
    parts: list[bytes] = []
    async for block in blocks:
        first, *others = block.split(b"\n")
        parts.append(first)
        for other in others:
            yield b"".join(parts)
            parts = [other]


def _filled(value: Any, folder: Path, version: int) -> Any:
    """Replace the placeholders ``{folder}`` and ``{version}`` in all texts of a request body."""
    if isinstance(value, dict):
        return {key: _filled(item, folder, version) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, folder, version) for item in value]
    if isinstance(value, str):
        return value.replace("{folder}", str(folder)).replace("{version}", str(version))
    return value


def _seconds(text: str | None) -> float:
    """Convert a Retry-After header to seconds; a date counts as 0."""
    try:
        return max(float(text), 0.0) if text else 0.0
    except ValueError:
        return 0.0
