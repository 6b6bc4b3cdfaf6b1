"""Generation with the packed cache against the plain forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from golden_files import traced
from tiny import image_batch, no_rounding, tiny_model, tokens  # noqa: F401

from model import DeepseekV41, ForwardOptions, Generator, Request, Sample
from model.generation import draw, generate, uniform

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


@pytest.fixture(params=["unrounded", pytest.param("rounded", marks=pytest.mark.slow)])
def rounding(request) -> bool:
    """Whether the attention state is quantised. Without, fp32 noise stays noise and everything must agree tightly;
    with, a value within noise of a rounding edge may fall on the other side, for a few tokens.
    """
    if request.param == "unrounded":
        request.getfixturevalue("no_rounding")
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


@pytest.mark.parametrize("chunk", [4096, 7])
@pytest.mark.parametrize("name", CONFIGS)
def test_generation_equals_the_forward(name: str, chunk: int, rounding: bool) -> None:
    """Unequal prompts (one shorter than a group, one longer than window, top-k and pool), over group borders, ring
    wraps and pages; whole and chunked prefill.
    """
    built = tiny_model(ForwardOptions(kv_quant=name != "plain"), **CONFIGS[name])
    requests = [Request(p, 8, temperature=0) for p in prompts(1, 5, 12, 61)]
    for sample in generate(built, requests, prefill_tokens=chunk, record_routing=True):
        assert sample.finish == "length"
        assert_as_forward(built, sample, rounding)


def test_images_in_prompts(rounding: bool) -> None:
    """A prompt with images, prefilled in chunks beside one without, continues as the forward does."""
    built = tiny_model(vision=True, engram=True)
    batch = image_batch()
    inputs = {name: batch[name] for name in ("pixel_values", "image_grid_hws", "vision_token_types")}
    ids = batch["input_ids"][0]
    types = inputs.pop("vision_token_types")[0]
    request = Request(tuple(ids.tolist()), 6, 0.0, images={**inputs, "vision_token_types": types})
    text = Request(prompts(9)[0], 6, 0.0)
    for chunk in (4096, 11):
        with_image, without = generate(built, [request, text], prefill_tokens=chunk, record_routing=True)
        assert_as_forward(built, without, rounding)
        whole = torch.tensor([[*request.prompt, *with_image.tokens[:-1]]])
        longer = torch.nn.functional.pad(types, (0, 5), value=-1)[None]
        with torch.no_grad():
            logits = built(whole, **inputs, vision_token_types=longer).logits[0, len(ids) - 1 :]
        theirs = logits.log_softmax(-1).gather(1, torch.tensor(with_image.tokens)[:, None]).squeeze(1)
        assert_near(torch.tensor(with_image.log_probs), theirs, rounding)


def test_newcomers_and_leavers_change_nothing() -> None:
    """Sequences come and go (rows and pages are reused); each is what it is alone."""
    built = tiny_model(engram=True)
    requests = [Request(p, 3 + 4 * (i % 3), temperature=0.9, seed=i) for i, p in enumerate(prompts(3, 70, 9, 41, 2))]
    together = generate(built, requests, max_running=3, record_routing=True)
    generator = Generator(built, max_running=3)
    for request, sample in zip(requests, together, strict=True):
        (alone,) = generate(built, [request], record_routing=True)
        assert alone.tokens == sample.tokens and torch.equal(alone.routing, sample.routing)
        assert alone.log_probs == pytest.approx(sample.log_probs, abs=1e-5)
        generator.submit(request)
    seeds = generate(built, [replace(requests[0], seed=s) for s in range(4)])
    assert len({tuple(s.tokens) for s in seeds}) > 1
    while generator.in_flight:
        generator.step()
    assert sorted(generator.cache.free_pages) == list(range(generator.cache.pages))
    assert generator.cache.rows == [None] * 3


def test_interrupted_at_any_token(tmp_path) -> None:
    """Saved after every step, loaded into a new generator: nothing changes, and version tags stay with their tokens."""
    built = tiny_model(engram=True)
    requests = [Request(p, 6, seed=i, stop=frozenset({7})) for i, p in enumerate(prompts(4, 30, 11))]
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


def simulated(built: DeepseekV41, sample: Sample) -> torch.Tensor:
    """Log-probabilities of the sample's tokens in a training forward that simulates its replays."""
    request, prompt = sample.request, len(sample.request.prompt)
    ids = torch.tensor([[*request.prompt, *sample.tokens]])
    labels = ids.clone()
    labels[0, :prompt] = -100
    start = torch.tensor([[sample.replay_start]])
    with torch.no_grad():
        logits = built(ids, labels=labels, replay_start=start).logits[0, prompt - 1 : -1]
    log_p = (logits / (request.temperature or 1)).log_softmax(-1)
    return log_p.gather(1, torch.tensor(sample.tokens)[:, None]).squeeze(1)


def assert_near(log_probs: torch.Tensor, theirs: torch.Tensor, rounding: bool) -> None:
    difference = (log_probs - theirs).abs()
    if rounding:
        assert (difference <= 1e-4).float().mean() >= 0.8 and difference.max() <= 0.1, difference
    else:
        assert difference.max() <= 1e-4, difference


@pytest.mark.parametrize("prefill_tokens", [4096, 11])
def test_decoder_replay_equals_its_simulation(prefill_tokens: int, rounding: bool) -> None:
    """The decoder passes over the last W tokens of a prompt; a training forward that hides the rest gives the same."""
    built = tiny_model(ForwardOptions(decoder_replay=True), engram=True)
    requests = [Request(p, 12, seed=i) for i, p in enumerate(prompts(3, 6, 7, 40, 71))]
    samples = generate(built, requests, prefill_tokens=prefill_tokens, record_routing=True)
    text = built.config.text
    for sample in samples:
        assert_near(torch.tensor(sample.log_probs), simulated(built, sample), rounding)
        left_out = max(0, len(sample.request.prompt) - text.sliding_window)
        assert (sample.routing[:left_out, text.decoder_start :] == -1).all()
        assert (sample.routing[left_out:] >= 0).all() and (sample.routing[:, : text.decoder_start] >= 0).all()
    exact = tiny_model(engram=True)
    differs = [(torch.tensor(s.log_probs) - simulated(exact, s)).abs().max() > 1e-3 for s in samples]
    assert differs == [False, False, True, True, True]  # prompts longer than the window


def test_the_decoder_skips_the_prompt(monkeypatch) -> None:
    built = tiny_model(ForwardOptions(decoder_replay=True))
    passed = {layer: 0 for layer in range(6)}
    for layer, block in enumerate(built.layers):
        block.register_forward_pre_hook(
            lambda _, arguments, layer=layer: passed.update({layer: passed[layer] + len(arguments[0].streams)})
        )
    generate(built, [Request(p, 1) for p in prompts(50, 70)])
    assert passed == {0: 120, 1: 120, 2: 120, 3: 12, 4: 12, 5: 12}


@pytest.mark.parametrize(
    ("window", "decoder_replay"),
    [(7, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((6, False), (7, False), (80, True)))],
)
def test_prefix_reuse_equals_its_simulation(window: int, decoder_replay: bool, rounding: bool) -> None:
    """A prompt that begins like an earlier one passes its last W known tokens again, truncated windows and all; the
    same in a training forward with `replay_start`.
    """
    built = tiny_model(ForwardOptions(decoder_replay=decoder_replay), engram=True, sliding_window=window)
    (long,) = prompts(200)
    generator = Generator(built, prefix_tokens=1024, record_routing=True)
    found: dict[int, Sample] = {}

    def run(*requests: Request) -> list[Sample]:
        ids = [generator.submit(request) for request in requests]
        while generator.in_flight:
            found.update((sample.id, sample) for sample in generator.step())
        return [found[i] for i in ids]

    first, again = run(Request(long, 4), Request(long[:150], 8, seed=1))  # the second waits for nobody: no hit
    assert first.replay_start == again.replay_start == 0
    (plain,) = generate(built, [Request(long[:150], 8, seed=1)])
    assert again.tokens == plain.tokens
    other = (*long[:130], *prompts(40)[0])
    samples = run(Request(long[:150], 8, seed=2), Request(other, 8, seed=3), Request(long[:128], 8, seed=4))
    group = 2
    expected = [max(0, hit - window) // group * group for hit in (128, 128, 64)]
    assert [s.replay_start for s in samples] == expected
    for sample in samples:
        assert_near(torch.tensor(sample.log_probs), simulated(built, sample), rounding)
        assert (sample.routing[: sample.replay_start] == -1).all()
        assert len(sample.routing) == len(sample.request.prompt) + 7
        assert (sample.routing[sample.replay_start :, : built.config.text.decoder_start] >= 0).all()
    exact = tiny_model(engram=True, sliding_window=window)
    for sample in samples[:2]:
        unaware = simulated(exact, replace(sample, replay_start=0))
        assert (torch.tensor(sample.log_probs) - unaware).abs().max() > 1e-3
    generator.version += 1
    assert generator.cache.prefixes == {}
    assert sorted(generator.cache.free_pages) == list(range(generator.cache.pages))


@pytest.mark.parametrize(("length", "decoder_replay"), [(151, False), (128, True)])
def test_requests_with_one_prompt_share_its_prefill(
    length: int, decoder_replay: bool, rounding: bool, monkeypatch
) -> None:
    """They write what each would write alone, and leave no page behind."""
    built = tiny_model(ForwardOptions(decoder_replay=decoder_replay), engram=True)
    long, other = prompts(length, 40)  # 128 fill their pages
    requests = [Request(long, 3 + 5 * seed, seed=seed) for seed in range(3)]
    requests.insert(1, Request(other, 9, seed=5))
    expected = [generate(built, [request], record_routing=True)[0] for request in requests]
    passed, inner = [], Generator._pass

    def watched(self, batch, parts):
        passed.append(sum(map(len, parts)))
        return inner(self, batch, parts)

    monkeypatch.setattr(Generator, "_pass", watched)
    generator = Generator(built, record_routing=True, prefill_tokens=64)
    found = generate_with(generator, *requests)
    assert sum(passed[:3]) == length + 40 and max(passed[3:]) <= 4, "each prompt once, then a token of each request"
    for sample, alone in zip((found[n] for n in range(4)), expected, strict=True):
        assert sample.routing.shape == alone.routing.shape and (sample.routing[:, 0] >= 0).all()
        if not rounding:
            assert sample.tokens == alone.tokens and torch.equal(sample.routing, alone.routing)
            assert sample.log_probs == pytest.approx(alone.log_probs, abs=1e-4)
        simulation = simulated(built, sample)
        assert_near(torch.tensor(sample.log_probs), simulation, rounding)
    assert sorted(generator.cache.free_pages) == list(range(generator.cache.pages))


def test_prefixes_are_bounded_and_shared() -> None:
    """Sequences with one beginning own its pages together; the oldest ends go first when there is no room."""
    built = tiny_model()
    size = Generator(built).cache.page_tokens
    (long,) = prompts(5 * size)
    generator = Generator(built, prefix_tokens=3 * size)
    cache = generator.cache
    generate_with(generator, Request(long, 1))
    assert len(cache.prefixes) == 3
    generate_with(generator, Request(prompts(2 * size + 1)[0], 1))
    assert len(cache.prefixes) == 3
    assert cache.reuse_prefix(cache.open(), (*long[:size], 5)) == size - 6  # the first page is dropped last
    assert max(cache.uses) == 1  # a replay that begins in the first page shares nothing
    row = cache.open()
    assert cache.reuse_prefix(row, (*prompts(2 * size + 1)[0], 5)) == 2 * size - 6
    assert cache.uses[cache.rows[row].pages[0]] == 2


def generate_with(generator: Generator, *requests: Request) -> dict[int, Sample]:
    """The samples by id."""
    found: dict[int, Sample] = {}
    for request in requests:
        generator.submit(request)
    while generator.in_flight:
        found.update((sample.id, sample) for sample in generator.step())
    return found


def test_draw_follows_the_distribution() -> None:
    """Frequencies, temperature, top-p and the log-probabilities of what was drawn."""
    logits = torch.log(torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])).expand(20000, -1)
    u = torch.tensor([uniform(seed, 7) for seed in range(20000)], dtype=torch.float64)

    def drawn(temperature: float, top_p: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ones = torch.ones(20000)
        tokens, log_probs = draw(logits, ones * temperature, ones * top_p, u)
        return tokens, log_probs, tokens.bincount(minlength=5) / 20000

    for temperature, top_p, expected in (
        (1.0, 1.0, [0.1, 0.4, 0.05, 0.3, 0.15]),
        (0.5, 1.0, [0.01, 0.16, 0.0025, 0.09, 0.0225]),
        (1.0, 0.7, [0, 0.4, 0, 0.3, 0]),
        (1.0, 0.71, [0, 0.4, 0, 0.3, 0.15]),
        (2.0, 1e-6, [0, 1, 0, 0, 0]),
    ):
        tokens, log_probs, share = drawn(temperature, top_p)
        p = torch.tensor(expected, dtype=torch.float64)
        p = p / p.sum()
        torch.testing.assert_close(share.double(), p, atol=0.015, rtol=0)
        torch.testing.assert_close(log_probs, p.log()[tokens], atol=1e-6, rtol=0)
    tokens, log_probs, _ = drawn(0.0, 0.5)
    assert (tokens == 1).all()
    torch.testing.assert_close(log_probs.exp(), torch.full_like(log_probs, 0.4), atol=1e-6, rtol=0)


def test_draw_takes_no_token_of_zero_probability() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]]).expand(3, -1)
    u = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    tokens, log_probs = draw(logits, torch.ones(3), torch.ones(3), u)
    assert tokens.tolist() == [1, 3, 3]
    assert log_probs.exp().tolist() == pytest.approx([0.5] * 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_is_drawn_from_what_is_no_distribution(temperature: float) -> None:
    logits = torch.tensor([[1.0, 2.0], [float("nan"), 0.0], [float("inf"), 0.0]])
    with pytest.raises(FloatingPointError, match="the logits of 2 of 3 sequences"):
        draw(logits, torch.full((3,), temperature), torch.ones(3), torch.zeros(3))


def test_uniform_numbers_of_seeds_and_positions() -> None:
    """In [0, 1), all different, and neighbours do not go together."""
    numbers = [[uniform(seed, position) for position in range(60)] for seed in range(60)]
    grid = torch.tensor(numbers, dtype=torch.float64)
    assert grid.min() >= 0 and grid.max() < 1 and len(grid.unique()) == grid.numel()
    assert abs(grid.mean() - 0.5) < 0.02 and abs(grid.var() - 1 / 12) < 0.01
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[1:, :-1], grid[:-1, 1:])):
        assert torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].abs() < 0.06


def test_stops() -> None:
    built = tiny_model()
    (free,) = generate(built, [Request((5, 6, 7), 12, seed=3)])
    stop = free.tokens[4]
    (stopped,) = generate(built, [Request((5, 6, 7), 12, seed=3, stop=frozenset({stop}))])
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert (stopped.finish, free.finish) == ("stop", "length")
    assert len(stopped.tokens) == len(stopped.log_probs) == len(stopped.versions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ()}, "prompt: is empty"),
        ({"prompt": (61,)}, r"prompt: contains 61; allowed are 0..60"),
        ({"stop": frozenset({-1})}, "stop: contains -1"),
        ({"max_tokens": 0}, "max_tokens: is 0"),
        ({"temperature": -1.0}, "temperature: is -1.0"),
        ({"top_p": 0.0}, "top_p: is 0.0"),
        ({"images": {}}, "images: has"),
        ({"images": {}}, "no vision_config"),
    ],
)
def test_requests_that_cannot_be_run(changes: dict, message: str) -> None:
    generator = Generator(tiny_model())
    with pytest.raises(ValueError, match=message):
        generator.submit(replace(Request((5,), 3), **changes))
    assert generator.in_flight == 0
