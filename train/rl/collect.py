"""Collects responses: starts the groups of responses, has them graded, and selects the groups that a step trains on.

With E efforts, group number n holds the responses to prompt n // E under effort number n % E. A group is started when
it fits into two limits: the number of responses being generated, and the number of responses started but not yet
trained on. The second limit keeps responses from becoming much older than the policy. A step trains on the groups that
are completed first.
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
    """A finished sample, with the number of its reasoning tokens (``length``) and its reward (``outcome``).

    If a response contains no `</think>`, all its tokens count as reasoning tokens.
    """

    sample: Sample
    length: int
    outcome: Outcome


@dataclass
class Group:
    """The responses to one prompt under one effort. Members of the group are numbered from 0."""

    number: int
    task: int
    record: dict[str, Any]
    effort: int
    size: int
    samples: dict[int, Sample] = field(default_factory=dict)
    responses: list[Response] = field(default_factory=list)  # filled when all samples are complete and graded

    @property
    def complete(self) -> bool:
        return len(self.samples) == self.size


@dataclass(frozen=True)
class SamplingPlan:
    """Says which groups of responses are sampled, and how many responses may be unfinished. All counts are per process.

    - efforts: the reasoning effort of each group of a prompt;
    - sizes: the number of responses in each group of a prompt, in the same order;
    - groups: number of groups in a step;
    - in_flight: largest number of responses that are generated at the same time;
    - ahead: at most (1 + ahead) times the responses of a step may be started and not yet trained on. As many groups as
      a step needs may always be started, even if their responses exceed this limit;
    - rank, ranks: this process takes every ``ranks``-th prompt, beginning with number ``rank``.
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
        """The largest number of responses that may be started but not yet trained on, once as many groups as a step
        needs have been started.
        """
        per_step = self.groups * sum(self.sizes) / len(self.sizes)
        return max(math.floor(per_step * (1 + self.ahead)), max(self.sizes))


class Collector:
    """Sends requests to a rollout and returns graded groups of responses; deterministic if the rollout is."""

    def __init__(self, plan: SamplingPlan, prompts: Prompts, rollout: Rollout, rewards: Rewards, tokenizer: Tokenizer):
        self.plan, self.prompts, self.rollout, self.rewards = plan, prompts, rollout, rewards
        self.tokenizer = tokenizer
        self.eos, self.end_think = special_ids(tokenizer).eos, tokenizer.token_to_id("</think>")
        self.next = 0  # number of groups that this process has started
        self.open: dict[int, Group] = {}  # unfinished groups by number
        self.ready: list[Group] = []  # groups whose samples are all complete, in order of completion
        self.owner: dict[int, tuple[int, int]] = {}  # sample id -> group, member
        self._grades: dict[int, list[tuple[int, Future[Outcome] | Outcome]]] = {}  # group -> length, reward

    @property
    def outstanding(self) -> int:
        """Number of responses that were started and have not been returned by ``collect`` yet."""
        return sum(group.size for group in (*self.open.values(), *self.ready))

    def collect(self, stop: Callable[[], bool] = lambda: False) -> list[Group] | None:
        """Wait for the graded groups of the next step and return them, or None as soon as ``stop`` returns True."""
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
        """Take back groups that ``collect`` returned but no step trained on; the next ``collect`` returns them."""
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
        """Make one request for each response of a group.

        The random seed of a request depends on the index of its group and its index in the group, not on the process
        that runs it.
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
        """Split a sample. Returns the number of its reasoning tokens, and the texts (answer, reasoning).

        Instead of the pair of texts, None is returned if the response was cut off before the end of its answer.
        """
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
        """Return all started groups as tensors and plain containers, for a checkpoint.

        Rewards are not part of the returned state; after loading, complete responses are graded again.
        """
        return {
            "next": self.next,
            "open": [_packed(group) for group in self.open.values()],
            "ready": [_packed(group) for group in self.ready],
            "owner": [(key, *value) for key, value in self.owner.items()],
            "rollout": self.rollout.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the started groups from the result of ``state_dict``, and continue their responses."""
        self.next = state["next"]
        self.open = {group.number: group for group in map(_unpacked, state["open"])}
        self.ready = [_unpacked(group) for group in state["ready"]]
        self.owner = {key: (number, member) for key, number, member in state["owner"]}
        self.rollout.load_state_dict(state["rollout"])
        for group in self.ready:
            self._grade(group)


def encoded(record: dict[str, Any], effort: int, plan: SamplingPlan, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token ids of a record's prompt, rendered for a reasoning effort.

    Raises:
        DataError: the record is malformed.
        InputError: the prompt and a response of ``max_tokens`` do not fit into one row.
    """
    prompt = tuple(prompt_ids(tokenizer, messages_of(record), thinking=True, effort=effort))
    if plan.max_length - len(prompt) < plan.max_tokens:
        raise InputError(
            f"rl.tasks: a prompt of {len(prompt)} tokens and its response of up to rl.max_tokens = {plan.max_tokens} "
            f"do not fit into a row of task.seq_len = {plan.max_length}. Raise task.seq_len or remove the prompt: "
            f"{str(record)[:200]}"
        )
    return prompt


def draw_seed(*key: int) -> int:
    """Derive a random seed from some integers; different integers give different seeds."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=6).digest(), "little")


def _packed(group: Group) -> dict[str, Any]:
    fields = ("number", "task", "record", "effort", "size")
    samples = {member: pack_sample(sample) for member, sample in group.samples.items()}
    return {**{name: getattr(group, name) for name in fields}, "samples": samples}


def _unpacked(state: dict[str, Any]) -> Group:
    samples = {member: unpack_sample(sample) for member, sample in state["samples"].items()}
    return Group(**{**state, "samples": samples})
