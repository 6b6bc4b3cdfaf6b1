"""Text generation with the packed cache: batched prefill and decoding of prompts of unequal length, sampling, and
recording of the expert routing.

    samples = generate(model, [Request(prompt=(5, 9, 2), max_tokens=64, seed=1)])

`Generator` generates incrementally: requests can be submitted at any time, each `step` gives every running sequence one
token, and `state_dict` saves the state of the generator after any token. The random numbers of a sequence depend only
on its seed and position, not on the rest of the batch (although the batch size may change log-probabilities through the
rounding of fp32 products).

With a drafter (speculative decoding), a step gives every sequence one to B + 1 tokens: the drafter proposes up to B
tokens, the model processes all of them at once, and `verify` decides which are kept. Greedy samples are the same as
without a drafter, and random samples have the same distribution. Rejected tokens are removed from the cache.
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
    """A prompt to continue, with the sampling settings. temperature: 0 takes the most likely token (greedy). top_p:
    sampling uses only the most likely tokens whose total probability reaches `top_p`. stop: a token of this set ends
    the sample and is its last token. images: `pixel_values`, `image_grid_hws` and `vision_token_types` (int64
    [len(prompt)]) of a prompt with images, in the format of a batch.
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
    """The tokens generated for one request, and information about each of them.

    log_probs: the log-probability of each token under the distribution that it was drawn from, with temperature and
    top_p applied (for greedy sampling, with temperature 1). routing int16 [len(prompt) + len(tokens) - 1, layers, k]:
    the experts chosen at every position that the model has processed (None unless recorded), -1 where bounded replay
    skipped positions. replay_start: the first position that was processed after a cached prefix was reused (0: all
    positions were processed); for training on the sample, pass this value as `replay_start` of the batch. versions: the
    policy version that drew each token. accepted: with a drafter, the number of accepted drafts in each step; after the
    accepted drafts, each step adds one token from the model. finish: "stop" or "length", or None while the sample is
    unfinished. id: the return value of `submit`.
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
    """An unfinished sample: its cache row (None while the sample waits), the routing recorded so far, and, for a prompt
    with images, the embeddings [len(prompt), d] until the prompt is prefilled. followers: samples with the same prompt,
    which start from a copy of this sample's prefilled cache row.
    """

    sample: Sample
    row: int | None = None
    routing: list[Tensor] = field(default_factory=list)
    embeddings: Tensor | None = None
    followers: list[_Running] = field(default_factory=list)

    def ahead(self, passed: int) -> list[int]:
        """The tokens of prompt and sample that the model has still to process after the first `passed` tokens."""
        prompt = self.sample.request.prompt
        return [*prompt[passed:], *self.sample.tokens[max(0, passed - len(prompt)) :]]

    def image_flags(self, passed: int, count: int) -> list[bool]:
        """For each of the `count` tokens after the first `passed` tokens, whether the token belongs to an image."""
        images = self.sample.request.images
        flags = [] if images is None else (images["vision_token_types"][passed : passed + count] >= 0).tolist()
        return flags + [False] * (count - len(flags))


class Generator:
    """Generates samples for many requests with continuous batching over one cache.

    max_running: the number of sequences that run at once; other requests wait in order. prefill_tokens: the number of
    prompt tokens in one forward pass; longer prompts are prefilled in chunks. record_routing: whether to fill
    `Sample.routing`. prefix_tokens: the number of tokens in the prefix cache, which keeps main KV and index keys for
    later prompts (without images) with the same beginning. A reused prefix is followed by bounded replay, which is an
    approximation, so samples then depend on the cached prefixes. version: the version of the policy, which is recorded
    for each token and can be changed between steps; a change empties the prefix cache. drafter: proposes tokens for
    speculative decoding. min_confidence: the model checks the longest run of drafts that, according to the confidence
    head, are all accepted with at least this probability (0: all drafts).

    With `runtime.decoder_replay`, decoder layers process only the last `sliding_window` tokens of each prompt.
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
            raise ValueError("drafter: belongs to another model; load the drafter by load_drafter(folder, model)")
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
        """The version of the policy; `Sample.versions` records it for each token that is drawn."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        if version != self._version:
            self.cache.drop_prefixes()
        self._version = version

    @property
    def in_flight(self) -> int:
        """The number of unfinished requests."""
        return len(self.waiting) + len(self.running)

    def submit(self, request: Request) -> int:
        """Add a request to the queue and return the id of its sample. Raises ValueError if the request is invalid."""
        _check(request, self.model)
        self.waiting.append(_Running(Sample(request, id=self.next_id)))
        self.next_id += 1
        return self.next_id - 1

    @torch.no_grad()
    def step(self) -> list[Sample]:
        """Generate one token for every running sequence (with a drafter one or more), and prefill waiting requests that
        can start now. Returns the samples that are finished.
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
        """Start waiting requests up to `max_running` sequences. Returns the started requests that must be prefilled,
        one for each distinct prompt.
        """
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
        """Give every sample with the same prompt as the prefilled sample `leader` a copy of the leader's cache row."""
        for running in leader.followers:
            running.row = self.cache.copy_of_row(leader.row)
            running.routing, running.sample.replay_start = list(leader.routing), leader.sample.replay_start

    def _admit(self, running: _Running) -> None:
        """Open a cache row for a request, with the cached prefix of its prompt if there is one."""
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
        """Run one forward pass over the next prompt tokens of the first pending sequences. Returns the sequences whose
        prompts are not complete yet.
        """
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
        """Run the model on the next tokens of each sequence. Returns a dictionary from each cache row to the hidden
        state [d] of its last token, without the rows whose tokens the decoder layers skip.
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
        """Run all layers on the tokens of a step. Returns the hidden states [T', d] of the tokens that decoder layers
        process, the step of these tokens (hidden states and step are None if there are no such tokens), and the routing
        of each sequence if routing is recorded.
        """
        model, text, drafter, step = self.model, self.model.config.text, self.drafter, whole
        targets = () if drafter is None else text.dspark_target_layer_ids
        entering: dict[int, Tensor] = {}
        state, kept = model.init_streams(self._embed(batch, step)), torch.arange(len(whole.document))
        chosen: list[tuple[Tensor, int, Tensor]] = []  # tokens on the CPU, layer, their experts on the device
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
                chosen.append((kept, layer, result.routing.indices))
        if step is not None and drafter is not None:
            drafter.remember(torch.cat([entering[layer] for layer in targets], dim=-1), step)
        routing = self._read_routing(chosen, len(whole.document)).split(whole.counts) if self.record_routing else ()
        return None if step is None else model.final_hidden(state), step, routing

    def _read_routing(self, chosen: list[tuple[Tensor, int, Tensor]], tokens: int) -> Tensor:
        """The chosen experts int16 [T, layers, k] on the CPU, copied from the device all at once; -1 where a layer did
        not process a token. chosen: for each layer the indices of its tokens int64 [T'], the layer number, and the
        experts int64 [T', k] on the device.
        """
        text = self.model.config.text
        found = torch.full((tokens, text.num_hidden_layers, text.num_experts_per_tok), -1, dtype=torch.int16)
        if chosen:
            read = torch.cat([experts for *_, experts in chosen]).to("cpu", torch.int16)
            for (kept, layer, _), experts in zip(chosen, read.split([len(kept) for kept, *_ in chosen]), strict=True):
                found[kept, layer] = experts
        return found

    def _speculate(self, batch: list[_Running]) -> None:
        """Run one step of speculative decoding: propose drafts, run the model on them, and append the drafts that
        `verify` accepts and one more token to the samples.
        """
        requests = [running.sample.request for running in batch]
        # The positions of the next tokens
        places = [len(r.sample.request.prompt) + len(r.sample.tokens) for r in batch]
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
        """The number of drafts of each sequence that the model processes: as many as are likely to be accepted
        together, but no more tokens than the request still allows or than fit in the window.
        """
        most = min(self.drafter.block_size, self.model.config.text.sliding_window - 1)
        left = torch.tensor([r.sample.request.max_tokens - len(r.sample.tokens) - 1 for r in batch])
        likely = torch.sigmoid(drafted.confidence).cumprod(1) >= self.min_confidence
        return likely.cumprod(1).sum(1).cpu().minimum(left).clamp(max=most).tolist()

    def _draft(self, batch: list[_Running], places: list[int]) -> Draft:
        """Let the drafter propose the tokens after the last token of each sequence."""
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
        """The embeddings [T, d] of the step's tokens, including image features in the prompts."""
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
        """Draw the next token of each sequence from the hidden state [d] of its cache row."""
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
        """Append tokens to a sample until it is finished; returns the number of tokens appended."""
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
        """The state needed to continue the generation later, as tensors, lists and dictionaries."""
        return {
            "cache": self.cache.state_dict(),
            "version": self.version,
            "next_id": self.next_id,
            "drafts": self.drafter is not None,
            "running": [_packed(r) for r in self.running],
            "waiting": [_packed(r) for r in self.waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a generator with the same configuration. Raises ValueError if only one of the two
        generators has a drafter, because the cache contains the drafter's context keys.
        """
        if state.get("drafts", False) != (self.drafter is not None):
            raise ValueError("the saved generation used a drafter and this generator has none, or the reverse")
        self.cache.load_state_dict(state["cache"])
        self._version, self.next_id = state["version"], state["next_id"]
        self.running = [_unpacked(r) for r in state["running"]]
        self.waiting = deque(_unpacked(r) for r in state["waiting"])


def generate(model: DeepseekV41, requests: Iterable[Request], **options: Any) -> list[Sample]:
    """Generate the samples of all requests, and return them in the order of the requests. `options` are arguments of
    `Generator`.
    """
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
            problems.append(f"{name}: contains {wrong[0]}; allowed are 0..{vocabulary - 1}")
    if request.max_tokens < 1:
        problems.append(f"max_tokens: is {request.max_tokens}, must be at least 1")
    if not 0 <= request.temperature < float("inf"):
        problems.append(f"temperature: is {request.temperature}, must be 0 (greedy) or more and finite")
    if not 0 < request.top_p <= 1:
        problems.append(f"top_p: is {request.top_p}, must be above 0 and at most 1")
    if request.images is not None:
        wanted = {"pixel_values", "image_grid_hws", "vision_token_types"}
        if model.config.vision is None:
            problems.append("images: this model's configuration has no vision_config, so prompts cannot have images")
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
    kept["accepted"] = list(state.get("accepted", []))  # missing in states saved before there were drafters
    kept |= {name: state[name] for name in ("id", "replay_start")}
    return _Running(Sample(request, **kept), state["row"], list(state["routing"]))
