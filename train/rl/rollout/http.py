"""Generates responses on inference servers (vLLM, SGLang) while this process trains.

Every process spreads its own requests over all servers and stores the tokens as they arrive. When the weights change,
all processes interrupt their requests by closing the connections. Together the processes write the new weights as a
checkpoint folder, which servers and processes must see under the same path, and rank 0 tells the servers to load this
folder. To continue its responses, each process then sends requests in which the tokens generated so far are appended to
the prompt. Such requests also continue a response on another server after a failure, and continue the responses of a
checkpoint in a resumed run.
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

POLL_SECONDS = 0.2  # longest time that `poll` waits for a response to finish
KEEP = 2  # number of versions of the weights on disk: the served version and the previous one
NAME = re.compile(r"version-(\d{8,})")


@dataclass(frozen=True)
class Limits:
    """Sizes that the servers' answers are checked against: vocabulary size, layers, and experts per token."""

    vocabulary: int
    layers: int
    experts_per_token: int


class HttpRollout:
    """A ``Rollout`` that generates on inference servers. The first request is sent after the first ``update_weights``.

    Args:
        folder: directory for the checkpoint folders with new weights; the newest two are kept.
        export: function that writes the weights as a checkpoint folder; all processes of ``world`` call it together.
        limits: sizes that the servers' answers are checked against.
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
        self.samples: dict[int, Sample] = {}  # samples that ``poll`` has not returned yet
        self._sending, self._first = False, True  # only the first rollout, not those from `apart`, closes the servers
        self._tasks: dict[int, asyncio.Task[None]] = {}  # only the servers' thread uses these and the tokens of samples
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
        """Return the samples that have finished since the last call. If there are none, wait up to ``POLL_SECONDS`` for
        a sample to finish.

        Raises:
            ServerError: no server is left, or a server does not support something that is needed.
        """
        found: list[Sample] = []
        with suppress(Empty):
            ended = self._ended.get(timeout=POLL_SECONDS) if self.samples else self._ended.get_nowait()
            while True:
                if isinstance(ended, BaseException):
                    raise ended
                if ended in self.samples:  # a sample may be queued twice if it finished while interrupted
                    found.append(self.samples.pop(ended))
                ended = self._ended.get_nowait()
        return found

    def notes(self) -> list[str]:
        found = list(self.servers.notes)
        del self.servers.notes[: len(found)]
        return found

    def update_weights(self, version: int, model: DeepseekV41) -> None:
        """Write the weights, make the servers load them, and continue the interrupted responses.

        A server that fails to load the weights is no longer used by any process. A server that was left out before and
        now loads the weights is used again.

        Raises:
            ServerError: no server has loaded the weights.
            OSError: the weights could not be written.
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

        samples = self.servers.run(packed())  # run in the servers' thread, so no token is added meanwhile
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
        """Generate a sample to its end. If a server fails, another one continues."""
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
                        times = f"{failures} times in a row: {failure}"
                        what = f"and the other servers failed to write a token of one request {times}"
                        raise self.servers.wrong(server, what) from failure
                finally:
                    server.running -= 1
            self._ended.put(sample.id)
        except Exception as error:
            self._ended.put(error)
        self._tasks.pop(sample.id, None)

    async def _continue(self, server: Server, sample: Sample) -> None:
        """Receive tokens from a server until the response is finished or interrupted."""
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
            raise self.servers.wrong(server, f"returns no routed experts, which routing replay needs. {remedy}")

    def _take(self, server: Server, sample: Sample, choice: Any) -> None:
        """Check the tokens of one event and add them to the sample.

        The sample is finished when its request says so (stop token or ``max_tokens``), whatever the server says.
        """
        if not isinstance(choice, dict):
            raise self.servers.wrong(server, f"sent a choice that is not a JSON object: {str(choice)[:200]}")
        tokens, log_probs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if tokens is None and (choice.get("text") or log_probs):
            missing = "returns no token ids, because it does not support return_token_ids. Use a newer version"
            raise self.servers.wrong(server, missing)
        if tokens and not log_probs:
            missing = "returns no log-probabilities of its tokens. It must support the request field logprobs=0"
            raise self.servers.wrong(server, missing)
        tokens, log_probs = tokens or [], log_probs or []
        if len(tokens) != len(log_probs):
            counts = f"{len(tokens)} token ids with {len(log_probs)} log-probabilities"
            raise self.servers.wrong(server, f"returns {counts}; each token must have one")
        for token, log_prob in zip(tokens, log_probs, strict=True):
            if type(token) is not int or not 0 <= token < self.limits.vocabulary:
                allowed = f"0..{self.limits.vocabulary - 1}"
                raise self.servers.wrong(server, f"returns token id {token!r}, but the vocabulary has {allowed}")
            if type(log_prob) not in (int, float) or not math.isfinite(log_prob) or log_prob > 1e-3:
                raise self.servers.wrong(server, f"returns the invalid log-probability {log_prob!r} for a token")
            if sample.finish:
                rule = "a stop token" if sample.finish == "stop" else "max_tokens"
                needs = "It must support stop_token_ids and max_tokens"
                raise self.servers.wrong(server, f"continues a response after {rule}. {needs}")
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
        """Raise an error that says why the stream of tokens ended before the sample was finished."""
        if said == "length":
            length = len(sample.request.prompt) + len(sample.tokens)
            raise self.servers.wrong(
                server,
                f"ended a response before max_tokens, at {length} tokens with its prompt: its context length is too "
                "short. Start the server with a longer context, or lower rl.max_tokens",
            )
        if said == "stop":
            stop, last = sorted(sample.request.stop), sample.tokens[-1:]
            raise self.servers.wrong(server, f"stopped after token {last}; the stop tokens of the request are {stop}")
        raise Failure(f"the server ended the response early (finish_reason {said!r})")

    def _routing(self, server: Server, sample: Sample, routed: Any) -> torch.Tensor:
        """Decode the expert ids that a server returns as base64 int32. Returns int16 [prompt + tokens - 1, layers, k].

        The returned experts cover all positions, also the tokens written with earlier weights, since the last request
        processed the whole prompt and all tokens so far again.
        """
        positions = len(sample.request.prompt) + len(sample.tokens) - 1
        shape = (positions, self.limits.layers, self.limits.experts_per_token)
        try:
            experts = np.frombuffer(base64.b64decode(routed, validate=True), dtype="<i4").reshape(shape)
        except (TypeError, ValueError, binascii.Error) as error:
            raise self.servers.wrong(
                server, f"returns routed experts that do not have the shape {list(shape)}: {error}"
            ) from None
        return torch.from_numpy(experts.astype(np.int16))


def completion(sample: Sample, model: str | None, routing: bool) -> dict[str, Any]:
    """Make the JSON body of the request for the remaining tokens of a sample.

    The continuation of a sample gets a different seed, because a server that restarts its random generator with each
    request would draw the same random numbers again.
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
        "top_k": -1,  # these three override a server's generation_config.json
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": int(uniform(request.seed, place) * 2**53) if done else request.seed,
        "stop_token_ids": sorted(request.stop),
        "logprobs": 0,  # log-probability of the drawn token only
        "return_token_ids": True,
        "stream": True,
    }
