"""Generation with the packed cache: batched prefill and decoding of unequal prompts, sampling, recorded routing.

    samples = generate(model, [Request(prompt=(5, 9, 2), max_tokens=64, seed=1)])

`Generator` does the same incrementally: requests can be submitted at any time, each `step` gives every running sequence
one token, and `state_dict` stops it at any token. A sequence's draws depend only on its seed and position, not on the
rest of the batch (whose size may still change log-probabilities by the rounding of fp32 products).

With a drafter, a step gives every sequence one to B + 1 tokens (speculative decoding): the drafter proposes up to B,
the model runs over all of them at once, and `verify` decides which are kept, so that greedy samples are the same and
drawn ones have the same distribution. Rejected tokens leave no trace in the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model.backbone import DeepseekV41
from model.cache.pages import Cache
from model.cache.step import Step
from model.dspark import Draft, Drafter
from model.layout import build_layout
from model.sampling import DRAFTED, draw, uniform, verify


@dataclass(frozen=True)
class Request:
    """What to continue, and how. temperature 0 takes the most likely token; top_p keeps the most likely tokens whose
    probabilities together reach it; a token of `stop` ends the sample and is its last token. images: `pixel_values`,
    `image_grid_hws` and `vision_token_types` (int64 [len(prompt)]) of a prompt with images, as in a batch.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop: frozenset[int] = frozenset()
    images: dict[str, Tensor] | None = field(default=None, compare=False)


@dataclass
class Sample:
    """A continuation, token by token.

    log_probs: of each token under the distribution it was drawn from, temperature and top_p included (greedy: under
    temperature 1). routing int16 [len(prompt) + len(tokens) - 1, layers, k]: the experts chosen at every position that
    the model has seen (None unless recorded), -1 where a bounded replay left positions out. replay_start: with prefix
    reuse, the position from which the tokens were passed (0 = all); training on the sample simulates it with a batch's
    `replay_start`. versions: of the policy that drew each token. accepted: with a drafter, how many of its tokens each
    pass over drafts took over (a pass adds one token more; the first token comes from the prompt). finish: "stop",
    "length", or None while it runs. id: what `submit` returned.
    """

    request: Request
    id: int = 0
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    routing: Tensor | None = None
    versions: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish: str | None = None
    replay_start: int = 0


@dataclass
class _Running:
    """An unfinished sample: its cache row (None while it waits), the routing so far, and, for a prompt with images, its
    embeddings [len(prompt), d] until it is prefilled. followers: samples with the same prompt, which continue from its
    prefill.
    """

    sample: Sample
    row: int | None = None
    routing: list[Tensor] = field(default_factory=list)
    embeddings: Tensor | None = None
    followers: list[_Running] = field(default_factory=list)

    def ahead(self, passed: int) -> list[int]:
        """Tokens that the model has not seen yet, when it has seen `passed`."""
        prompt = self.sample.request.prompt
        return [*prompt[passed:], *self.sample.tokens[max(0, passed - len(prompt)) :]]

    def image_flags(self, passed: int, count: int) -> list[bool]:
        """Which of the next tokens belong to images."""
        images = self.sample.request.images
        flags = [] if images is None else (images["vision_token_types"][passed : passed + count] >= 0).tolist()
        return flags + [False] * (count - len(flags))


class Generator:
    """Continuous batching over one cache.

    max_running: sequences that run at once; others wait in order. prefill_tokens: prompt tokens of one pass; longer
    prompts are prefilled in chunks. record_routing: fill `Sample.routing`. prefix_tokens: keep the main KV and index
    keys of so many tokens for prompts (without images) with the same beginning; a hit is followed by bounded replay,
    which is an approximation, so samples then depend on what was kept. The policy may change between steps: set
    `version`, which later tokens carry (kept prefixes are then dropped). drafter: proposes tokens, see above;
    min_confidence: it proposes only as many as its confidence head expects to be accepted all together with at least
    this probability (0: always all).

    With `runtime.decoder_replay` the decoder runs over the last `sliding_window` tokens of each prompt only.
    """

    def __init__(
        self,
        model: DeepseekV41,
        *,
        max_running: int = 64,
        prefill_tokens: int = 4096,
        record_routing: bool = False,
        prefix_tokens: int = 0,
        version: int = 0,
        drafter: Drafter | None = None,
        min_confidence: float = 0.0,
    ):
        for name, value in (("max_running", max_running), ("prefill_tokens", prefill_tokens)):
            if value < 1:
                raise ValueError(f"{name}: is {value}, must be at least 1")
        if not 0 <= min_confidence < 1:
            raise ValueError(f"min_confidence: is {min_confidence}, must be a probability below 1")
        if drafter is not None and drafter.backbone is not model:
            raise ValueError("drafter: belongs to another model; load it by load_drafter(folder, model)")
        self.model, self._version, self.record_routing = model, version, record_routing
        self.max_running, self.prefill_tokens = max_running, prefill_tokens
        self.drafter, self.min_confidence = drafter, min_confidence
        stages = 0 if drafter is None else len(drafter.mtp)
        device = model.embed.weight.device
        self.cache = Cache(model.config.text, model.runtime.kv_quant, prefix_tokens, device, stages)
        self.waiting: deque[_Running] = deque()
        self.running: list[_Running] = []
        self.next_id = 0

    @property
    def version(self) -> int:
        """Version of the policy, which later tokens carry."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        if version != self._version:
            self.cache.drop_prefixes()
        self._version = version

    @property
    def in_flight(self) -> int:
        """Number of unfinished requests."""
        return len(self.waiting) + len(self.running)

    def submit(self, request: Request) -> int:
        """Queue a request; returns the id that its sample will carry. Raises ValueError for one that cannot be run."""
        _check(request, self.model)
        self.waiting.append(_Running(Sample(request, id=self.next_id)))
        self.next_id += 1
        return self.next_id - 1

    @torch.no_grad()
    def step(self) -> list[Sample]:
        """Give every running sequence one token, with a drafter one or more; new sequences are prefilled first. Returns
        the finished samples.
        """
        decode = list(self.running)
        pending = self._admit_waiting()
        if decode and self.drafter is not None:
            self._speculate(decode)
        elif decode:
            self._draw(decode, self._pass(decode, [self._ahead(r) for r in decode]))
        while pending:
            pending = self._prefill(pending)
        done = [r for r in self.running if r.sample.finish]
        self.running = [r for r in self.running if not r.sample.finish]
        for finished in done:
            self._keep_prefix(finished)
            self.cache.close(finished.row)
        return [self._finished(r) for r in done]

    def _admit_waiting(self) -> list[_Running]:
        """Start as many waiting requests as may run; returns those to prefill, one for each distinct prompt."""
        first: dict[tuple[int, ...], _Running] = {}
        while self.waiting and len(self.running) < self.max_running:
            running = self.waiting.popleft()
            self.running.append(running)
            request = running.sample.request
            leader = running if request.images else first.setdefault(request.prompt, running)
            if leader is running:
                self._admit(running)
            else:
                leader.followers.append(running)
        return [running for running in self.running if running.row is not None and not running.sample.tokens]

    def _follow(self, leader: _Running) -> None:
        """Let the samples with the prompt that was just prefilled continue from there."""
        for running in leader.followers:
            running.row = self.cache.copy_of_row(leader.row)
            running.routing, running.sample.replay_start = list(leader.routing), leader.sample.replay_start

    def _admit(self, running: _Running) -> None:
        """Give a request its row, and what is already cached of its prompt."""
        model, sample = self.model, running.sample
        prompt, images = sample.request.prompt, sample.request.images
        running.row = self.cache.open()
        row = self.cache.sequence(running.row)
        if images is None:
            sample.replay_start = self.cache.reuse_prefix(running.row, prompt)
        if model.runtime.decoder_replay:
            row.decoder_from = max(row.decoder_from, len(prompt) - model.config.text.sliding_window)
        if self.record_routing and sample.replay_start:
            text = model.config.text
            shape = (sample.replay_start, text.num_hidden_layers, text.num_experts_per_tok)
            running.routing.append(torch.full(shape, -1, dtype=torch.int16))

    def _keep_prefix(self, running: _Running) -> None:
        sample = running.sample
        if sample.request.images is None and all(version == self.version for version in sample.versions):
            self.cache.keep_prefix(running.row, (*sample.request.prompt, *sample.tokens))

    def _ahead(self, running: _Running) -> list[int]:
        return running.ahead(self._passed(running))

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
        complete = [running for running in batch if not self._ahead(running)]
        for leader in list(complete):
            self._follow(leader)
            hidden |= {running.row: hidden[leader.row] for running in leader.followers}
            complete += leader.followers
            leader.followers = []
        if complete:
            self._draw(complete, hidden)
        for running in complete:
            self._keep_prefix(running)
            running.embeddings = None
        return [running for running in pending if not running.sample.tokens]

    def _pass(self, batch: list[_Running], parts: list[list[int]]) -> dict[int, Tensor]:
        """Run the model over the next tokens of each sequence; by row, the hidden state [d] of its last token, except
        for rows that the decoder skips.
        """
        whole = self._step(batch, parts)
        hidden, step, routing = self._run(batch, whole)
        whole.commit()
        for running, part in zip(batch, routing, strict=False):
            running.routing.append(part)
        if step is None:
            return {}
        hidden = hidden.index_select(0, step.on_device(step.start + step.host_count - 1))
        return {span.row: h for span, h in zip(step.spans, hidden, strict=True)}

    def _step(self, batch: list[_Running], parts: list[list[int]], tentative: bool = False) -> Step:
        flags = [r.image_flags(self._passed(r), len(part)) for r, part in zip(batch, parts, strict=True)]
        return Step.after(self.cache, [r.row for r in batch], parts, flags, tentative)

    def _run(self, batch: list[_Running], whole: Step) -> tuple[Tensor | None, Step | None, Sequence[Tensor]]:
        """All layers over a step's tokens: hidden states [T', d] of the decoder's part of it, which is returned too
        (None: nothing), and, if it is recorded, the routing of each sequence.
        """
        model, text, drafter, step = self.model, self.model.config.text, self.drafter, whole
        targets = () if drafter is None else text.dspark_target_layer_ids
        entering: dict[int, Tensor] = {}
        state, kept = model.init_streams(self._embed(batch, step)), torch.arange(len(whole.document))
        chosen = torch.full((len(kept), text.num_hidden_layers, text.num_experts_per_tok), -1, dtype=torch.int16)
        layers = range(text.num_hidden_layers)
        lookups = model.look_up(layers[: text.decoder_start] if step.splits else layers, step.ids, step.layout, step)
        for layer in layers:
            if layer == text.decoder_start and step.splits:
                early, late = step.split()
                if early is not None:
                    model.prefill_kv(layer, state.at(early.tokens), early.step)
                if late is None:
                    step = None
                    break
                state, step, kept = state.at(late.tokens), late.step, late.tokens.cpu()
                entering = {n: x.index_select(0, late.tokens) for n, x in entering.items()}
                lookups = model.look_up(layers[layer:], step.ids, step.layout, step)
            result = model.run_block(layer, state, lookups, step.layout, step=step, for_drafter=layer in targets)
            state = result.state
            if layer in targets:
                entering[layer] = result.entering
            if self.record_routing:
                chosen[kept, layer] = result.routing.indices.to("cpu", torch.int16)
        if step is not None and drafter is not None:
            drafter.remember(torch.cat([entering[layer] for layer in targets], dim=-1), step)
        routing = chosen.split(whole.counts) if self.record_routing else ()
        return None if step is None else model.final_hidden(state), step, routing

    def _speculate(self, batch: list[_Running]) -> None:
        """Draft, run over the drafts, keep what `verify` accepts and one more token."""
        requests = [running.sample.request for running in batch]
        places = [len(r.sample.request.prompt) + len(r.sample.tokens) for r in batch]  # of the next tokens
        drafted = self._draft(batch, places)
        counts = self._counts(batch, drafted)
        tokens = drafted.tokens.tolist()
        parts = [[*self._ahead(r), *own[:n]] for r, own, n in zip(batch, tokens, counts, strict=True)]
        step = self._step(batch, parts, tentative=True)
        hidden, _, routing = self._run(batch, step)
        found = verify(
            self.model.head(hidden),
            counts,
            drafted.tokens,
            drafted.logits,
            torch.tensor([r.temperature for r in requests]),
            torch.tensor([r.top_p for r in requests]),
            [r.seed for r in requests],
            places,
        )
        kept = []
        for running, (accepted, log_probs) in zip(batch, found, strict=True):
            sample = running.sample
            sample.accepted.append(len(accepted) - 1)
            kept.append(self._take(sample, accepted, log_probs))
            sample.accepted[-1] = min(sample.accepted[-1], kept[-1])
        step.commit(kept)
        for running, part, count in zip(batch, routing, kept, strict=False):
            running.routing.append(part[:count])

    def _counts(self, batch: list[_Running], drafted: Draft) -> list[int]:
        """How many of the drafts of each are passed over: never more tokens than are still asked for, or than the
        window holds; and as many as are likely to be accepted together.
        """
        most = min(self.drafter.block_size, self.model.config.text.sliding_window - 1)
        left = torch.tensor([r.sample.request.max_tokens - len(r.sample.tokens) - 1 for r in batch])
        likely = torch.sigmoid(drafted.confidence).cumprod(1) >= self.min_confidence
        return likely.cumprod(1).sum(1).cpu().minimum(left).clamp(max=most).tolist()

    def _draft(self, batch: list[_Running], places: list[int]) -> Draft:
        """Proposals for the tokens behind the last of each sequence."""
        requests = [running.sample.request for running in batch]
        temperature = torch.tensor([r.temperature for r in requests])
        top_p = torch.tensor([r.top_p for r in requests])

        def pick(slot: int, logits: Tensor) -> Tensor:
            u = [uniform(r.seed, place + slot, DRAFTED) for r, place in zip(requests, places, strict=True)]
            return draw(logits, temperature, top_p, torch.tensor(u, dtype=torch.float64))[0]

        first = torch.tensor([running.sample.tokens[-1] for running in batch], device=self.cache.device)
        return self.drafter.propose(self.drafter.recall(first, self.cache, [r.row for r in batch]), first, pick)

    def _passed(self, running: _Running) -> int:
        return self.cache.sequence(running.row).length

    def _embed(self, batch: list[_Running], step: Step) -> Tensor:
        """[T, d], with the images of the prompts in it."""
        x = self.model.embed(step.ids)
        for running, span, start in zip(batch, step.spans, step.start.tolist(), strict=True):
            images = running.sample.request.images
            if images is None or span.past >= len(running.sample.request.prompt):
                continue
            if running.embeddings is None:
                running.embeddings = self._embed_images(running.sample.request)
            part = running.embeddings[span.past : span.past + len(span.tokens)]
            x = x.index_copy(0, torch.arange(start, start + len(part), device=x.device), part)
        return x

    def _embed_images(self, request: Request) -> Tensor:
        device = self.cache.device
        images = {name: tensor.to(device) for name, tensor in request.images.items()}
        images["vision_token_types"] = images["vision_token_types"][None]
        ids = torch.tensor([request.prompt], device=device)
        layout = build_layout(self.model.config.text, ids, vision_token_types=images["vision_token_types"])
        return self.model.embed_batch(ids[0], layout, **images)

    def _draw(self, batch: list[_Running], hidden: dict[int, Tensor]) -> None:
        """Draw each one's next token from its row's hidden state [d]."""
        requests = [r.sample.request for r in batch]
        places = [len(r.sample.request.prompt) + len(r.sample.tokens) for r in batch]
        tokens, log_probs = draw(
            self.model.head(torch.stack([hidden[r.row] for r in batch])),
            torch.tensor([r.temperature for r in requests]),
            torch.tensor([r.top_p for r in requests]),
            torch.tensor([uniform(r.seed, p) for r, p in zip(requests, places, strict=True)], dtype=torch.float64),
        )
        for running, token, log_prob in zip(batch, tokens.tolist(), log_probs.tolist(), strict=True):
            self._take(running.sample, [token], [log_prob])

    def _take(self, sample: Sample, tokens: list[int], log_probs: list[float]) -> int:
        """Add tokens up to the sample's end; returns how many."""
        for number, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True)):
            sample.tokens.append(token)
            sample.log_probs.append(log_prob)
            sample.versions.append(self.version)
            if token in sample.request.stop:
                sample.finish = "stop"
            elif len(sample.tokens) == sample.request.max_tokens:
                sample.finish = "length"
            if sample.finish:
                return number + 1
        return len(tokens)

    def _finished(self, running: _Running) -> Sample:
        if self.record_routing:
            running.sample.routing = torch.cat(running.routing)
        return running.sample

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue from this token: tensors and plain containers."""
        return {
            "cache": self.cache.state_dict(),
            "version": self.version,
            "next_id": self.next_id,
            "drafts": self.drafter is not None,
            "running": [_packed(r) for r in self.running],
            "waiting": [_packed(r) for r in self.waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict` of a generator over the same configuration. Raises ValueError if one of the two
        has a drafter and the other has none: what it reads is in the cache.
        """
        if state.get("drafts", False) != (self.drafter is not None):
            raise ValueError("the generation was stopped with a drafter and goes on without, or the reverse")
        self.cache.load_state_dict(state["cache"])
        self._version, self.next_id = state["version"], state["next_id"]
        self.running = [_unpacked(r) for r in state["running"]]
        self.waiting = deque(_unpacked(r) for r in state["waiting"])


def generate(model: DeepseekV41, requests: Iterable[Request], **options: Any) -> list[Sample]:
    """Run the requests to completion; samples in the same order. `options` are those of `Generator`."""
    generator = Generator(model, **options)
    ids = [generator.submit(request) for request in requests]
    found: dict[int, Sample] = {}
    while generator.in_flight:
        found.update((sample.id, sample) for sample in generator.step())
    return [found[i] for i in ids]


def _check(request: Request, model: DeepseekV41) -> None:
    problems, vocabulary = [], model.config.text.vocab_size
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
    if request.images is not None:
        wanted = {"pixel_values", "image_grid_hws", "vision_token_types"}
        if model.config.vision is None:
            problems.append("images: this model's configuration has no vision_config, prompts can only be text")
        if set(request.images) != wanted:
            problems.append(f"images: has {sorted(request.images)}, must have {sorted(wanted)}")
        elif tuple(request.images["vision_token_types"].shape) != (len(request.prompt),):
            problems.append("images: vision_token_types must have one entry for each token of the prompt")
    if problems:
        raise ValueError("the request has these problems:\n  " + "\n  ".join(problems))


def _packed(running: _Running) -> dict[str, Any]:
    sample = running.sample
    request = {**vars(sample.request), "prompt": list(sample.request.prompt), "stop": sorted(sample.request.stop)}
    return {
        "request": request,
        **{name: getattr(sample, name) for name in ("id", "replay_start")},
        **{name: list(getattr(sample, name)) for name in ("tokens", "log_probs", "versions", "accepted")},
        "row": running.row,
        "routing": list(running.routing),
    }


def _unpacked(state: dict[str, Any]) -> _Running:
    plain = dict(state["request"])
    request = Request(**{**plain, "prompt": tuple(plain["prompt"]), "stop": frozenset(plain["stop"])})
    kept: dict[str, Any] = {name: list(state[name]) for name in ("tokens", "log_probs", "versions")}
    kept["accepted"] = list(state.get("accepted", []))  # none before there were drafters
    kept |= {name: state[name] for name in ("id", "replay_start")}
    return _Running(Sample(request, **kept), state["row"], list(state["routing"]))
