"""Where responses come from: one interface over generation in this process and inference servers (rollout_http.py).

A rollout takes requests at any time and works on all of them at once. The policy may change while responses are being
written: ``update_weights`` stops them at the token they have reached, and they go on under the new policy from there,
with the cache and the routing recorded so far. Every token carries the version of the policy that drew it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Protocol

import torch

from model import DeepseekV41
from model.generate import Generator, Request, Sample


class Rollout(Protocol):
    """What the trainer asks of a source of responses. Requests and samples: see ``model/generate.py``."""

    @property
    def in_flight(self) -> int:
        """Requests that are not finished."""

    def submit(self, request: Request) -> int:
        """Queue a request; returns the id of its sample."""

    def poll(self) -> list[Sample]:
        """Samples that have finished since the last call; may be none. Work is done, or waited for, in here."""

    def update_weights(self, version: int, model: DeepseekV41) -> None:
        """Interrupt what is running, and let it go on under ``model``, whose tokens are of this version. Also called
        before the first request. All processes call it together.
        """

    def apart(self) -> Rollout:
        """One more over the same policy, for requests that are no part of this one's state."""

    def notes(self) -> list[str]:
        """What a reader of the log should know, since the last call."""

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on with the unfinished requests: tensors and plain containers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a ``state_dict``."""

    def close(self) -> None:
        """Let go of what runs outside of this process."""


class LocalRollout:
    """Generation in this process, by the model that is being trained: its weights are always the newest.

    precision: context of the model's forward passes, the same as in training.
    """

    def __init__(self, model: DeepseekV41, max_running: int, precision: Callable[[], AbstractContextManager]):
        self.generator = Generator(model, max_running=max_running, record_routing=True)
        self.precision = precision

    @property
    def in_flight(self) -> int:
        return self.generator.in_flight

    def submit(self, request: Request) -> int:
        return self.generator.submit(request)

    def poll(self) -> list[Sample]:
        """One token for every running response."""
        with self.precision():
            return self.generator.step()

    def update_weights(self, version: int, model: DeepseekV41) -> None:
        assert model is self.generator.model, "the generator reads the weights where they are trained"
        self.generator.version = version

    def apart(self) -> LocalRollout:
        return LocalRollout(self.generator.model, self.generator.max_running, self.precision)

    def notes(self) -> list[str]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return self.generator.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.load_state_dict(state)

    def close(self) -> None:
        pass


def pack_sample(sample: Sample) -> dict[str, Any]:
    """A finished sample as tensors and plain containers."""
    request = {**asdict(sample.request), "prompt": list(sample.request.prompt), "stop": sorted(sample.request.stop)}
    return {**{name: value for name, value in vars(sample).items() if name != "request"}, "request": request}


def unpack_sample(state: dict[str, Any]) -> Sample:
    """The sample of a ``pack_sample``."""
    plain = state["request"]
    request = Request(**{**plain, "prompt": tuple(plain["prompt"]), "stop": frozenset(plain["stop"])})
    return Sample(**{**state, "request": request})


def routing_of(sample: Sample, layers: int, k: int) -> torch.Tensor:
    """int16 [prompt + tokens, layers, k]: the experts of every position of a sample. The last token was drawn but never
    read, so its place, and all places of a sample without recorded routing, hold -1.
    """
    length = len(sample.request.prompt) + len(sample.tokens)
    routing = torch.full((length, layers, k), -1, dtype=torch.int16)
    if sample.routing is not None:
        routing[: len(sample.routing)] = sample.routing
    return routing
