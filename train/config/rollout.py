"""The ``rl.rollout`` section of a run's configuration: inference servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass

from train.config.strict import STRICT


@dataclass(config=STRICT, frozen=True)
class Call:
    """A POST to a server. ``{folder}`` and ``{version}`` in the values of ``body`` are replaced by those of the
    weights.
    """

    path: Annotated[str, Field(pattern="^/")]
    body: dict[str, Any]


@dataclass(config=STRICT, frozen=True)
class ServersConfig:
    """Which servers write responses, how they load weights, and how long to wait for them."""

    urls: Annotated[list[str], Field(min_length=1)]  # http://host:port of each
    model: str | None  # the name under which they serve the model; null: requests name none
    key_variable: str | None  # the environment variable that holds their API key
    format: Literal["plain", "released"]  # of the weights they load: in the model's own precision, or quantised
    update: Annotated[list[Call], Field(min_length=1)]  # the calls that make a server load weights, in this order
    version: str | None  # path whose GET returns the served `weight_version`; null: not checked
    routing: bool  # request the experts of every position, for routing replay (SGLang)
    connect_seconds: PositiveFloat
    silence_seconds: PositiveFloat  # without a token, including time in the server's queue
    update_seconds: PositiveFloat  # time limit of one call of `update`
    retries: NonNegativeInt  # consecutive retries before a server is left out
    backoff_seconds: NonNegativeFloat  # before the first retry; doubles with each
