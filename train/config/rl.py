"""The ``rl`` section of a run's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from data.chat.conversation import effort_budget
from model import DraftObjective
from train.config.rollout import ServersConfig
from train.config.strict import STRICT

Effort = Any  # effort name or 1-100; bools are rejected by `effort_budget`


@dataclass(config=STRICT, frozen=True)
class RlTask:
    """One RL task: where its prompts come from, and which function rewards the responses."""

    # A JSONL file of records, or a function that draws a record, named as path/to/file.py:function or
    # package.module:function; see train/rl/prompts.py.
    prompts: str
    reward: str  # the reward function, as path/to/file.py:function or package.module:function
    held_out: str | None = None  # prompts for evaluation; null: draw from the function, or use the training records
    teacher: str | None = None  # task=distill: checkpoint of the teacher for this task, named as in init_from


@dataclass(config=STRICT, frozen=True)
class LengthTerm:
    """The constants of the length penalty. The V4.1 report gives no values; this project chose the defaults in
    ``conf/``.
    """

    c_max: NonNegativeFloat  # C_max: the largest penalty for the length of a response
    k0: NonNegativeFloat  # penalty for l_norm tokens at the lowest effort; 0: no length penalty
    l_norm: PositiveFloat  # L_norm: the number of tokens for which k0 is the penalty
    spread: PositiveFloat  # lambda: the penalty falls by a factor of e over this many mean spacings of the efforts


@dataclass(config=STRICT, frozen=True)
class PolicyLoss:
    """Limits on how far the policy may move from the policy that wrote the responses and from the initial policy."""

    clip_low: Annotated[float, Field(gt=0, lt=1)]
    clip_high: PositiveFloat
    # Responses with a negative advantage are left out of the loss if their mean log(old / new policy probability), in
    # nats per token, exceeds this value; null: all responses stay in the loss.
    off_policy_threshold: PositiveFloat | None
    kl: NonNegativeFloat  # weight of the KL divergence from the initial policy; 0: no copy of that policy is kept


@dataclass(config=STRICT, frozen=True)
class RlConfig:
    """Which prompts and efforts are sampled, how responses are rewarded, and how old a response in training may be."""

    tasks: Annotated[list[RlTask], Field(min_length=1)]
    efforts: list[Effort]  # efforts (numbers or names); every prompt is answered under each of them
    # Number of responses to a prompt under each effort (the report's M_b), in the order of the efforts.
    samples: Annotated[list[PositiveInt], Field(min_length=1)]
    prompts: PositiveInt  # number of prompts in a step, over all processes
    max_tokens: Annotated[int, Field(ge=2)]  # most tokens in a response; a longer response is cut off and gets reward 0
    temperature: PositiveFloat
    length: LengthTerm | None  # the length penalty of task=rl; null with task=distill
    loss: PolicyLoss | None  # the loss of task=rl; null with task=distill
    staleness: NonNegativeInt  # tokens written by a policy more than this many steps old are not trained on
    # Number of responses started early for later steps, as a fraction of the responses of a step; 0: none. A step uses
    # the groups that are complete first, so the first steps favour short responses and low efforts. Long responses come
    # later, and `staleness` excludes more of their tokens. Every response is used in one step, except those that are
    # unused at the end of the run.
    ahead: NonNegativeFloat
    in_flight: PositiveInt  # number of responses that a process writes concurrently
    reward_workers: PositiveInt  # number of processes that call reward functions
    reward_seconds: PositiveFloat  # time limit of one call of a reward function; after it the reward is 0
    eval_prompts: PositiveInt  # number of held-out prompts in an evaluation, each answered once under every effort
    eval_efforts: list[Effort]
    drafter: bool  # train the drafter of the checkpoint along with the policy, and generate responses with it
    drafter_lr_factor: PositiveFloat  # multiplies the drafter's learning rate
    rollout: ServersConfig | None = None  # servers that write responses; null: the training processes do

    @property
    def draft_objective(self) -> DraftObjective:
        """The drafter's loss, with DeepSpec's loss weights. The confidence loss trains only the confidence head."""
        return DraftObjective()

    @property
    def trained(self) -> list[int]:
        return training_efforts(self.efforts)

    @property
    def evaluated(self) -> list[int]:
        return training_efforts(self.eval_efforts)


def training_efforts(values: Sequence[int | str]) -> list[int]:
    """Convert efforts from the configuration (names or numbers) to numbers from 1 to 100.

    Raises:
        ValueError: a value is not a valid effort, the list is empty, or two efforts are equal.
    """
    efforts = [effort_budget(value) for value in values]
    if not efforts or len(set(efforts)) < len(efforts):
        raise ValueError(f"efforts={list(values)!r}: must contain at least one effort, and no effort twice")
    return efforts
