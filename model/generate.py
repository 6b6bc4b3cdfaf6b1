"""Generation with the packed cache: batched prefill and decode of unequal prompts, sampling, what was routed where.

    samples = generate(model, [Request(prompt=(5, 9, 2), max_tokens=64, seed=1)])

`Generator` is the same with a life of its own: requests are submitted at any time, each `step` gives every running
sequence one token, and `state_dict` stops it at any token. A sequence's draws depend on its seed and its position
alone, not on its batch mates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from model.backbone import DeepseekV41
from model.cache import Cache, Step


@dataclass(frozen=True)
class Request:
    """What to continue and how. temperature 0 takes the likeliest token; top_p keeps the likeliest tokens that together
    reach it; a token of `stop` ends the sample and is its last token.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop: frozenset[int] = frozenset()


@dataclass
class Sample:
    """A continuation, token by token.

    log_probs: of each token under the distribution it was drawn from, temperature and top_p included (greedy: under
    temperature 1). routing int16 [len(prompt) + len(tokens) - 1, layers, k]: the experts chosen at every position that
    the model has seen (None unless recorded). versions: of the policy that drew each token. finish: "stop", "length",
    or None while it runs. id: what `submit` returned.
    """

    request: Request
    id: int = 0
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    routing: Tensor | None = None
    versions: list[int] = field(default_factory=list)
    finish: str | None = None


@dataclass
class _Running:
    """A sample in the making: its cache row (None until it is its turn) and the routing of the passes so far."""

    sample: Sample
    row: int | None = None
    routing: list[Tensor] = field(default_factory=list)

    def ahead(self, passed: int) -> list[int]:
        """Tokens that the model has not seen yet, when it has seen `passed`."""
        prompt = self.sample.request.prompt
        return [*prompt[passed:], *self.sample.tokens[max(0, passed - len(prompt)) :]]


class Generator:
    """Continuous batching over one cache.

    max_running: sequences that run at once, others wait in order. prefill_tokens: prompt tokens of one pass; longer
    prompts are prefilled in chunks. record_routing: fill `Sample.routing`. The policy may change between steps: set
    `version`, and the tokens from then on carry it.
    """

    def __init__(
        self,
        model: DeepseekV41,
        *,
        max_running: int = 64,
        prefill_tokens: int = 4096,
        record_routing: bool = False,
        version: int = 0,
    ):
        for name, value in (("max_running", max_running), ("prefill_tokens", prefill_tokens)):
            if value < 1:
                raise ValueError(f"{name}: is {value}, must be at least 1")
        self.model, self.version, self.record_routing = model, version, record_routing
        self.max_running, self.prefill_tokens = max_running, prefill_tokens
        self.cache = Cache(model.config.text, model.runtime.kv_quant, model.embed.weight.device)
        self.waiting: deque[_Running] = deque()
        self.running: list[_Running] = []
        self.next_id = 0

    @property
    def in_flight(self) -> int:
        """Requests that are not finished."""
        return len(self.waiting) + len(self.running)

    def submit(self, request: Request) -> int:
        """Queue a request; returns the id that its sample will carry. Raises ValueError for one that cannot be run."""
        _check(request, self.model.config.text.vocab_size)
        self.waiting.append(_Running(Sample(request, id=self.next_id)))
        self.next_id += 1
        return self.next_id - 1

    @torch.no_grad()
    def step(self) -> list[Sample]:
        """Give every running sequence one token, newcomers their prefill before that; returns the finished samples."""
        while self.waiting and len(self.running) < self.max_running:
            self.running.append(self.waiting.popleft())
            self.running[-1].row = self.cache.open()
        decode = [r for r in self.running if len(self._ahead(r)) == 1 and r.sample.tokens]
        if decode:
            self._draw(decode, self._pass(decode, [self._ahead(r) for r in decode]))
        pending = [r for r in self.running if all(r is not d for d in decode)]
        while pending:
            pending = self._prefill(pending)
        done = [r for r in self.running if r.sample.finish]
        self.running = [r for r in self.running if not r.sample.finish]
        for finished in done:
            self.cache.close(finished.row)
        return [self._finished(r) for r in done]

    def _ahead(self, running: _Running) -> list[int]:
        return running.ahead(self.cache.rows[running.row].length)

    def _prefill(self, pending: list[_Running]) -> list[_Running]:
        """One pass over the next prompt tokens of the first sequences; returns those that still have some ahead."""
        budget, parts, batch = self.prefill_tokens, [], []
        for running in pending:
            part = self._ahead(running)[:budget]
            if part:
                batch.append(running)
                parts.append(part)
                budget -= len(part)
        hidden = self._pass(batch, parts)
        complete = [i for i, running in enumerate(batch) if not self._ahead(running)]
        if complete:
            self._draw([batch[i] for i in complete], hidden[complete])
        return [running for running in pending if not running.sample.tokens]

    def _pass(self, batch: list[_Running], parts: list[list[int]]) -> Tensor:
        """Run the model over the next tokens of each; hidden state [B, d] of each one's last."""
        model = self.model
        step = Step(self.cache, [r.row for r in batch], parts)
        tokens = step.on_device(step.ids)
        trace = model._run(model.embed(tokens), tokens, step.pack, step=step)
        step.commit()
        if self.record_routing:
            chosen = torch.stack([block.routing.indices for block in trace.blocks], dim=1).to(torch.int16).cpu()
            for running, part in zip(batch, chosen.split(step.counts), strict=True):
                running.routing.append(part)
        last = step.start + step.host_count - 1
        return trace.hidden.index_select(0, step.on_device(last))

    def _draw(self, batch: list[_Running], hidden: Tensor) -> None:
        """Draw each one's next token from hidden [B, d]."""
        requests = [r.sample.request for r in batch]
        places = [len(r.sample.request.prompt) + len(r.sample.tokens) for r in batch]
        tokens, log_probs = draw(
            self.model.head(hidden).float(),
            torch.tensor([r.temperature for r in requests]),
            torch.tensor([r.top_p for r in requests]),
            torch.tensor([uniform(r.seed, p) for r, p in zip(requests, places, strict=True)], dtype=torch.float64),
        )
        for running, token, log_prob in zip(batch, tokens.tolist(), log_probs.tolist(), strict=True):
            sample = running.sample
            sample.tokens.append(token)
            sample.log_probs.append(log_prob)
            sample.versions.append(self.version)
            if token in sample.request.stop:
                sample.finish = "stop"
            elif len(sample.tokens) == sample.request.max_tokens:
                sample.finish = "length"

    def _finished(self, running: _Running) -> Sample:
        if self.record_routing:
            running.sample.routing = torch.cat(running.routing)
        return running.sample

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from this token: tensors and plain containers."""
        return {
            "cache": self.cache.state_dict(),
            "version": self.version,
            "next_id": self.next_id,
            "running": [_packed(r) for r in self.running],
            "waiting": [_packed(r) for r in self.waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict` of a generator over the same configuration."""
        self.cache.load_state_dict(state["cache"])
        self.version, self.next_id = state["version"], state["next_id"]
        self.running = [_unpacked(r) for r in state["running"]]
        self.waiting = deque(_unpacked(r) for r in state["waiting"])


def generate(model: DeepseekV41, requests: Iterable[Request], **options: Any) -> list[Sample]:
    """Run the requests to their ends; samples in their order. `options` are those of `Generator`."""
    generator = Generator(model, **options)
    ids = [generator.submit(request) for request in requests]
    found: dict[int, Sample] = {}
    while generator.in_flight:
        found.update((sample.id, sample) for sample in generator.step())
    return [found[i] for i in ids]


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that a sequence's token at `position` is drawn with: a hash (splitmix64) of the two."""
    return _mixed(_mixed(seed) + position) / 2**64


def _mixed(x: int) -> int:
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B] and their log-probabilities fp64 [B].

    logits fp32 [B, V]; temperature [B] (0 = greedy), top_p [B], u fp64 [B] in [0, 1): each row's place in its
    cumulative distribution.
    """
    temperature, top_p, u = (x.to(logits.device, torch.float64) for x in (temperature, top_p, u))
    greedy = temperature == 0
    log_p = (logits.double() / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    if bool((top_p < 1).any()):
        ranked = log_p.sort(-1, descending=True)
        p = ranked.values.exp()
        behind = p.cumsum(-1) - p >= top_p[:, None]  # enough without this one; never the first
        behind[:, 0] = False
        cut = torch.zeros_like(behind).scatter(1, ranked.indices, behind) & ~greedy[:, None]
        log_p = log_p.masked_fill(cut, float("-inf")).log_softmax(-1)
    cumulative = log_p.exp().cumsum(-1)
    total = cumulative[:, -1:]
    target = (u[:, None] * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    tokens = torch.where(greedy, logits.argmax(-1), drawn)
    return tokens, log_p.gather(1, tokens[:, None]).squeeze(1)


def _check(request: Request, vocabulary: int) -> None:
    problems = []
    if not request.prompt:
        problems.append("prompt: is empty, at least one token is needed (usually the beginning-of-sequence token)")
    for name in ("prompt", "stop"):
        wrong = [t for t in getattr(request, name) if not 0 <= t < vocabulary]
        if wrong:
            problems.append(f"{name}: holds {wrong[0]}, allowed are 0..{vocabulary - 1}")
    if request.max_tokens < 1:
        problems.append(f"max_tokens: is {request.max_tokens}, must be at least 1")
    if not 0 <= request.temperature < float("inf"):
        problems.append(f"temperature: is {request.temperature}, must be 0 (greedy) or more and finite")
    if not 0 < request.top_p <= 1:
        problems.append(f"top_p: is {request.top_p}, must be above 0 and at most 1")
    if problems:
        raise ValueError("the request has these problems:\n  " + "\n  ".join(problems))


def _packed(running: _Running) -> dict[str, Any]:
    sample = running.sample
    request = {**asdict(sample.request), "prompt": list(sample.request.prompt), "stop": sorted(sample.request.stop)}
    return {
        "request": request,
        **{name: getattr(sample, name) for name in ("id", "tokens", "log_probs", "versions")},
        "row": running.row,
        "routing": list(running.routing),
    }


def _unpacked(state: dict[str, Any]) -> _Running:
    plain = dict(state["request"])
    request = Request(**{**plain, "prompt": tuple(plain["prompt"]), "stop": frozenset(plain["stop"])})
    kept = {name: list(state[name]) for name in ("tokens", "log_probs", "versions")}
    return _Running(Sample(request, id=state["id"], **kept), state["row"], list(state["routing"]))
