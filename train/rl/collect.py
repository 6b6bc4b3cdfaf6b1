"""Collecting responses: when each prompt starts, when responses are graded, and which groups a step trains on.

Group number n holds the responses to prompt n // efforts under effort n % efforts. A group starts as soon as
enough other responses have finished for it to fit within two limits: the responses being written, and those sent out
but not yet trained on, so that none becomes much older than the policy. A step takes the first groups that are
complete.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from data.chat.prompt import prompt_ids
from data.tokenizer import special_ids
from model.generation import Request, Sample
from train.errors import InputError
from train.rl.prompts import Prompts, messages_of
from train.rl.rewards.pool import Outcome, Rewards
from train.rl.rollout.base import Rollout, pack_sample, unpack_sample

STOP_SECONDS = 0.2  # how often to check for a stop while waiting for rewards


@dataclass
class Response:
    """A finished sample as text: its reasoning tokens (all of them, if `</think>` never came), and what its task gave
    it.
    """

    sample: Sample
    length: int
    outcome: Outcome


@dataclass
class Group:
    """The responses to one prompt under one effort, by member."""

    number: int
    task: int
    record: dict[str, Any]
    effort: int
    size: int
    samples: dict[int, Sample] = field(default_factory=dict)
    responses: list[Response] = field(default_factory=list)  # once all samples are complete and graded

    @property
    def complete(self) -> bool:
        return len(self.samples) == self.size


@dataclass(frozen=True)
class SamplingPlan:
    """What is sampled, and its limits. All counts are per process.

    rank, ranks: this process takes every ranks-th prompt. efforts, sizes: the groups of a prompt. groups: in a
    step. in_flight: the most responses written at once. ahead: responses sent out but not yet trained on, at most (1 +
    ahead) times a step's; but a step's worth of groups may always be started, even if those left over are the
    largest.
    """

    efforts: tuple[int, ...]
    sizes: tuple[int, ...]
    groups: int
    max_tokens: int
    max_length: int
    temperature: float
    in_flight: int
    ahead: float
    seed: int
    rank: int = 0
    ranks: int = 1

    @property
    def outstanding(self) -> int:
        """Responses that may be sent out and not yet trained on, once a step's groups are."""
        per_step = self.groups * sum(self.sizes) / len(self.sizes)
        return max(math.floor(per_step * (1 + self.ahead)), max(self.sizes))


class Collector:
    """Keeps a rollout busy and returns graded groups. Deterministic if the rollout is."""

    def __init__(self, plan: SamplingPlan, prompts: Prompts, rollout: Rollout, rewards: Rewards, tokenizer: Tokenizer):
        self.plan, self.prompts, self.rollout, self.rewards = plan, prompts, rollout, rewards
        self.tokenizer = tokenizer
        self.eos, self.end_think = special_ids(tokenizer).eos, tokenizer.token_to_id("</think>")
        self.next = 0  # number of groups that this process has started
        self.open: dict[int, Group] = {}  # being written, by group number
        self.ready: list[Group] = []  # all samples complete, in order of completion
        self.owner: dict[int, tuple[int, int]] = {}  # sample id -> group, member
        self._grades: dict[int, list[tuple[int, Future[Outcome] | Outcome]]] = {}  # by group: length, pending reward

    @property
    def outstanding(self) -> int:
        """Responses sent out and not yet returned by ``collect``."""
        return sum(group.size for group in (*self.open.values(), *self.ready))

    def collect(self, stop: Callable[[], bool] = lambda: False) -> list[Group] | None:
        """The graded groups of the next step; None as soon as ``stop`` returns True."""
        while len(self.ready) < self.plan.groups:
            if stop():
                return None
            self._dispatch()
            for sample in self.rollout.poll():
                self._receive(sample)
        chosen = self.ready[: self.plan.groups]
        grades = [grade for group in chosen for _, grade in self._grades[group.number]]
        while wait([grade for grade in grades if isinstance(grade, Future)], timeout=STOP_SECONDS).not_done:
            if stop():
                return None
        self.ready = self.ready[self.plan.groups :]
        for group in chosen:
            graded = self._grades.pop(group.number)
            group.responses = [
                Response(group.samples[member], length, coming if isinstance(coming, Outcome) else coming.result())
                for member, (length, coming) in enumerate(graded)
            ]
        return chosen

    def put_back(self, groups: list[Group]) -> None:
        """Undo a ``collect`` whose groups were not trained on."""
        self.ready = [*groups, *self.ready]
        for group in groups:
            self._grades[group.number] = [(response.length, response.outcome) for response in group.responses]

    def _dispatch(self) -> None:
        plan = self.plan
        while True:
            prompt, kind = divmod(self.next, len(plan.efforts))
            size = plan.sizes[kind]
            begun = len(self.open) + len(self.ready)
            full = begun >= plan.groups and self.outstanding + size > plan.outstanding
            if full or self.rollout.in_flight + size > plan.in_flight:
                return
            prompt = prompt * plan.ranks + plan.rank
            task, record = self.prompts.at(prompt)
            group = Group(prompt * len(plan.efforts) + kind, task, record, plan.efforts[kind], size)
            for member, request in enumerate(self.requests(group)):
                self.owner[self.rollout.submit(request)] = group.number, member
            self.open[group.number] = group
            self.next += 1

    def requests(self, group: Group) -> list[Request]:
        """One request for each response. The draws depend on the group's number and the member only, not on which
        process runs them.
        """
        plan = self.plan
        prompt = encoded(group.record, group.effort, plan, self.tokenizer)
        stop = frozenset([self.eos])
        seeds = (draw_seed(plan.seed, group.number, member) for member in range(group.size))
        return [Request(prompt, plan.max_tokens, plan.temperature, seed=seed, stop=stop) for seed in seeds]

    def _receive(self, sample: Sample) -> None:
        number, member = self.owner.pop(sample.id)
        group = self.open[number]
        group.samples[member] = sample
        if group.complete:
            self.ready.append(self.open.pop(number))
            self._grade(group)

    def _grade(self, group: Group) -> None:
        grades: list[tuple[int, Future[Outcome] | Outcome]] = []
        for member in range(group.size):
            length, texts = self.read(group.samples[member])
            if texts is None:
                grades.append((length, Outcome(0.0, called=False)))
            else:
                grades.append((length, self.rewards.submit(group.task, group.record, *texts)))
        self._grades[group.number] = grades

    def read(self, sample: Sample) -> tuple[int, tuple[str, str] | None]:
        """(reasoning tokens, (answer, reasoning)); the texts are None for a response whose answer was cut off."""
        tokens = sample.tokens
        if self.end_think not in tokens:
            return len(tokens) - (tokens[-1] == self.eos), None
        length = tokens.index(self.end_think)
        if sample.finish != "stop":
            return length, None
        parts = tokens[length + 1 : -1], tokens[:length]
        answer, reasoning = (self.tokenizer.decode(part, skip_special_tokens=False) for part in parts)
        return length, (answer, reasoning)

    def state_dict(self) -> dict[str, Any]:
        """Everything that has started, as tensors and plain containers; responses not yet graded are graded again."""
        return {
            "next": self.next,
            "open": [_packed(group) for group in self.open.values()],
            "ready": [_packed(group) for group in self.ready],
            "owner": [(key, *value) for key, value in self.owner.items()],
            "rollout": self.rollout.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict``."""
        self.next = state["next"]
        self.open = {group.number: group for group in map(_unpacked, state["open"])}
        self.ready = [_unpacked(group) for group in state["ready"]]
        self.owner = {key: (number, member) for key, number, member in state["owner"]}
        self.rollout.load_state_dict(state["rollout"])
        for group in self.ready:
            self._grade(group)


def encoded(record: dict[str, Any], effort: int, plan: SamplingPlan, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token ids of a record's prompt. Raises DataError if it is malformed, InputError if it is too long."""
    prompt = tuple(prompt_ids(tokenizer, messages_of(record), thinking=True, effort=effort))
    if plan.max_length - len(prompt) < plan.max_tokens:
        raise InputError(
            f"rl.tasks: a prompt has {len(prompt)} tokens and its response up to rl.max_tokens = {plan.max_tokens}: "
            f"more than a row of task.seq_len = {plan.max_length}. Raise task.seq_len or remove it: "
            f"{str(record)[:200]}"
        )
    return prompt


def draw_seed(*key: int) -> int:
    """A seed that differs for every key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=6).digest(), "little")


def _packed(group: Group) -> dict[str, Any]:
    fields = ("number", "task", "record", "effort", "size")
    samples = {member: pack_sample(sample) for member, sample in group.samples.items()}
    return {**{name: getattr(group, name) for name in fields}, "samples": samples}


def _unpacked(state: dict[str, Any]) -> Group:
    samples = {member: unpack_sample(sample) for member, sample in state["samples"].items()}
    return Group(**{**state, "samples": samples})
