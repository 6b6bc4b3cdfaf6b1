"""The ``rl`` section of a run's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from data.chat.conversation import effort_budget
from train.config.rollout import ServersConfig
from train.config.strict import STRICT

Effort = Any  # effort name or 1-100; bools are rejected by `effort_budget`


@dataclass(config=STRICT, frozen=True)
class RlTask:
    """A kind of prompt, and how its answers are rewarded."""

    prompts: str  # a JSONL file of records, or a function that draws one; see train/rl/prompts.py
    reward: str  # a function; see train/rl/rewards/pool.py
    held_out: str | None = None  # prompts for evaluation; null: further draws of the function, or the training records
    teacher: str | None = None  # task=distill: the model to learn from on this task, named as in init_from


@dataclass(config=STRICT, frozen=True)
class LengthTerm:
    """The constants of the length term. The report gives none; the defaults in ``conf/`` are ours."""

    c_max: NonNegativeFloat  # C_max: the most that a response can lose
    k0: NonNegativeFloat  # price of l_norm tokens at the lowest effort; 0: length costs nothing
    l_norm: PositiveFloat  # L_norm, tokens
    spread: PositiveFloat  # lambda: over how many mean spacings of effort the price falls by a factor of e


@dataclass(config=STRICT, frozen=True)
class PolicyLoss:
    """How far a step may move the policy from the one that wrote the responses, and from the reference."""

    clip_low: Annotated[float, Field(gt=0, lt=1)]
    clip_high: PositiveFloat
    # Responses of negative advantage are masked whose mean log(old / new policy) in nats per token is above this.
    off_policy_threshold: PositiveFloat | None
    kl: NonNegativeFloat  # weight of the KL divergence from the initial policy; 0: no reference is kept


@dataclass(config=STRICT, frozen=True)
class RlConfig:
    """What is sampled, how responses are rewarded, and how old they may be when they are trained on."""

    tasks: Annotated[list[RlTask], Field(min_length=1)]
    efforts: list[Effort]  # every prompt is asked under each of these (numbers or names)
    # Responses to a prompt under each effort (the report's M_b), in the order of the efforts.
    samples: Annotated[list[PositiveInt], Field(min_length=1)]
    prompts: PositiveInt  # in a step, over all processes
    max_tokens: Annotated[int, Field(ge=2)]  # of a response; a longer one is cut off and gets no reward
    temperature: PositiveFloat
    length: LengthTerm | None  # task=rl
    loss: PolicyLoss | None  # task=rl
    staleness: NonNegativeInt  # tokens older than this many policy versions are not trained on
    # Responses started for later steps, as a share of a step's; 0: none. A step takes the groups that are complete
    # first, so the first steps favour short responses and low efforts; long ones follow later, with more tokens that
    # `staleness` excludes. Every response is trained on once, except those left over at the end of the run.
    ahead: NonNegativeFloat
    in_flight: PositiveInt  # responses that a process writes concurrently
    reward_workers: PositiveInt  # processes that call reward functions
    reward_seconds: PositiveFloat  # time limit of a call; after that the reward is 0
    eval_prompts: PositiveInt  # held-out prompts of an evaluation, each asked once under every effort
    eval_efforts: list[Effort]
    rollout: ServersConfig | None = None  # the inference servers that write responses; null: this process does

    @property
    def trained(self) -> list[int]:
        return training_efforts(self.efforts)

    @property
    def evaluated(self) -> list[int]:
        return training_efforts(self.eval_efforts)


def training_efforts(values: Sequence[int | str]) -> list[int]:
    """Efforts from a configuration (names or numbers) as numbers in 1..100.

    Raises:
        ValueError: one is not an effort, there is none, or two are equal.
    """
    efforts = [effort_budget(value) for value in values]
    if not efforts or len(set(efforts)) < len(efforts):
        raise ValueError(f"efforts={list(values)!r}: must be at least one, and all different")
    return efforts
