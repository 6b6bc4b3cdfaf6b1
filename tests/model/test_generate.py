"""Generation with the packed cache against the plain forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from golden_files import traced
from tiny import no_rounding, tiny_model, tokens  # noqa: F401

import model.cache
from model import DeepseekV41, Generator, Request, Sample, generate

CONFIGS = {
    "plain": {},
    "engram": {"engram": True},
    "narrow window, long groups": {"sliding_window": 3, "compress_ratios": [0, 4, 4, 1, 1, 1]},
    "no pool": {"candidate_source_layer_id": -1},
    "decode through pairs only": {"compress_ratios": [0, 2, 2, 2, 2, 2]},
    "windows only": {
        "compress_ratios": [0] * 6,
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "candidate_source_layer_id": -1,
    },
}


def prompts(*lengths: int) -> list[tuple[int, ...]]:
    return [tuple(tokens(n, seed=n).tolist()) for n in lengths]


@pytest.fixture(params=["rounded", "unrounded"])
def rounding(request, monkeypatch) -> bool:
    """Whether the attention state is quantised. Without, fp32 noise stays noise and everything must agree tightly;
    with, a value within noise of a rounding edge may fall on the other side, for a few tokens.
    """
    if request.param == "unrounded":
        request.getfixturevalue("no_rounding")
        for name in ("KV_WINDOW", "KV_INDEX", "KV_MAIN"):
            monkeypatch.setattr(model.cache, name, None)  # a store without a format is plain
    return request.param == "rounded"


def assert_as_forward(built: DeepseekV41, sample: Sample, rounding: bool) -> None:
    """The greedy sample's tokens, log-probabilities and routing are those of one forward over all of it."""
    prompt = sample.request.prompt
    ids = torch.tensor([[*prompt, *sample.tokens[:-1]]])
    with torch.no_grad():
        output, trace = traced(built, {"input_ids": ids})
    log_p = output.logits[0, len(prompt) - 1 :].log_softmax(-1)
    chosen = torch.tensor(sample.tokens)
    difference = (torch.tensor(sample.log_probs) - log_p.gather(1, chosen[:, None]).squeeze(1)).abs()
    experts = torch.stack([block.routing.indices for block in trace.blocks], dim=1).sort(-1).values
    recorded = sample.routing.long().sort(-1).values
    assert sample.routing.dtype == torch.int16 and recorded.shape == experts.shape
    if rounding:
        assert (difference <= 1e-4).float().mean() >= 0.8 and difference.max() <= 0.1, difference
        assert (recorded == experts).float().mean() >= 0.99
        assert (chosen == log_p.argmax(-1)).float().mean() >= 0.95
    else:
        assert difference.max() <= 1e-4, difference
        assert torch.equal(recorded, experts)
        assert torch.equal(chosen, log_p.argmax(-1))


@pytest.mark.parametrize("name", CONFIGS)
def test_generation_equals_the_forward(name: str, rounding: bool) -> None:
    """Unequal prompts (one shorter than a group, one longer than window, top-k and pool), over group borders, ring
    wraps and pages; whole and chunked prefill.
    """
    built = tiny_model(**CONFIGS[name])
    requests = [Request(p, 24, temperature=0) for p in prompts(1, 5, 12, 61)]
    for chunk in (4096, 7):
        for sample in generate(built, requests, prefill_tokens=chunk, record_routing=True):
            assert sample.finish == "length"
            assert_as_forward(built, sample, rounding)


def test_newcomers_and_leavers_change_nothing() -> None:
    """Sequences come and go (rows and pages are reused); each is what it is alone."""
    built = tiny_model(engram=True)
    requests = [
        Request(p, 5 + 7 * (i % 3), temperature=0.9, seed=i) for i, p in enumerate(prompts(3, 70, 9, 30, 2, 41, 8))
    ]
    together = generate(built, requests, max_running=3, record_routing=True)
    generator = Generator(built, max_running=3)
    for request, sample in zip(requests, together, strict=True):
        (alone,) = generate(built, [request], record_routing=True)
        assert alone.tokens == sample.tokens and torch.equal(alone.routing, sample.routing)
        assert alone.log_probs == pytest.approx(sample.log_probs, abs=1e-5)
        generator.submit(request)
    seeds = generate(built, [replace(requests[0], seed=s, max_tokens=12) for s in range(4)])
    assert len({tuple(s.tokens) for s in seeds}) > 1
    while generator.in_flight:
        generator.step()
    assert sorted(generator.cache.free_pages) == list(range(generator.cache.pages))
    assert generator.cache.rows == [None] * 3


def test_interrupted_at_any_token(tmp_path) -> None:
    """Saved after every step, loaded into a new generator: nothing changes, and version tags stay with their tokens."""
    built = tiny_model(engram=True)
    requests = [Request(p, 9, seed=i, stop=frozenset({7})) for i, p in enumerate(prompts(4, 30, 11))]
    reference = generate(built, requests, max_running=2, record_routing=True)
    generator = Generator(built, max_running=2, record_routing=True)
    for request in requests:
        generator.submit(request)
    found: dict[int, Sample] = {}
    while generator.in_flight:
        torch.save(generator.state_dict(), tmp_path / "state.pt")
        version = generator.version
        generator = Generator(built, max_running=2, record_routing=True)
        generator.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        generator.version = version + 1
        found.update((sample.id, sample) for sample in generator.step())
    for i, sample in enumerate(reference):
        assert found[i].tokens == sample.tokens and found[i].log_probs == sample.log_probs
        assert torch.equal(found[i].routing, sample.routing) and found[i].finish == sample.finish
        assert found[i].versions == sorted(set(found[i].versions))
