"""The ``rl.rollout`` section of a run's configuration: inference servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass

from train.config.strict import STRICT


@dataclass(config=STRICT, frozen=True)
class Call:
    """A POST request to an inference server.

    ``{folder}`` and ``{version}`` in the values of ``body`` are replaced by folder and version of the new weights.
    """

    path: Annotated[str, Field(pattern="^/")]
    body: dict[str, Any]


@dataclass(config=STRICT, frozen=True)
class ServersConfig:
    """The inference servers that write responses: their addresses, how they load weights, and timeouts."""

    urls: Annotated[list[str], Field(min_length=1)]  # address of each server: http://host:port
    model: str | None  # the name under which the servers serve the model; null: requests name no model
    key_variable: str | None  # the environment variable that contains the servers' API key
    format: Literal["plain", "released"]  # format of the weights that servers load: plain, or quantised as released
    update: Annotated[list[Call], Field(min_length=1)]  # requests that make a server load new weights, in order
    version: str | None  # URL path that returns `weight_version`; null: the version is not checked
    routing: bool  # ask the server (SGLang) for the experts of every position, for routing replay
    connect_seconds: PositiveFloat
    silence_seconds: PositiveFloat  # longest wait for the next token, including time in the server's queue
    update_seconds: PositiveFloat  # time limit of one request of `update`
    retries: NonNegativeInt  # consecutive failed retries after which a server is no longer used
    backoff_seconds: NonNegativeFloat  # wait before the first retry; it doubles with each further retry
