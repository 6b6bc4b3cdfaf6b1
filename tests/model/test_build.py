"""The released configuration on the meta device, initialisation, dtypes."""

from __future__ import annotations

import pytest
import torch
from tiny import ENGRAM, raw_config, tiny_config, tokens

from model import ForwardOptions, ModelConfig, VisionConfig, build_model
from model.checkpoint.names import released_names


@pytest.fixture(scope="module")
def released():
    config = ModelConfig(vision=VisionConfig())
    return build_model(config, device="meta", dtype=torch.bfloat16)


def count(model, *parts: str) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if any(part in name for part in parts))


def test_released_model_builds_on_meta_with_the_reported_sizes(released) -> None:
    """V4.1 report: 552B backbone, 196.6B in the Engram tables."""
    tables = count(released, "engram.embed")
    backbone = count(released, "") - tables - count(released, "vision.", "aligner.")
    assert round(tables / 1e9, 1) == 196.6
    assert tables == (384006168 + 384016682) * 256
    assert round(backbone / 1e9) == 552
    assert all(p.is_meta for p in released.parameters())


def test_released_names_and_shapes(released) -> None:
    """Spot checks against the released checkpoint's layout."""
    shapes = {n: list(t.shape) for name, t in released.state_dict().items() for n in released_names(name, t.shape)}
    experts = {name for name in shapes if ".ffn.experts." in name}
    assert len(experts) == 40 * 384 * 3
    assert shapes["layers.0.attn.wo_a.weight"] == [8 * 1024, 64 * 512 // 8]
    assert shapes["layers.39.attn.wq_b.weight"] == [64 * 512, 1280]
    assert shapes["layers.7.hc_attn_fn"] == [24, 4 * 5120] and shapes["layers.7.hc_ffn_scale"] == [3]
    assert shapes["layers.14.engram.wkv.weight"] == [5 * 5120, 24 * 256]
    assert shapes["vision.blocks.31.attn.wqkv.weight"] == [3072, 1024]
    assert shapes["aligner.w1.weight"] == [5120, 9 * 1024] and shapes["image_start"] == [5120]
    owners = {
        part: sorted(int(n.split(".")[1]) for n in shapes if n.endswith(part))
        for part in (
            "attn.compressor.wkv.weight",
            "attn.compressor.wgate.weight",
            "indexer.wk.weight",
            "indexer.wq_b.weight",
            "engram.embed.weight",
        )
    }
    assert owners == {
        "attn.compressor.wkv.weight": [2, 8, 14, 20],
        "attn.compressor.wgate.weight": [2, 8, 14],
        "indexer.wk.weight": [2, 8, 14, 20],
        "indexer.wq_b.weight": [2, 8, 14, 20, 24, 28, 32, 36],
        "engram.embed.weight": [1, 14],
    }


def test_what_stays_fp32(released) -> None:
    wide = {name for name, t in released.state_dict().items() if t.dtype == torch.float32}
    kinds = {name.split(".", 2)[2] for name in wide}
    assert kinds == {
        *(f"hc_{where}.{what}" for where in ("attn", "ffn") for what in ("fn", "base", "scale")),
        "attn.attn_sink",
        "ffn.gate.bias",
        "ffn.gate.bias_vl",
    }


def test_initialisation_is_seeded_and_complete() -> None:
    config = tiny_config(vision=True)
    first, again, other = (build_model(config, seed=s) for s in (1, 1, 2))
    for name, tensor in first.state_dict().items():
        assert tensor.isfinite().all(), name
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert not torch.equal(first.embed.weight, other.embed.weight)
    assert first.embed.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert first.layers[2].ffn.experts.w2.std().item() == pytest.approx(0.02, rel=0.1)
    assert first.norm.weight.eq(1).all() and first.layers[0].attn.attn_sink.eq(0).all()


def test_mix_starts_as_equal_shares() -> None:
    built = build_model(tiny_config())
    streams = torch.randn(5, 4, 32)
    mix = built.layers[3].hc_ffn(streams)
    torch.testing.assert_close(mix.pre, torch.full((5, 4), 0.25), atol=0.01, rtol=0)
    torch.testing.assert_close(mix.post, torch.ones(5, 4), atol=0.01, rtol=0)
    assert (mix.comb.diagonal(dim1=1, dim2=2) > 0.9).all()


def test_first_loss_is_near_uniform_and_training_lowers_it() -> None:
    built = build_model(tiny_config(engram=True), token_map=torch.arange(61) % 50, runtime=ForwardOptions())
    ids = tokens(2, 24)
    data = {"input_ids": ids, "labels": ids}
    denominators = built.loss_denominators(**data)
    optimizer = torch.optim.Adam(built.parameters(), lr=5e-3)
    values = []
    for _ in range(12):
        optimizer.zero_grad()
        losses = built.losses(**data, denominators=denominators)
        losses.total.backward()
        optimizer.step()
        values.append((losses.lm_sum / losses.supervised).item())
    assert values[0] == pytest.approx(torch.tensor(61.0).log().item(), abs=0.1)
    assert values[-1] < 0.9 * values[0]


def test_bf16_model_runs() -> None:
    built = build_model(tiny_config(), dtype=torch.bfloat16)
    out = built(tokens(1, 20), labels=tokens(1, 20))
    assert out.logits.dtype == torch.float32 and out.loss.isfinite()
    out.loss.backward()
    assert built.head.weight.grad.dtype == torch.bfloat16 and built.layers[0].hc_attn.fn.grad.dtype == torch.float32


def test_public_output() -> None:
    built = build_model(tiny_config())
    ids = tokens(2, 9)
    plain = built(ids)
    assert plain.loss is None and plain.hidden_states is None and plain.logits.shape == (2, 9, 61)
    full = built(ids, labels=ids, output_hidden_states=True)
    assert torch.equal(full.logits, plain.logits)
    assert [tuple(s.shape) for s in full.hidden_states] == [(2, 9, 4, 32)] * 6
    shifted = torch.nn.functional.cross_entropy(full.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(full.loss, shifted)
    buffers = built.router_biases()
    assert len(buffers) == 6 and all(
        b is layer.ffn.gate.bias for (b, _), layer in zip(buffers, built.layers, strict=True)
    )


def test_kv_quantisation_is_a_switch() -> None:
    """Main-KV QAT moves the logits; the other quantisers always belong to the forward."""
    quantised = build_model(tiny_config())
    exact = build_model(tiny_config(), runtime=ForwardOptions(kv_quant=False))
    ids = tokens(1, 30)
    difference = (quantised(ids).logits - exact(ids).logits).abs().max()
    assert difference > 1e-5


def test_spare_engram_rows_are_kept() -> None:
    raw = raw_config(engram=True, engram_num_embeddings=[600, 700])
    built = build_model(ModelConfig.from_dict(raw), token_map=torch.arange(61) % 50)
    assert [built.layers[n].engram.embed.num_embeddings for n in ENGRAM["engram_layer_ids"]] == [600, 700]
