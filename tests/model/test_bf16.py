"""bf16 against the golden cases (tests/golden/README.md) layer by layer: residual streams kept in bf16, products in
bf16 by autocast, and both.

Every block gets the golden streams that enter it, so that no difference adds up over layers: a difference in a rounding
edge of a cache value, or in a selection, would move everything behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from golden_files import load_oracle
from tiny import tiny_model
from torch import Tensor

from model import ForwardOptions, load_pretrained
from model.attention import CrossLayerState
from model.backbone import BlockOutput, BlockState
from model.engram import engram_rows
from tests.model.test_losses import batch

CASES = ["text", "engram", "packed", "vision", pytest.param("heads512", marks=pytest.mark.slow)]
# autocast, stream_dtype -> largest median over tokens, and largest, of the relative error of a block's streams
LIMITS = {(False, "bf16"): (0.02, 0.08), (True, "fp32"): (0.035, 0.13), (True, "bf16"): (0.035, 0.13)}


@dataclass
class Layer:
    """One block run on golden streams: what it got, what fp32 gave, and the golden streams behind it."""

    block: torch.nn.Module
    inputs: tuple
    plain: BlockOutput
    wanted: Tensor


@pytest.fixture(scope="module", params=CASES)
def layers(request) -> list[Layer]:
    oracle = load_oracle(request.param)
    model, found = load_pretrained(oracle.folder), []
    streams, layout, config = oracle.streams(), oracle.layout, oracle.config
    tokens = layout.flatten(oracle.inputs["input_ids"])
    pre_mix, shared = torch.eye(config.hc_mult)[:1].repeat(layout.tokens, 1), CrossLayerState()
    with torch.no_grad():
        for number, block in enumerate(model.layers):
            if number not in streams:  # the input of block 0 is the embedding itself
                entering = model.embed(tokens)[:, None].repeat(1, config.hc_mult, 1)
            else:
                entering = layout.flatten(streams[number])
            lookup = None
            if block.engram is not None:
                lookup = block.engram.embed.look_up(engram_rows(config, number, model.token_map, tokens, layout))
            inputs = BlockState(entering, pre_mix, shared), lookup, layout, model.runtime
            plain = block(*inputs)
            if number + 1 in streams:
                found.append(Layer(block, inputs, plain, layout.flatten(streams[number + 1])))
            pre_mix, shared = plain.state.pre_mix, plain.shared
    assert len(found) >= 2
    return found


def in_bf16(shared: CrossLayerState) -> CrossLayerState:
    kv, keys = (x if x is None else x.bfloat16() for x in (shared.compressed_kv, shared.index_keys))
    return replace(shared, compressed_kv=kv, index_keys=keys)


def run(layer: Layer, how: tuple[bool, str], same_choices: bool) -> BlockOutput:
    """The block with bf16 as `how` says; `same_choices`: with the selection and the experts of the fp32 run."""
    (state, lookup, layout, runtime), (autocast, stream_dtype) = layer.inputs, how
    first = layer.plain.first_pass if same_choices else None
    if autocast:
        state = state._replace(shared=in_bf16(state.shared))
        first = first and first._replace(shared=in_bf16(first.shared))
    if stream_dtype == "bf16":
        state = state._replace(streams=state.streams.bfloat16())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        runtime = replace(runtime, stream_dtype=stream_dtype)
        out = layer.block(state, lookup, layout, runtime, None, None, False, first)
    assert out.state.streams.dtype == (torch.bfloat16 if stream_dtype == "bf16" else torch.float32)
    return out


@pytest.mark.parametrize("how", LIMITS, ids=["streams", "products", "both"])
def test_streams_behind_every_block(layers: list[Layer], how: tuple[bool, str]) -> None:
    """With the same selections and experts as in fp32. Most of the error comes from cache values that round to the
    other side of an FP8 edge, 6 % apart.
    """
    median, largest = LIMITS[how]
    for layer in layers:
        streams = run(layer, how, same_choices=True).state.streams.float()
        error = (streams - layer.wanted).flatten(1).norm(dim=1) / layer.wanted.flatten(1).norm(dim=1)
        assert 1e-4 < error.median() <= median
        assert error.max() <= largest


@pytest.mark.parametrize("how", LIMITS, ids=["streams", "products", "both"])
def test_choices_in_every_block(layers: list[Layer], how: tuple[bool, str]) -> None:
    """Left to itself bf16 selects at least 93 % of the entries that fp32 selects, and for 90 % of the tokens the same
    experts.
    """
    searches = 0
    for layer in layers:
        out, plain = run(layer, how, same_choices=False), layer.plain
        same = (out.routing.indices.sort(-1).values == plain.routing.indices.sort(-1).values).all(-1)
        assert same.float().mean() >= 0.9
        if plain.indexer_loss_inputs is not None:
            ours, theirs = out.shared.topk_indices, plain.shared.topk_indices
            hit = ((ours[:, :, None] == theirs[:, None, :]) & (theirs[:, None, :] >= 0)).any(1)
            assert hit.sum() >= 0.93 * (theirs >= 0).sum()
            searches += 1
    assert searches


@pytest.mark.parametrize("autocast", [False, True])
def test_losses_and_gradients_with_streams_in_bf16(autocast: bool) -> None:
    """Near those with fp32 streams, and the same bit for bit whether blocks are recomputed or not."""
    found, data = {}, batch()
    for runtime in (
        ForwardOptions(),
        ForwardOptions(stream_dtype="bf16"),
        ForwardOptions(stream_dtype="bf16", recompute=True),
    ):
        built = tiny_model(runtime, engram=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = built.losses(**data, denominators=built.loss_denominators(**data))
        losses.total.backward()
        gradient = torch.cat([p.grad.flatten() for p in built.parameters()])
        assert gradient.dtype == torch.float32
        found[runtime] = losses.total.item(), gradient
    (loss, gradient), ours, again = found.values()
    assert loss != ours[0] == pytest.approx(loss, rel=0.02)
    assert torch.nn.functional.cosine_similarity(gradient, ours[1], dim=0) > 0.9
    assert ours[0] == again[0] and torch.equal(ours[1], again[1])
