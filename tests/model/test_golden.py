"""The whole model against numbers of two other implementations (tests/golden/README.md), case by case.

Every case is run through the public API with both attention paths. Compared: logits, loss, the residual streams that
enter each block, the selected entries, the candidate pool, the compressed KV and index keys, the routers' experts and
weights, and the gradients of the released tensors. A cache value on a rounding edge takes the oracle's side
(`golden_files.run`); `test_values_on_the_other_side_of_an_edge` shows how few there are, and `test_without_help` runs
the cases without that.
"""

from __future__ import annotations

import pytest
import torch
from golden_files import Case, load_oracle, oracle_rounding, run, traced

import model.attention
from model import ForwardOptions, load_pretrained
from model.kernels.switch import installed

EXACT = [
    "text",
    "engram",
    "padded",
    "packed",
    "vision",
    "detail/a_text",
    "detail/b_engram",
    "detail/c2_images_engram_pad",
]
needs_triton = pytest.mark.skipif(not installed(), reason="the package triton is not installed")
TRUE_SIZES = ["heads512", "detail/f_prod_heads"]  # head_dim 512: many more values that may lie on an edge
PATHS = ["dense", "sparse"]

# Where a case is looser than 3e-4, and why (test_padded_differs_by_one_rounded_value).
STREAM_TOLERANCE = {"padded": 6e-4}
# f: the detail README's rule. It rounds 900,000 values, and the oracle's side is not certain for all of its window KV.
LOGIT_TOLERANCE = {"detail/f_prod_heads": 5e-3}
FLIPS = {"detail/f_prod_heads": 120}
# c2: the detail README allows 2e-3; largest at Engram gates, which have a square root at zero.
GRADIENT_TOLERANCE = {"detail/c2_images_engram_pad": 2e-3, "detail/f_prod_heads": 2e-2}


CASES = [(n, p) for n in EXACT + TRUE_SIZES for p in PATHS]
# Without a GPU the kernels run in Triton's interpreter, one program after the other.
INTERPRETED = pytest.param(("text", "kernels"), marks=[pytest.mark.slow, needs_triton])


@pytest.fixture(scope="module", params=[*CASES, INTERPRETED], ids="-".join)
def named(request) -> tuple[str, Case]:
    return request.param[0], run(*request.param)


def logit_difference(case: Case) -> torch.Tensor:
    return (case.output.logits - case.expected["logits"])[case.oracle.real].abs().detach()


def test_logits_and_loss(named) -> None:
    name, case = named
    delta = logit_difference(case)
    assert delta.max() <= LOGIT_TOLERANCE.get(name, 3e-4)
    assert (delta <= 1e-4).float().mean() >= 0.9
    assert abs(case.output.loss.item() - case.expected["loss"].item()) <= 1e-5


def test_streams(named) -> None:
    name, case = named
    streams = case.oracle.streams()
    assert len(streams) >= len(case.trace.blocks) - 1  # f leaves out the first
    for layer, theirs in streams.items():
        worst = (case.output.hidden_states[layer] - theirs)[case.oracle.real].abs().max()
        limit = LOGIT_TOLERANCE.get(name, STREAM_TOLERANCE.get(name, 3e-4))
        assert worst <= limit, f"streams entering block {layer} differ by {worst}"


def as_sets(indices: torch.Tensor, first: torch.Tensor) -> list[set]:
    return [{i - low for i in row if i >= 0} for row, low in zip(indices.tolist(), first.tolist(), strict=True)]


def test_selected_entries(named) -> None:
    """The same set for every token, as entry numbers inside the token's document."""
    _, case = named
    oracle = case.oracle
    assert tuple(oracle.layers_with("topk_indices")) == oracle.config.index_source_layer_ids
    for layer in oracle.config.index_source_layer_ids:
        ratio = oracle.config.ratio(layer)
        theirs = oracle.of(layer, "topk_indices").flatten(0, 1)[oracle.aligned]
        ours = case.trace.blocks[layer].shared.topk_indices
        ours = as_sets(ours, oracle.layout.entries[ratio].visible_from)
        assert ours == as_sets(theirs, oracle.first_entry(ratio)[1]), f"layer {layer}"


def test_candidates(named) -> None:
    """The oracle's pool; it bites in every case (some visible entry is no candidate)."""
    _, case = named
    oracle, block = case.oracle, case.oracle.config.candidate_block_size
    (layer,) = oracle.layers_with("candidates")
    assert layer == oracle.config.candidate_source_layer_id
    ratio = oracle.config.ratio(layer)
    entries, first = oracle.layout.entries[ratio], oracle.first_entry(ratio)[1]
    theirs = oracle.of(layer, "candidates").bool().flatten(0, 1)[oracle.aligned]
    ours = case.trace.blocks[layer].shared.candidates
    bites = False
    for t in range(oracle.layout.tokens):
        low, high = int(entries.visible_from[t]), int(entries.visible_to[t])
        kept = {s - low for b in ours[t].tolist() if b >= 0 for s in range(b * block, (b + 1) * block) if s < high}
        assert kept == {j for j in range(high - low) if theirs[t, int(first[t]) + j]}, f"token {t}"
        bites |= len(kept) < high - low
    assert bites


def test_values_on_the_other_side_of_an_edge(named) -> None:
    """Every cache value rounds as the oracle's, but for a handful (of 50,000 a case) that lie within fp32 noise of the
    middle between two neighbours.
    """
    name, case = named
    assert len(case.flips) <= FLIPS.get(name, 8), case.flips
    for what, layer, slot, channel, distance in case.flips:
        assert distance <= 3e-4, f"{what} of layer {layer}, slot {slot}, channel {channel}: {distance} from an edge"
    for what in ("compressed_kv", "index_keys"):
        layers = case.oracle.layers_with(what)
        assert tuple(layers) == case.oracle.config.kv_source_layer_ids
        for layer in layers:
            slots, theirs = case.oracle.entries(layer, what)
            ours = getattr(case.trace.blocks[layer].shared, what)[slots]
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_router(named) -> None:
    name, case = named
    for layer in range(len(case.trace.blocks)):
        routing = case.trace.blocks[layer].routing
        ours, order = routing.indices.sort(-1)
        theirs, their_order = case.oracle.of(layer, "router_indices")[case.oracle.aligned].long().sort(-1)
        assert torch.equal(ours, theirs), f"layer {layer}"
        weights = routing.weights.gather(1, order)
        their_weights = case.oracle.of(layer, "router_weights")[case.oracle.aligned].gather(1, their_order)
        torch.testing.assert_close(weights, their_weights, atol=LOGIT_TOLERANCE.get(name, 3e-4), rtol=0)


def test_gradients(named) -> None:
    """Relative to each tensor's largest value."""
    name, case = named
    wrong, compared = {}, 0
    for key, theirs in case.expected.items():
        if key.startswith("grad."):
            ours = case.gradients[key.removeprefix("grad.")]
            assert ours.shape == theirs.shape
            limit = GRADIENT_TOLERANCE.get(name, 1e-3) * theirs.abs().max().item()
            worst = (ours - theirs).abs().max().item()
            compared += 1
            if not worst <= limit:
                wrong[key] = worst, limit
    assert compared >= 9 and not wrong, wrong


@pytest.mark.parametrize("attention", PATHS)
@pytest.mark.parametrize("name", EXACT + TRUE_SIZES)
def test_without_help(name: str, attention: str) -> None:
    """Plain runs, nothing taken from the oracle. On the machine that the table in docs/architecture.md comes from, all
    of EXACT is within 3e-4; on another, noise may put a cache value on the other side of a rounding edge, and with it
    every token that sees it, or sees what it made an indexer select. So the rule is for the nearest quarter of the
    tokens.
    """
    oracle = load_oracle(name)
    with torch.no_grad():
        output = load_pretrained(oracle.folder, runtime=ForwardOptions(attention=attention))(**oracle.inputs)
    per_token = (output.logits - oracle.expected["logits"])[oracle.real].abs().amax(-1)
    assert per_token.quantile(0.25) <= (3e-5 if name in EXACT else 1e-4)
    assert abs(output.loss.item() - oracle.expected["loss"].item()) <= 1e-2


@pytest.mark.parametrize("attention", PATHS)
def test_padded_differs_by_one_rounded_value(attention: str, monkeypatch) -> None:
    """Why `padded` has 6e-4 for its streams: a single window-KV value sits on an FP8 rounding edge.

    Channel 9 of token 37 in layer 1 is -0.002564, about 1e-6 away from the middle between two E4M3 values and a
    difference of products of size 1, so fp32 noise decides which one it becomes. Nudged by 3e-5 to either side it
    takes both, and on one side every stream agrees within the 3e-4 that the other cases keep.
    """
    worst, rounded = [], []
    for nudge in (-3e-5, 3e-5):
        oracle = load_oracle("padded")
        loaded = load_pretrained(oracle.folder, runtime=ForwardOptions(attention=attention))
        plain, calls = model.attention.fake_quant_fp8, iter(range(99))
        with oracle_rounding(oracle, loaded), monkeypatch.context() as patch, torch.no_grad():
            helped = model.attention.fake_quant_fp8

            def nudged(x, plain=plain, helped=helped, calls=calls, nudge=nudge):
                out = helped(x)
                if next(calls) == 1:
                    x = x.clone()
                    x[37, 9] += nudge
                    out[37, 9] = plain(x)[37, 9]
                    rounded.append(out[37, 9].item())
                return out

            patch.setattr(model.attention, "fake_quant_fp8", nudged)
            output, _ = traced(loaded, oracle.inputs)
        expected = oracle.expected
        differences = [
            (s - expected[f"streams.{n}"])[oracle.real].abs().max() for n, s in enumerate(output.hidden_states)
        ]
        worst.append(max(differences))
    assert rounded[0] != rounded[1] and rounded == pytest.approx([-0.0025636] * 2, abs=2e-4)
    assert min(worst) <= 3e-4
    assert max(worst) <= STREAM_TOLERANCE["padded"]
