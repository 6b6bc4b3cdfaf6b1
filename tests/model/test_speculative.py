"""Speculative decoding: greedy samples are those without a drafter, drawn ones have the same distribution, and rejected
tokens leave nothing behind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import model.attention
import model.generation
import model.indexer
from model import ForwardOptions, Generator, Request
from model.cache.pages import Cache
from model.cache.step import LayerCache, Step
from model.dspark import Draft
from model.generation import generate
from model.quantize import KV_MAIN, fake_quant_fp8, fake_quant_mxfp4
from model.sampling import ACCEPTED, log_distribution, uniform, verify
from tests.model.test_generation import CONFIGS, assert_as_forward, prompts
from tests.model.tiny import image_batch, no_rounding, tiny_config, tiny_drafter  # noqa: F401

GREEDY = [Request(prompt, 12, temperature=0) for prompt in prompts(1, 5, 12, 61)]


def guided(monkeypatch, references: list[list[int]], error: int = 3) -> None:
    """Drafts are the tokens that come, but for about one in `error`: blocks of every accepted length occur."""
    original = Generator._draft

    def draft(self, batch, places):
        found = original(self, batch, places)
        vocabulary, tokens = found.logits.shape[-1], found.tokens.clone()
        for n, running in enumerate(batch):
            done = len(running.sample.tokens)
            ahead = references[running.sample.id][done : done + tokens.shape[1]]
            for slot, token in enumerate(ahead):
                wrong = uniform(running.sample.id, done + slot, 9) < 1 / error
                tokens[n, slot] = (token + wrong) % vocabulary
        return Draft(tokens, found.logits, found.confidence)

    monkeypatch.setattr(Generator, "_draft", draft)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_samples_are_those_without_a_drafter(name: str, no_rounding, monkeypatch) -> None:  # noqa: F811
    """Token by token, with their log-probabilities and routing, over group borders, ring wraps and pages."""
    drafter = tiny_drafter(ForwardOptions(kv_quant=name != "plain"), **CONFIGS[name])
    plain = generate(drafter.backbone, GREEDY, record_routing=True)
    own = generate(drafter.backbone, GREEDY, drafter=drafter)
    assert [sample.tokens for sample in own] == [sample.tokens for sample in plain]
    guided(monkeypatch, [sample.tokens for sample in plain])
    seen = set()
    for chunk in (4096, 7):
        found = generate(drafter.backbone, GREEDY, drafter=drafter, record_routing=True, prefill_tokens=chunk)
        for ours, theirs in zip(found, plain, strict=True):
            assert ours.tokens == theirs.tokens and ours.finish == theirs.finish == "length"
            assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)
            assert_as_forward(drafter.backbone, ours, rounding=False)
            assert 1 + len(ours.accepted) + sum(ours.accepted) == len(ours.tokens) == 12
            seen |= set(ours.accepted)
    assert seen >= ({0, 1, 2} if name.startswith("narrow") else {0, 1, 2, 3})


@pytest.mark.slow
def test_greedy_with_rounding(monkeypatch) -> None:
    """200 sequences: the tokens of at least 99 % are those of plain decoding. Where a sequence parts, the plain path's
    two best tokens were as good as equal (see `as_good_as_equal`).
    """
    drafter = tiny_drafter(engram=True)
    random = torch.Generator().manual_seed(0)
    drawn = [torch.randint(4, 60, (3 + n % 40,), generator=random) for n in range(200)]
    requests = [Request(tuple(prompt.tolist()), 24, temperature=0) for prompt in drawn]
    plain = generate(drafter.backbone, requests)
    guided(monkeypatch, [sample.tokens for sample in plain])
    parted = []
    for ours, theirs in zip(generate(drafter.backbone, requests, drafter=drafter), plain, strict=True):
        differing = [i for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)) if a != b]
        if differing:
            parted.append(ours.id)
            at = differing[0]
            before = (*theirs.request.prompt, *theirs.tokens[:at])
            assert as_good_as_equal(drafter.backbone, before, theirs.tokens[at], ours.tokens[at]), (ours.id, at)
    print(f"{len(parted)} of {len(requests)} greedy sequences part from plain decoding: {parted}")
    assert len(parted) <= 2
    # the second-best tokens of other places are not excused
    with torch.no_grad():
        logits = drafter.backbone(torch.stack([prompt[:3] for prompt in drawn[:8]]), logits_to_keep=1).logits[:, 0]
    excused = [
        as_good_as_equal(drafter.backbone, prompt[:3].tolist(), *best.tolist())
        for prompt, best in zip(drawn, logits.topk(2).indices, strict=False)
    ]
    assert sum(excused) <= 1


def as_good_as_equal(built, before: Sequence[int], best: int, other: int) -> bool:
    """Whether the logit of `best` after the tokens `before` exceeds that of `other` by at most 1e-3, as it is or with
    every value that is rounded to FP8 or FP4 moved by a random 1e-5 of itself first.

    A pass over several tokens adds sums in another order than a pass over one, so values differ by about 1e-7 of
    themselves. A value that close to a rounding edge is rounded to the other side, which in this small model can move a
    logit by more than 0.1. Plain decoding in batches of other sizes parts in the same way.
    """
    ids, random = torch.tensor([list(before)]), torch.Generator().manual_seed(0)

    def moved(rounded):
        return lambda x: rounded(x * (1 + 1e-5 * (2 * torch.rand(x.shape, generator=random) - 1)))

    def margin() -> float:
        with torch.no_grad():
            logits = built(ids, logits_to_keep=1).logits[0, -1]
        return float(logits[best] - logits[other])

    margins = [margin()]
    with pytest.MonkeyPatch.context() as patch:
        main = KV_MAIN._replace(fake_quant=moved(KV_MAIN.fake_quant))
        patch.setattr(model.attention, "fake_quant_fp8", moved(fake_quant_fp8))
        patch.setattr(model.indexer, "fake_quant_mxfp4", moved(fake_quant_mxfp4))
        patch.setattr(model.attention, "main_kv_format", lambda kv_quant: main if kv_quant else None)
        margins += [margin() for _ in range(16)]
    return min(margins) <= 1e-3


def test_replay_prefixes_and_copies(no_rounding, monkeypatch) -> None:  # noqa: F811
    """Bounded replay in the decoder, kept prefixes, and several samples of one prompt that go on from one prefill."""
    drafter = tiny_drafter(ForwardOptions(decoder_replay=True), engram=True)
    long = prompts(150)[0]
    requests = [Request(long, 9, 0.0), Request(long, 9, 0.0), Request(long[:140], 9, 0.0), *GREEDY[:3]]
    plain = generate(drafter.backbone, requests)
    guided(monkeypatch, [sample.tokens for sample in plain])
    for chunk in (4096, 11):
        found = generate(drafter.backbone, requests, drafter=drafter, prefill_tokens=chunk)
        assert [sample.tokens for sample in found] == [sample.tokens for sample in plain]
    without, drafting = (
        Generator(drafter.backbone, prefix_tokens=1000, **options) for options in ({}, {"drafter": drafter})
    )
    for _ in range(2):  # the second time what the first has kept is used
        results = []
        for generator in (without, drafting):
            generator.next_id = 0
            for request in requests[:3]:
                generator.submit(request)
            done = {}
            while generator.in_flight:
                done |= {sample.id: sample for sample in generator.step()}
            results.append([(done[i].tokens, done[i].replay_start) for i in range(3)])
        assert results[0] == results[1]
    assert results[0][0][1] > 0


def test_images_in_prompts(no_rounding) -> None:  # noqa: F811
    drafter = tiny_drafter(vision=True, engram=True)
    batch = image_batch()
    images = {name: batch[name] for name in ("pixel_values", "image_grid_hws")}
    images["vision_token_types"] = batch["vision_token_types"][0]
    requests = [Request(tuple(batch["input_ids"][0].tolist()), 8, 0.0, images=images), GREEDY[1]]
    plain = generate(drafter.backbone, requests)
    for chunk in (4096, 11):
        found = generate(drafter.backbone, requests, drafter=drafter, prefill_tokens=chunk)
        assert [sample.tokens for sample in found] == [sample.tokens for sample in plain]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_stopped_and_continued_after_every_step(tmp_path, temperature: float, no_rounding, monkeypatch) -> None:  # noqa: F811
    """A sample ends at a stop token also inside a block, and the state between steps is all there is."""
    drafter = tiny_drafter(engram=True)
    requests = [replace(r, temperature=temperature, seed=n, max_tokens=20) for n, r in enumerate(GREEDY)]
    free = generate(drafter.backbone, requests, drafter=drafter)
    guided(monkeypatch, [sample.tokens for sample in free], error=6)
    free = generate(drafter.backbone, requests, drafter=drafter)
    requests = [replace(r, stop=frozenset({s.tokens[7]})) for r, s in zip(requests, free, strict=True)]
    whole = generate(drafter.backbone, requests, drafter=drafter, max_running=2, record_routing=True)
    for sample, without in zip(whole, free, strict=True):
        end = without.tokens.index(without.tokens[7]) + 1
        assert sample.tokens == without.tokens[:end] and sample.finish == "stop"
        assert len(sample.routing) == len(sample.request.prompt) + end - 1
    generator = Generator(drafter.backbone, max_running=2, record_routing=True, drafter=drafter)
    for request in requests:
        generator.submit(request)
    found = {}
    while generator.in_flight:
        torch.save(generator.state_dict(), tmp_path / "state.pt")
        generator = Generator(drafter.backbone, max_running=2, record_routing=True, drafter=drafter)
        generator.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        found |= {sample.id: sample for sample in generator.step()}
    for i, sample in enumerate(whole):
        assert (found[i].tokens, found[i].accepted) == (sample.tokens, sample.accepted)
        assert found[i].log_probs == sample.log_probs and torch.equal(found[i].routing, sample.routing)
    assert sorted(generator.cache.free_pages) == list(range(generator.cache.pages))


def test_confidence_shortens_blocks(no_rounding, monkeypatch) -> None:  # noqa: F811
    """No draft is passed over behind the slot at which all together are too unlikely; the sample stays."""
    drafter = tiny_drafter(engram=True)
    plain = generate(drafter.backbone, GREEDY)
    original, passed = Generator._step, []

    def step(self, batch, parts, tentative=False):
        if tentative:
            passed.extend(len(part) - 1 for part in parts)
        return original(self, batch, parts, tentative)

    monkeypatch.setattr(Generator, "_step", step)
    counts = []
    for least in (0.0, 0.3, 0.999):
        passed.clear()
        found = generate(drafter.backbone, GREEDY, drafter=drafter, min_confidence=least)
        assert [sample.tokens for sample in found] == [sample.tokens for sample in plain]
        counts.append(sum(passed) / len(passed))
    assert counts[0] > counts[1] > counts[2] == 0


def test_bf16_keeps_the_rule(monkeypatch) -> None:
    """Under autocast drafting runs in bf16. What is kept follows from the passes' own logits by the acceptance rule,
    computed here token by token.
    """
    drafter = tiny_drafter(engram=True)
    requests = [replace(request, temperature=t, seed=9) for request in GREEDY for t in (0.0, 1.0)]
    calls = []

    def recorded(*arguments):
        found = verify(*arguments)
        calls.append((arguments, found))
        return found

    monkeypatch.setattr(model.generation, "verify", recorded)
    with torch.autocast("cpu", torch.bfloat16):
        found = generate(drafter.backbone, requests, drafter=drafter)
    for sample in found:
        assert 1 + len(sample.accepted) + sum(sample.accepted) == len(sample.tokens) == 12
        assert all(math.isfinite(value) and value <= 0 for value in sample.log_probs)
    judged = {True: 0, False: 0}
    for (logits, counts, drafts, draft_logits, temperature, _, seeds, places), kept in calls:
        parts = logits.split([count + 1 for count in counts])
        for n, (part, count, (tokens, _)) in enumerate(zip(parts, counts, kept, strict=True)):
            for slot, draft in enumerate(drafts[n, :count].tolist()):
                p, q = (row.double().softmax(-1)[draft].item() for row in (part[slot], draft_logits[n, slot]))
                accepted = uniform(seeds[n], places[n] + slot, ACCEPTED) < p / q
                if temperature[n] == 0:
                    accepted = int(part[slot].argmax()) == draft
                assert (len(tokens) > slot + 1 and tokens[slot] == draft) == accepted
                judged[accepted] += 1
                if not accepted:
                    break
    assert min(judged.values()) >= 10


def test_misuse_is_refused() -> None:
    drafter = tiny_drafter()
    with pytest.raises(ValueError, match="drafter: belongs to another model"):
        Generator(tiny_drafter(seed=1).backbone, drafter=drafter)
    with pytest.raises(ValueError, match="min_confidence: is 1.0"):
        Generator(drafter.backbone, drafter=drafter, min_confidence=1.0)
    with pytest.raises(ValueError, match="saved generation used a drafter and this generator has none"):
        Generator(drafter.backbone).load_state_dict(Generator(drafter.backbone, drafter=drafter).state_dict())


# --- the rule


def verified(p: Tensor, q: Tensor, drafts: list[int], seed: int, place: int = 11, temperature: float = 1.0):
    """Of one sequence, beside another with fewer drafts, which changes nothing."""
    logits = torch.cat([p.log(), p.log()[:2]]).float()
    both = torch.tensor([drafts, drafts])
    settings = torch.tensor([temperature, temperature]), torch.ones(2)
    counts = [len(drafts), 1]
    return verify(logits, counts, both, q.log().float().expand(2, -1, -1), *settings, [seed, 5], [place, 3])[0]


@pytest.mark.slow
def test_acceptance_is_the_formula() -> None:
    """A draft is accepted exactly where its number is below p / q; what replaces it follows max(p - q, 0)."""
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.1, 0.1, 0.7], [0.25, 0.25, 0.25, 0.25]])
    q = torch.tensor([[0.2, 0.2, 0.4, 0.2], [0.4, 0.3, 0.2, 0.1]])
    replaced = {draft: torch.zeros(4) for draft in range(4)}
    for seed in range(4000):
        for draft in range(4):
            tokens, log_probs = verified(p, q, [draft, 0], seed)
            accepted = uniform(seed, 11, ACCEPTED) < float(p[0, draft] / q[0, draft])
            assert (tokens[0] == draft and len(tokens) > 1) == accepted
            expected = [p[n, token].log().item() for n, token in enumerate(tokens)]
            assert log_probs == pytest.approx(expected, abs=1e-6)
            if accepted:
                assert (len(tokens) == 3) == (uniform(seed, 12, ACCEPTED) < 0.25)
            else:
                replaced[draft][tokens[0]] += 1
    left = (p[0] - q[0]).clamp(min=0)
    for draft in (2, 3):  # 0 and 1 are always accepted
        share = replaced[draft] / replaced[draft].sum()
        assert (share - left / left.sum()).abs().max() < 0.03
    assert not replaced[0].any() and not replaced[1].any()


def test_greedy_drafts_are_accepted_while_they_are_likeliest() -> None:
    p = torch.eye(5)[[2, 3, 1, 0]].softmax(-1)
    for drafts, expected in (([2, 3, 1], [2, 3, 1, 0]), ([2, 4, 1], [2, 3]), ([0, 3, 1], [2]), ([2, 3, 0], [2, 3, 1])):
        tokens, log_probs = verified(p, p[:3], drafts, seed=0, temperature=0.0)
        assert tokens == expected
        assert log_probs == pytest.approx([p[0].log().max().item()] * len(tokens), abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "bf16"),
    [
        ({"temperature": 0.8, "top_p": 0.7}, False),
        pytest.param({"temperature": 1.5}, False, marks=pytest.mark.slow),
        pytest.param({"temperature": 1.0}, True, marks=pytest.mark.slow),
    ],
)
def test_drawn_tokens_have_the_models_distribution(settings: dict, bf16: bool, no_rounding) -> None:  # noqa: F811
    """Chi-square of the second and third token of 4,000 seeds against the exact probabilities, those of a bf16 forward
    for bf16. (A distribution that is off in one cell of probability 0.05 by half of it adds 50.)
    """
    drafter = tiny_drafter(vocab_size=9, dspark_noise_token_id=8)
    built, prompt, seeds = drafter.backbone, (4, 7, 5, 6, 4), 4000
    requests = [Request(prompt, 4, seed=seed, **settings) for seed in range(seeds)]
    precision = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
    with precision:
        samples = generate(built, requests, drafter=drafter, max_running=500)
    assert 0.05 < sum(sum(s.accepted) for s in samples) / sum(len(s.accepted) for s in samples) < 2.9
    first, second = torch.cartesian_prod(torch.arange(9), torch.arange(9)).unbind(1)
    ids = torch.cat([torch.tensor(prompt).expand(81, -1), first[:, None], second[:, None]], dim=1)
    with torch.no_grad(), precision:
        logits = built(ids).logits
    each = [torch.full((81,), float(settings.get(name, 1.0))) for name in ("temperature", "top_p")]
    log_p = [log_distribution(logits[:, at], *each) for at in (-3, -2, -1)]
    start = log_p[0].gather(1, first[:, None]) + log_p[1].gather(1, second[:, None])  # log p(x1, x2)
    third = (start + log_p[2]).exp().view(9, 9, 9).sum(0)  # p(x2, x3)
    counts = torch.zeros(9, 9, dtype=torch.float64)
    for sample in samples:
        counts[sample.tokens[1], sample.tokens[2]] += 1
    expected = third * seeds
    assert not counts[expected < 1e-9].any(), "a token that top_p leaves out was drawn"
    large = expected >= 5
    cells = torch.cat([expected[large], expected[~large].sum()[None]])
    found = torch.cat([counts[large], counts[~large].sum()[None]])
    kept = cells > 1
    square = ((found - cells).square() / cells)[kept].sum()
    degrees = int(kept.sum()) - 1
    assert degrees > 10 and square < degrees + 4 * math.sqrt(2 * degrees), (float(square), degrees)


# --- the cache


@pytest.mark.parametrize("kv_quant", [True, False])
def test_rejected_tokens_leave_no_trace(kv_quant: bool) -> None:
    """Tentative steps of which some tokens are kept leave every byte, page and counter that passing those alone leaves:
    over ring wraps, open groups of 2 and 4 tokens, and page borders.
    """
    config = tiny_config(sliding_window=7, compress_ratios=[0, 4, 4, 2, 2, 2], engram=True).text
    caches = Cache(config, kv_quant, drafter_stages=2), Cache(config, kv_quant, drafter_stages=2)
    generator = torch.Generator().manual_seed(0)
    rows = [[cache.open() for _ in range(3)] for cache in caches]
    size = caches[0].page_tokens
    assert rows[0] == rows[1]
    plan = [([5, size - 3, 1], None)]
    for count in range(40):
        draws = torch.randint(1, 6, (3,), generator=generator).tolist()
        plan.append(([5, 5, 5 + count % 2], [min(d, 5) for d in draws]))
    for number, (counts, kept) in enumerate(plan):
        kept = kept or counts
        tokens = [[(number + n) % 61 for n in range(count)] for count in counts]
        full = Step.after(caches[0], rows[0], tokens, tentative=number > 0)
        part = Step.after(caches[1], rows[1], [t[:k] for t, k in zip(tokens, kept, strict=True)])
        chosen = torch.cat([torch.arange(k) + s for k, s in zip(kept, full.start.tolist(), strict=True)])
        for layer in config.kv_source_layer_ids:
            values = torch.randn(len(full.document), 2, config.head_dim, generator=generator)
            projected = []
            for step, rows_of in ((full, slice(None)), (part, chosen)):
                view = LayerCache(step, layer)
                joined = view.open_groups(*values[rows_of].unbind(1))
                members = step.layout.entries[config.ratio(layer)].members
                projected.append((view, joined[0][members].mean(1)))
            for view, kv in projected:
                view.entries(kv, fake_quant_mxfp4(kv[:, : config.index_head_dim]))
        for layer in range(config.num_hidden_layers + 2):
            keys = torch.randn(len(full.document), config.head_dim, generator=generator)
            for step, rows_of in ((full, slice(None)), (part, chosen)):
                LayerCache(step, layer).keep(keys[rows_of])
        full.commit(kept)
        part.commit()
        assert_same_state(*caches)
    assert max(row.length for row in caches[0].rows) > size + 20


def assert_same_state(ours: Cache, theirs: Cache) -> None:
    for one, other in zip(ours.rows, theirs.rows, strict=True):
        assert (one.length, one.history, len(one.pages)) == (other.length, other.history, len(other.pages))
    assert sum(ours.uses) == sum(theirs.uses) == sum(len(row.pages) for row in ours.rows)
    assert sorted(ours.free_pages) == [page for page, uses in enumerate(ours.uses) if not uses]
    for name, store in ours.stores().items():
        kind, layer = name.split(".")
        for mine, yours in zip(store.tensors, theirs.stores()[name].tensors, strict=True):
            mine, yours = mine.view(torch.uint8), yours.view(torch.uint8)
            if kind in ("main", "index"):
                size = ours.page_tokens // ours.config.ratio(int(layer))
                mine, yours = (
                    torch.cat([t[p * size : (p + 1) * size] for row in cache.rows for p in row.pages])
                    for t, cache in ((mine, ours), (yours, theirs))
                )
            assert torch.equal(mine, yours), name
