"""The whole model against numbers of two other implementations (tests/golden/README.md), case by case.

Every case is run through the public API with both attention paths. Compared: logits, loss, the residual streams that
enter each block, the selected entries, the candidate pool, the compressed KV and index keys, the routers' experts and
weights, and the gradients of the released tensors.
"""

from __future__ import annotations

import pytest
import torch
from golden_files import Case, golden, run, traced
from safetensors.torch import load_file

import model.attention
import model.indexer
from model import Runtime, load_pretrained

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
TRUE_SIZES = ["heads512", "detail/f_prod_heads"]  # head_dim 512: rounding noise flips single FP4 values
PATHS = ["dense", "sparse"]

# Where a case is looser than 3e-4, and why (see test_padded_differs_by_one_rounded_value).
STREAM_TOLERANCE = {"padded": 6e-4}
# Engram gates have a square root at zero: the detail README allows rtol 2e-3 there.
GRADIENT_TOLERANCE = {"detail/c2_images_engram_pad": 2e-3}


@pytest.fixture(scope="module", params=[(n, p) for n in EXACT for p in PATHS], ids=lambda p: "-".join(p))
def exact(request) -> tuple[str, Case]:
    return request.param[0], run(*request.param)


@pytest.fixture(scope="module", params=[(n, p) for n in TRUE_SIZES for p in PATHS], ids=lambda p: "-".join(p))
def true_size(request) -> tuple[str, Case]:
    return request.param[0], run(*request.param)


def difference(case: Case) -> torch.Tensor:
    return (case.output.logits - case.expected["logits"])[case.real].abs()


def test_logits_and_loss(exact) -> None:
    _, case = exact
    assert difference(case).max() <= 3e-4
    assert abs(case.output.loss.item() - case.expected["loss"].item()) <= 1e-5


def test_streams(exact) -> None:
    name, case = exact
    streams = case.streams()
    assert len(streams) == len(case.trace.blocks)
    for layer, theirs in streams.items():
        worst = (case.output.hidden_states[layer] - theirs)[case.real].abs().max()
        assert worst <= STREAM_TOLERANCE.get(name, 3e-4), f"streams entering block {layer} differ by {worst}"


def selections(case: Case, layer: int) -> tuple[list[set], list[set]]:
    """Our and the oracle's selected entries of every real token, as numbers inside the token's document."""
    ratio, pack = ratio_of(case, layer), case.pack
    entries = pack.entries[ratio]
    _, first = case.oracle_entry(ratio)
    theirs = case.of(layer, "topk_indices").flatten(0, 1)[case.aligned]
    ours = case.trace.blocks[layer].shared.topk_indices
    return as_sets(ours, entries.visible_from), as_sets(theirs, first)


def as_sets(indices: torch.Tensor, first: torch.Tensor) -> list[set]:
    return [{i - low for i in row if i >= 0} for row, low in zip(indices.tolist(), first.tolist(), strict=True)]


def ratio_of(case: Case, layer: int) -> int:
    """Compression ratio, told by the number of entries: the latest kv source has width // ratio of them."""
    source = max(n for n in case.layers_with("compressed_kv") if n <= layer)
    return case.width // case.of(source, "compressed_kv").shape[1]


def test_selected_entries(exact) -> None:
    _, case = exact
    assert case.layers_with("topk_indices")
    for layer in case.layers_with("topk_indices"):
        ours, theirs = selections(case, layer)
        assert ours == theirs, f"layer {layer}"


def test_candidates(exact) -> None:
    """The pool bites in every case (some visible entry is no candidate), and it is the oracle's."""
    _, case = exact
    (layer,) = case.layers_with("candidates")
    assert_same_candidates(case, layer)


def assert_same_candidates(case: Case, layer: int) -> None:
    ratio, pack = ratio_of(case, layer), case.pack
    entries = pack.entries[ratio]
    _, first = case.oracle_entry(ratio)
    theirs = case.of(layer, "candidates").bool().flatten(0, 1)[case.aligned]
    ours = case.trace.blocks[layer].shared.candidates
    block = case.config.candidate_block_size
    bites = False
    for t in range(pack.tokens):
        low, high = int(entries.visible_from[t]), int(entries.visible_to[t])
        mine = {s - low for b in ours[t].tolist() if b >= 0 for s in range(b * block, (b + 1) * block) if s < high}
        visible = range(high - low)
        assert mine == {j for j in visible if theirs[t, int(first[t]) + j]}, f"token {t}"
        bites |= len(mine) < len(visible)
    assert bites


def entries_side_by_side(case: Case, layer: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Our and the oracle's entries, in document order."""
    ratio, pack = ratio_of(case, layer), case.pack
    slots = pack.entries[ratio].visible_from
    row, first = case.oracle_entry(ratio)
    closing = ((pack.position + 1) % ratio == 0).nonzero().flatten()  # the token that completes an entry
    number = pack.position[closing] // ratio
    ours = getattr(case.trace.blocks[layer].shared, name)[slots[closing] + number]
    return ours, case.of(layer, name)[row[closing], first[closing] + number].float()


def test_compressed_kv_and_index_keys(exact) -> None:
    """Both are rounded to FP4: equal up to fp32 noise in a group's scale, or not at all."""
    _, case = exact
    for name in ("compressed_kv", "index_keys"):
        assert case.layers_with(name)
        for layer in case.layers_with(name):
            torch.testing.assert_close(*entries_side_by_side(case, layer, name), atol=1e-6, rtol=1e-6)


def test_router(exact) -> None:
    _, case = exact
    assert_same_routing(case, 3e-4)


def assert_same_routing(case: Case, tolerance: float) -> None:
    for layer in range(len(case.trace.blocks)):
        routing = case.trace.blocks[layer].routing
        ours, order = routing.indices.sort(-1)
        theirs, their_order = case.of(layer, "router_indices")[case.aligned].long().sort(-1)
        assert torch.equal(ours, theirs), f"layer {layer}"
        weights = routing.weights.gather(1, order)
        their_weights = case.of(layer, "router_weights")[case.aligned].gather(1, their_order)
        torch.testing.assert_close(weights, their_weights, atol=tolerance, rtol=0)


def gradient_errors(case: Case) -> dict[str, float]:
    """Largest difference of each golden gradient, relative to the tensor's largest value."""
    errors = {}
    for key, theirs in case.expected.items():
        if key.startswith("grad."):
            ours = case.gradients[key.removeprefix("grad.")]
            assert ours.shape == theirs.shape
            scale = theirs.abs().max().item()
            worst = (ours - theirs).abs().max().item()
            errors[key] = worst / scale if scale else worst
    assert errors
    return errors


def test_gradients(exact) -> None:
    name, case = exact
    limit = GRADIENT_TOLERANCE.get(name, 1e-3)
    wrong = {key: error for key, error in gradient_errors(case).items() if not error <= limit}
    assert not wrong


@pytest.mark.parametrize("attention", PATHS)
def test_padded_differs_by_one_rounded_value(attention: str, monkeypatch) -> None:
    """Why `padded` has 6e-4 for its streams: a single window-KV value sits on an FP8 rounding edge.

    Channel 9 of token 37 in layer 1 is -0.002564, about 1e-6 away from the middle between two E4M3 values and a
    difference of products of size 1, so fp32 noise decides which one it becomes. Nudged by 2e-6 to either side it
    takes both, and on one side every stream agrees within the 3e-4 that the other cases keep.
    """
    worst, rounded = [], []
    for nudge in (-2e-6, 2e-6):
        plain = model.attention.fake_quant_fp8
        calls = iter(range(99))

        def nudged(x, plain=plain, calls=calls, nudge=nudge):
            if next(calls) != 1:
                return plain(x)
            x = x.clone()
            x[37, 9] += nudge
            out = plain(x)
            rounded.append(out[37, 9].item())
            return out

        folder = golden("padded")
        inputs, expected = load_file(folder / "inputs.safetensors"), load_file(folder / "expected.safetensors")
        loaded = load_pretrained(folder, runtime=Runtime(attention=attention))
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(model.attention, "fake_quant_fp8", nudged)
            output, _ = traced(loaded, inputs)
        real = inputs["attention_mask"].bool()
        differences = [(s - expected[f"streams.{n}"])[real].abs().max() for n, s in enumerate(output.hidden_states)]
        worst.append(max(differences))
    assert rounded[0] != rounded[1] and rounded == pytest.approx([-0.0025636] * 2, abs=2e-4)
    assert min(worst) <= 3e-4
    assert max(worst) <= STREAM_TOLERANCE["padded"]


def test_true_sizes_logits(true_size) -> None:
    """The golden READMEs' rules. `f_prod_heads` rounds 270,000 cache values; one that falls on the other side moves
    some logits by up to 0.016 here (test_f_prod_heads_with_the_oracles_rounding), so its maximum is only bounded.
    """
    name, case = true_size
    delta = difference(case)
    per_token = delta.amax(-1)
    assert per_token.median() <= 1e-4
    assert (per_token <= 1e-2).float().mean() >= 0.9
    assert torch.equal(case.output.logits.argmax(-1), case.expected["logits"].argmax(-1))
    if name == "detail/f_prod_heads":
        assert (delta <= 1e-4).float().mean() >= 0.9
        assert delta.max() <= 0.05
    assert abs(case.output.loss.item() - case.expected["loss"].item()) <= 1e-4
    for layer, theirs in case.streams().items():
        assert (case.output.hidden_states[layer] - theirs).abs().median() <= 1e-5


def test_true_sizes_internals(true_size) -> None:
    _, case = true_size
    for layer in case.layers_with("topk_indices"):
        ours, theirs = selections(case, layer)
        equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
        assert equal >= 0.95 * len(ours), f"layer {layer}"
    for name in ("compressed_kv", "index_keys"):
        for layer in case.layers_with(name):
            ours, theirs = entries_side_by_side(case, layer, name)
            assert ((ours - theirs).abs() > 1e-6).float().mean() <= 1e-4, f"{name} of layer {layer}"
    assert_same_routing(case, 5e-3)


def test_true_sizes_gradients(true_size) -> None:
    name, case = true_size
    limit = 2e-2 if name == "detail/f_prod_heads" else 1e-3
    wrong = {key: error for key, error in gradient_errors(case).items() if not error <= limit}
    assert not wrong


@pytest.mark.parametrize("attention", PATHS)
def test_f_prod_heads_with_the_oracles_rounding(attention: str, monkeypatch) -> None:
    """With the oracle's choice at the few values on a rounding edge, `f_prod_heads` keeps its README's tight rules."""
    folder = golden("detail/f_prod_heads")
    inputs, expected = load_file(folder / "inputs.safetensors"), load_file(folder / "expected.safetensors")
    flips = []

    def with_oracle(plain, keys):
        answers = iter([expected[k][0].float() for k in keys])

        def rounded(x):
            out = plain(x)
            if x.dim() != 2:  # index queries, which the oracle does not list
                return out
            answer = next(answers)
            used = out[: len(answer)]  # behind them: the unused slots of the last block
            other = (used - answer).abs() > 1e-6
            flips.append(int(other.sum()))
            return torch.cat([torch.where(other, answer, used), out[len(answer) :]])

        return rounded

    for module, name, what in (
        (model.attention, "fake_quant_fp4", "compressed_kv"),
        (model.indexer, "fake_quant_mxfp4", "index_keys"),
    ):
        keys = [f"layers.{layer}.{what}" for layer in (1, 2)]
        monkeypatch.setattr(module, name, with_oracle(getattr(module, name), keys))
    with torch.no_grad():
        output, trace = traced(load_pretrained(folder, runtime=Runtime(attention=attention)), inputs)
    assert len(flips) == 4 and sum(flips) <= 6
    delta = (output.logits - expected["logits"]).abs()
    assert delta.max() <= 5e-3
    assert (delta <= 1e-4).float().mean() >= 0.9
    for layer in (1, 2, 3):
        ours = trace.blocks[layer].shared.topk_indices.sort(-1).values
        theirs = expected[f"layers.{layer}.topk_indices"][0].sort(-1).values
        assert torch.equal(ours, theirs)
