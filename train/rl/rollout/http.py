"""Responses written by inference servers (vLLM, SGLang) while this process trains.

Every process sends its own requests to all servers and keeps the tokens as they arrive. All processes together write
new weights as a checkpoint folder, which servers and processes must see under the same path; rank 0 tells the servers
to load it. Before that, every process interrupts its requests; afterwards it asks for the rest, with the tokens so far
appended to the prompt. An interrupted response continues at another server in the same way, and so does a resumed run,
with the saved tokens. Servers drop a request whose connection is closed.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import copy
import math
import re
import shutil
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from model import DeepseekV41
from model.generation import Request, Sample, uniform
from train.distributed.world import World
from train.rl.rollout.base import pack_sample, unpack_sample
from train.rl.rollout.servers import Failure, Server, ServerError, Servers

POLL_SECONDS = 0.2  # how long a poll waits for a response to finish
KEEP = 2  # versions of the weights: the served one and the one before
NAME = re.compile(r"version-(\d{8,})")


@dataclass(frozen=True)
class Limits:
    """What answers are checked against: size of the vocabulary, and shape of a token's routing."""

    vocabulary: int
    layers: int
    experts_per_token: int


class HttpRollout:
    """A ``Rollout`` over servers. It sends nothing before the first ``update_weights``.

    folder: receives a checkpoint folder for every version; the newest two are kept. export: writes one; all processes
    of ``world`` call it together, as they do ``update_weights``.
    """

    def __init__(
        self,
        servers: Servers,
        world: World,
        folder: Path,
        export: Callable[[DeepseekV41, Path], None],
        limits: Limits,
    ):
        self.servers, self.world, self.folder, self.export, self.limits = servers, world, folder, export, limits
        self.version, self.next_id = 0, 0
        self.samples: dict[int, Sample] = {}  # not yet returned by ``poll``
        self._sending, self._first = False, True  # the first rollout over these servers closes them
        self._tasks: dict[
            int, asyncio.Task[None]
        ] = {}  # belong to the servers' thread, as do the tokens of the samples
        self._ended: SimpleQueue[int | BaseException] = SimpleQueue()

    @property
    def in_flight(self) -> int:
        return len(self.samples)

    def submit(self, request: Request) -> int:
        if request.images is not None:
            raise ServerError("rl.rollout: prompts with images cannot be sent to servers. Use rl.rollout=null")
        sample = Sample(request, id=self.next_id)
        self.samples[sample.id] = sample
        self.next_id += 1
        if self._sending:
            self.servers.run(self._begin([sample]))
        return sample.id

    def poll(self) -> list[Sample]:
        """Finished samples; waits a moment if there are none.

        Raises:
            ServerError: no server is left, or one lacks something that is needed.
        """
        found: list[Sample] = []
        with suppress(Empty):
            ended = self._ended.get(timeout=POLL_SECONDS) if self.samples else self._ended.get_nowait()
            while True:
                if isinstance(ended, BaseException):
                    raise ended
                if ended in self.samples:  # one that finished while being interrupted is named twice
                    found.append(self.samples.pop(ended))
                ended = self._ended.get_nowait()
        return found

    def notes(self) -> list[str]:
        found = list(self.servers.notes)
        del self.servers.notes[: len(found)]
        return found

    def update_weights(self, version: int, model: DeepseekV41) -> None:
        """Write the weights, have the servers load them, continue what was running. All processes leave out servers
        that fail to load them, and use again those that were left out before and succeed.

        Raises:
            ServerError: no server has loaded the weights.
            OSError: they could not be written.
        """
        self.servers.run(self._break_off())
        path = (self.folder / f"version-{version:08d}").absolute()
        self.export(model, path)
        troubles = None
        if self.world.first:
            self._prune()
            troubles = self.servers.run(self.servers.load(path, version))
        troubles = self.world.from_first(troubles)
        for server in self.servers.servers:
            if troubles[server.url] is None:
                self.servers.take_back(server)
            else:
                self.servers.leave_out(server, troubles[server.url])
        if all(troubles.values()):
            raise self.servers.nobody()
        self.version, self._sending = version, True
        self.servers.run(self._begin(list(self.samples.values())))

    def apart(self) -> HttpRollout:
        other = HttpRollout(self.servers, self.world, self.folder, self.export, self.limits)
        other.version, other._sending, other._first = self.version, self._sending, False
        return other

    def state_dict(self) -> dict[str, Any]:
        async def packed() -> list[dict[str, Any]]:
            return copy.deepcopy([pack_sample(sample) for sample in self.samples.values()])

        samples = self.servers.run(packed())  # between two tokens
        return {"version": self.version, "next_id": self.next_id, "samples": samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.servers.run(self._break_off())
        self.version, self.next_id, self._sending = state["version"], state["next_id"], False
        self.samples = {sample.id: sample for sample in map(unpack_sample, copy.deepcopy(state["samples"]))}

    def close(self) -> None:
        self.servers.run(self._break_off())
        if self._first:
            self.servers.close()

    def _prune(self) -> None:
        versions = sorted(path for path in self.folder.iterdir() if NAME.fullmatch(path.name))
        for old in versions[:-KEEP]:
            shutil.rmtree(old)

    async def _begin(self, samples: list[Sample]) -> None:
        for sample in samples:
            self._tasks[sample.id] = asyncio.get_running_loop().create_task(self._write(sample))

    async def _break_off(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    async def _write(self, sample: Sample) -> None:
        """Have a sample written to its end, by one server after another if necessary."""
        try:
            failures, most = 0, (self.servers.config.retries + 1) * len(self.servers.servers)
            while sample.finish is None:
                server, had, started = await self.servers.pick(), len(sample.tokens), time.monotonic()
                server.running += 1
                try:
                    await self._continue(server, sample)
                except Failure as failure:
                    failures = 0 if len(sample.tokens) > had else failures + 1
                    self.servers.failed(server, started, failure)
                    if failures > most:
                        what = f"and the others write no token of one request, {failures} times in a row: {failure}"
                        raise self.servers.wrong(server, what) from failure
                finally:
                    server.running -= 1
            self._ended.put(sample.id)
        except Exception as error:
            self._ended.put(error)
        self._tasks.pop(sample.id, None)

    async def _continue(self, server: Server, sample: Sample) -> None:
        """Take tokens from a server until the response finishes or is interrupted."""
        said = None
        body = completion(sample, self.servers.config.model, self.servers.config.routing)
        async with aclosing(self.servers.complete(server, body)) as events:
            async for event in events:
                for choice in event.get("choices") or ():
                    self._take(server, sample, choice)
                    said = choice.get("finish_reason") or said
                routed = (event.get("sglext") or {}).get("routed_experts")
                if routed is not None and sample.finish:
                    sample.routing = self._routing(server, sample, routed)
        if sample.finish is None:
            self._explain(server, sample, said)
        elif self.servers.config.routing and sample.routing is None:
            remedy = "Start SGLang with --enable-return-routed-experts, or use rl.rollout.routing=false"
            raise self.servers.wrong(server, f"returns no routed experts. {remedy}")

    def _take(self, server: Server, sample: Sample, choice: Any) -> None:
        """Add the tokens of one event. A sample finishes by the rules of its own request."""
        if not isinstance(choice, dict):
            raise self.servers.wrong(server, f"sent a choice that is no object: {str(choice)[:200]}")
        tokens, log_probs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if tokens is None and (choice.get("text") or log_probs):
            raise self.servers.wrong(server, "returns no token ids: it must know return_token_ids. Use a newer version")
        if tokens and not log_probs:
            raise self.servers.wrong(server, "returns no log-probabilities of its tokens: it must know logprobs=0")
        tokens, log_probs = tokens or [], log_probs or []
        if len(tokens) != len(log_probs):
            counts = f"{len(tokens)} token ids with {len(log_probs)} log-probabilities"
            raise self.servers.wrong(server, f"returns {counts}; each token must have one")
        for token, log_prob in zip(tokens, log_probs, strict=True):
            if type(token) is not int or not 0 <= token < self.limits.vocabulary:
                allowed = f"0..{self.limits.vocabulary - 1}"
                raise self.servers.wrong(server, f"returns token id {token!r}, allowed are {allowed}")
            if type(log_prob) not in (int, float) or not math.isfinite(log_prob) or log_prob > 1e-3:
                raise self.servers.wrong(server, f"returns {log_prob!r} as the log-probability of a token")
            if sample.finish:
                rule = "a stop token" if sample.finish == "stop" else "max_tokens"
                raise self.servers.wrong(server, f"goes on after {rule}: it must know stop_token_ids and max_tokens")
            sample.tokens.append(token)
            sample.log_probs.append(float(log_prob))
            sample.versions.append(self.version)
            if token in sample.request.stop:
                sample.finish = "stop"
            elif len(sample.tokens) == sample.request.max_tokens:
                sample.finish = "length"
        if tokens:
            self.servers.answered(server)

    def _explain(self, server: Server, sample: Sample, said: str | None) -> None:
        """Raise with the reason why a stream ended before its sample was finished."""
        if said == "length":
            length = len(sample.request.prompt) + len(sample.tokens)
            raise self.servers.wrong(
                server,
                f"ended a response at {length} tokens with its prompt, before max_tokens: its context is too short. "
                "Start it with a longer one, or lower rl.max_tokens",
            )
        if said == "stop":
            stop, last = sorted(sample.request.stop), sample.tokens[-1:]
            raise self.servers.wrong(server, f"stopped behind token {last}; the stop tokens of the request are {stop}")
        raise Failure(f"the response was given up by the server (finish_reason {said!r})")

    def _routing(self, server: Server, sample: Sample, routed: Any) -> torch.Tensor:
        """int16 [prompt + tokens - 1, layers, k] from base64 int32. It covers the last request: what earlier policies
        had written was read again by this one.
        """
        positions = len(sample.request.prompt) + len(sample.tokens) - 1
        shape = (positions, self.limits.layers, self.limits.experts_per_token)
        try:
            experts = np.frombuffer(base64.b64decode(routed, validate=True), dtype="<i4").reshape(shape)
        except (TypeError, ValueError, binascii.Error) as error:
            raise self.servers.wrong(server, f"returns routed experts that are not {list(shape)}: {error}") from None
        return torch.from_numpy(experts.astype(np.int16))


def completion(sample: Sample, model: str | None, routing: bool) -> dict[str, Any]:
    """The request for the rest of a sample. A continued sample uses another seed, because a server that counts its
    draws from the start of a request would repeat them.
    """
    request, done = sample.request, len(sample.tokens)
    place = len(request.prompt) + done
    return {
        **({} if model is None else {"model": model}),
        **({"return_routed_experts": True} if routing else {}),
        "prompt": [*request.prompt, *sample.tokens],
        "max_tokens": request.max_tokens - done,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": -1,  # these three override what a server may read from generation_config.json
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": int(uniform(request.seed, place) * 2**53) if done else request.seed,
        "stop_token_ids": sorted(request.stop),
        "logprobs": 0,  # of the drawn token only
        "return_token_ids": True,
        "stream": True,
    }
