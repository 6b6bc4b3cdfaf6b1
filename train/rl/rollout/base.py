"""Where responses come from: one interface for generation in this process and for inference servers (``http.py``).

A rollout accepts requests at any time and works on all of them at once. The policy may change while responses are being
written: ``update_weights`` interrupts them at the token they have reached, and they continue from there under the new
policy, with the cache and the routing recorded so far. Every token carries the version of the policy that drew it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Protocol

import torch

from model import DeepseekV41
from model.generation import Generator, Request, Sample


class Rollout(Protocol):
    """What the trainer needs from a source of responses. Requests and samples: see ``model/generation.py``."""

    @property
    def in_flight(self) -> int:
        """Number of unfinished requests."""

    def submit(self, request: Request) -> int:
        """Queue a request; returns the id of its sample."""

    def poll(self) -> list[Sample]:
        """Samples that have finished since the last call, possibly none. The work, or the waiting for it, happens in
        this call.
        """

    def update_weights(self, version: int, model: DeepseekV41) -> None:
        """Interrupt running responses and let them continue under ``model``, whose tokens carry this version. Also
        called before the first request. All processes call it together.
        """

    def apart(self) -> Rollout:
        """Another rollout over the same policy, for requests that are not part of this one's state."""

    def notes(self) -> list[str]:
        """Messages for the log since the last call."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue the unfinished requests: tensors and plain containers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict``."""

    def close(self) -> None:
        """Release what runs outside this process."""


class LocalRollout:
    """Generation in this process, with the model being trained: its weights are always current.

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
        """Draw one token for every running response."""
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
    """The sample stored by ``pack_sample``."""
    plain = state["request"]
    request = Request(**{**plain, "prompt": tuple(plain["prompt"]), "stop": frozenset(plain["stop"])})
    return Sample(**{**state, "request": request})


def routing_of(sample: Sample, layers: int, k: int) -> torch.Tensor:
    """int16 [prompt + tokens, layers, k]: the experts at every position of a sample. -1 at the last token, which was
    drawn but never read, and everywhere if no routing was recorded.
    """
    length = len(sample.request.prompt) + len(sample.tokens)
    routing = torch.full((length, layers, k), -1, dtype=torch.int16)
    if sample.routing is not None:
        routing[: len(sample.routing)] = sample.routing
    return routing
