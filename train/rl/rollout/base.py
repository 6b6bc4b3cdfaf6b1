"""Rollouts generate responses: one interface for generation in this process and on inference servers (``http.py``).

A rollout accepts requests at any time and works on all of them concurrently. The policy may change while responses are
being written: ``update_weights`` interrupts the responses after their current token, and the responses continue from
this token with the new weights; the cache and the recorded routing are kept. For every token, the version of the policy
that drew the token is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Protocol

import torch

from model import DeepseekV41, Drafter
from model.generation import Generator, Request, Sample


class Rollout(Protocol):
    """The interface of a rollout. ``model/generation.py`` defines requests and samples."""

    @property
    def in_flight(self) -> int:
        """Number of unfinished requests."""

    def submit(self, request: Request) -> int:
        """Queue a request to generate a response. Returns the id of its sample."""

    def poll(self) -> list[Sample]:
        """Return the samples that have finished since the last call; the list may be empty.

        Responses are generated during this call, or this call waits for the servers that generate them.
        """

    def update_weights(self, version: int, model: DeepseekV41) -> None:
        """Interrupt the running responses and continue them with the weights of ``model``.

        Tokens drawn after this call are stored with the number ``version``. This method is also called before the first
        request. All processes call this method together.
        """

    def apart(self) -> Rollout:
        """Return a second rollout with the same policy, for requests that need not be saved in checkpoints
        (evaluation).
        """

    def notes(self) -> list[str]:
        """Return the messages for the log that have come up since the last call."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to continue the unfinished requests, as tensors and plain containers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the unfinished requests from the result of ``state_dict``."""

    def close(self) -> None:
        """Close connections and end threads; other processes, such as inference servers, keep running."""


class LocalRollout:
    """Generates responses in this process with the model that is being trained, so the weights are always current.

    precision: context manager for the model's forward passes (autocast), the same as in training. drafter: proposes
    tokens for speculative decoding, which changes the drawn tokens but not their distribution.
    """

    def __init__(
        self,
        model: DeepseekV41,
        max_running: int,
        precision: Callable[[], AbstractContextManager],
        drafter: Drafter | None = None,
    ):
        self.generator = Generator(model, max_running=max_running, record_routing=True, drafter=drafter)
        self.precision = precision

    @property
    def in_flight(self) -> int:
        return self.generator.in_flight

    def submit(self, request: Request) -> int:
        return self.generator.submit(request)

    def poll(self) -> list[Sample]:
        """Draw one token (or with a drafter one or more tokens) for every running response. Returns the finished
        samples.
        """
        with self.precision():
            return self.generator.step()

    def update_weights(self, version: int, model: DeepseekV41) -> None:
        assert model is self.generator.model, "LocalRollout can only generate with the model it was made for"
        self.generator.version = version

    def apart(self) -> LocalRollout:
        generator = self.generator
        return LocalRollout(generator.model, generator.max_running, self.precision, generator.drafter)

    def notes(self) -> list[str]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return self.generator.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.load_state_dict(state)

    def close(self) -> None:
        pass


def pack_sample(sample: Sample) -> dict[str, Any]:
    """Convert a sample to tensors and plain containers, for a checkpoint."""
    request = {**asdict(sample.request), "prompt": list(sample.request.prompt), "stop": sorted(sample.request.stop)}
    return {**{name: value for name, value in vars(sample).items() if name != "request"}, "request": request}


def unpack_sample(state: dict[str, Any]) -> Sample:
    """Restore a sample from the result of ``pack_sample``."""
    plain = state["request"]
    request = Request(**{**plain, "prompt": tuple(plain["prompt"]), "stop": frozenset(plain["stop"])})
    return Sample(**{**state, "request": request})


def routing_of(sample: Sample, layers: int, k: int) -> torch.Tensor:
    """Return the experts chosen at every position of a sample, int16 [prompt + tokens, layers, k].

    The experts at the last token are -1, since the last token was drawn but never fed to the model. If no routing was
    recorded, the experts at all positions are -1.
    """
    length = len(sample.request.prompt) + len(sample.tokens)
    routing = torch.full((length, layers, k), -1, dtype=torch.int16)
    if sample.routing is not None:
        routing[: len(sample.routing)] = sample.routing
    return routing
