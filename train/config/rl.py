"""The ``rl`` section of a run's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from train.checkpoint.init_from import find_pretrained
from train.config.strict import STRICT
from train.rl.effort import LengthTerm, training_efforts
from train.rl.loss import PolicyLoss
from train.rl.rollout.servers import ServersConfig

Effort = Any  # a name or a number, checked by `effort_budget`, to which a bool is none


@dataclass(config=STRICT, frozen=True)
class RlTask:
    """A kind of prompt and what its answers are worth."""

    prompts: str  # a JSONL file of records, or a function that draws one; see train/rl/prompts.py
    reward: str  # a function; see train/rl/rewards/pool.py
    held_out: str | None = None  # the same for evaluation; null: further draws of the function, or the training records
    teacher: str | None = None  # task=distill: whose distribution the policy takes on here, named as in init_from


@dataclass(config=STRICT, frozen=True)
class RlConfig:
    """What is asked, how responses are rewarded, and how old they may be when they are trained on."""

    tasks: Annotated[list[RlTask], Field(min_length=1)]
    efforts: list[Effort]  # every prompt is asked under each of them, by number or name
    # Responses to a prompt under each effort (the report's M_b), in the order of the efforts.
    samples: Annotated[list[PositiveInt], Field(min_length=1)]
    prompts: PositiveInt  # in a step, over all processes
    max_tokens: Annotated[int, Field(ge=2)]  # of a response; one that is longer is cut and gets no reward
    temperature: PositiveFloat
    length: LengthTerm | None  # task=rl
    loss: PolicyLoss | None  # task=rl
    staleness: NonNegativeInt  # tokens drawn more policy versions ago than this are not trained on
    # Responses begun for later steps, as a share of a step's; 0: none. A step takes the subgroups that are complete
    # first, so the first steps lean to short responses and low efforts; long ones follow later, with more tokens that
    # `staleness` leaves out. All that were begun are trained on once, but for those left over at the end of the run.
    ahead: NonNegativeFloat
    in_flight: PositiveInt  # responses that a process writes at once
    reward_workers: PositiveInt  # processes that call reward functions
    reward_seconds: PositiveFloat  # of a call; then it counts as 0
    eval_prompts: PositiveInt  # held-out prompts of an evaluation, each asked once under every effort
    eval_efforts: list[Effort]
    rollout: ServersConfig | None = None  # the inference servers that write responses; null: this process does

    @property
    def trained(self) -> list[int]:
        return training_efforts(self.efforts)

    @property
    def evaluated(self) -> list[int]:
        return training_efforts(self.eval_efforts)

    def problems(self, kind: str, ranks: int, seq_len: int) -> Iterator[str]:
        """What is wrong with these settings beside their types: 'key = value: rule. remedy' without the section."""
        for key in ("length", "loss"):
            if (getattr(self, key) is None) != (kind == "distill"):
                rule = "is what task=rl needs" if kind == "rl" else "has no effect with task=distill"
                yield f"{key}: {rule}. {'Give it' if kind == 'rl' else 'Set it to null'}"
        for number, task in enumerate(self.tasks):
            if (task.teacher is None) != (kind == "rl"):
                rule = "has no effect with task=rl" if kind == "rl" else "is what task=distill needs"
                yield f"tasks[{number}].teacher: {rule}. {'Leave it out' if kind == 'rl' else 'Name a checkpoint'}"
            elif task.teacher is not None:
                try:
                    find_pretrained(task.teacher)
                except ValueError as error:
                    yield f"tasks[{number}].teacher = {task.teacher}: {error}. Correct the path"
        for key in ("efforts", "eval_efforts"):
            try:
                training_efforts(getattr(self, key))
            except ValueError as error:
                yield f"{key}: {error}"
        if len(self.samples) != len(self.efforts):
            rule = f"must have one number for each of the {len(self.efforts)} efforts"
            yield f"samples = {self.samples}: {rule}. Give as many"
        if kind == "rl" and min(self.samples) < 2:
            yield f"samples = {self.samples}: a response alone has no other to be compared with. Give 2 or more"
        if self.prompts % ranks:
            yield f"prompts = {self.prompts}: must be a multiple of parallel.world_size = {ranks}. Choose one"
        if self.in_flight < max(self.samples):
            rule = f"a subgroup of {max(self.samples)} responses must fit"
            yield f"in_flight = {self.in_flight}: {rule}. Raise it"
        if self.max_tokens >= seq_len:
            rule = f"with its prompt, a response must fit a row of task.seq_len = {seq_len}"
            yield f"max_tokens = {self.max_tokens}: {rule}. Raise task.seq_len"
        if self.rollout is not None:
            yield from (f"rollout.{text}" for text in self.rollout.problems())
