"""Mixture of experts against a plain loop over tokens; biases select only; statistics for balancing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tiny import pack_of, tiny_config, tiny_model
from torch import Tensor

from model.moe import MoE, Routing, clamped_swiglu, count_load, sequence_balance

LENGTHS = [9, 1, 14]
IMAGE = torch.arange(24) % 5 == 2


@pytest.fixture
def layer() -> MoE:
    return tiny_model().layers[0].ffn


@pytest.fixture
def x() -> Tensor:
    return (2 * torch.randn(24, 32, generator=torch.Generator().manual_seed(0))).requires_grad_()


def pack(image: bool = True):
    return dataclasses.replace(pack_of(tiny_config(), LENGTHS), image=IMAGE if image else None)


def plain(layer: MoE, x: Tensor, image: Tensor) -> Tensor:
    """Report, MoE: sqrt(softplus) scores, top-k of score + bias, unbiased weights, clamped SwiGLU (limit 1 here)."""

    def expert(t: int, w1: Tensor, w2: Tensor, w3: Tensor) -> tuple[Tensor, Tensor]:
        g, u = w1 @ x[t], w3 @ x[t]
        return F.silu(g.clamp(max=1.0)) * u.clamp(-1.0, 1.0), w2

    rows = []
    for t in range(len(x)):
        scores = F.softplus(layer.gate.weight @ x[t]).sqrt()
        ranked = scores + (layer.gate.bias_vl if image[t] else layer.gate.bias)
        picked = sorted(range(4), key=lambda e: -ranked[e].item())[:2]
        total = sum(scores[e] for e in picked) + 1e-20
        hidden, w2 = expert(t, *(getattr(layer.shared_experts, w).weight for w in ("w1", "w2", "w3")))
        y = w2 @ hidden
        for e in picked:
            hidden, w2 = expert(t, *(getattr(layer.experts, w)[e] for w in ("w1", "w2", "w3")))
            y = y + w2 @ (hidden * scores[e] / total * 1.5)
        rows.append(y)
    return torch.stack(rows)


def test_against_a_plain_loop(layer, x) -> None:
    out, _ = layer(x, pack())
    reference = plain(layer, x, IMAGE)
    torch.testing.assert_close(out, reference, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    leaves = [x, *layer.parameters()]
    ours, theirs = (torch.autograd.grad(y, leaves, upstream) for y in (out, reference))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_clamp_bites_and_stops_the_gradient() -> None:
    gate = torch.tensor([0.5, 3.0, -3.0, 0.5, 0.5]).requires_grad_()
    up = torch.tensor([0.5, 0.5, 0.5, 3.0, -3.0]).requires_grad_()
    out = clamped_swiglu(gate, up, 1.0)
    low, high = F.silu(torch.tensor(0.5)), F.silu(torch.tensor(1.0))
    expected = torch.stack([low / 2, high / 2, F.silu(torch.tensor(-3.0)) / 2, low, -low])
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert (gate.grad == 0).tolist() == [False, True, False, False, False]
    assert (up.grad == 0).tolist() == [False, False, False, True, True]


def test_bias_selects_only(layer, x) -> None:
    """A large bias makes an expert everybody's choice, but its weight stays its own score's share; no gradient."""
    layer.gate.bias[2] = 100.0
    layer.gate.bias_vl[1] = 100.0
    out, routing = layer(x, pack())
    for t in range(24):
        favourite = 1 if IMAGE[t] else 2
        assert favourite in routing.indices[t]
        scores = routing.scores[t, routing.indices[t]]
        torch.testing.assert_close(routing.weights[t], scores / scores.sum() * 1.5)
    assert {name for name, _ in layer.gate.named_parameters()} == {"weight"}
    assert not layer.gate.bias.requires_grad and not layer.gate.bias_vl.requires_grad
    assert set(layer.state_dict()) >= {"gate.bias", "gate.bias_vl"}
    with_image = routing.indices[IMAGE]
    _, text_only = layer(x, pack(image=False))
    assert not torch.equal(text_only.indices[IMAGE], with_image)
    assert torch.equal(text_only.indices[~IMAGE], routing.indices[~IMAGE])


def test_unused_experts_get_zero_gradients(layer, x) -> None:
    layer.gate.bias[3] = layer.gate.bias_vl[3] = -100.0
    out, routing = layer(x, pack())
    assert not (routing.indices == 3).any()
    out.sum().backward()
    for w in ("w1", "w2", "w3"):
        gradient = getattr(layer.experts, w).grad
        assert gradient[3].abs().max() == 0
        assert all(gradient[e].abs().max() > 0 for e in (0, 1, 2))


def test_expert_load_counts_by_modality(layer, x) -> None:
    _, routing = layer(x, pack())
    load = count_load(routing.indices, IMAGE, routing.scores.shape[1])
    for modality, members in ((0, ~IMAGE), (1, IMAGE)):
        counted = [(routing.indices[members] == e).sum().item() for e in range(4)]
        assert load[modality].tolist() == counted
    assert load.sum() == 2 * 24 and load.dtype == torch.int64
    text = count_load(routing.indices, None, routing.scores.shape[1])
    assert torch.equal(text[0], load.sum(0)) and text[1].sum() == 0


def test_sequence_balance_against_a_plain_loop(layer, x) -> None:
    """V3 form per document, f_e P_e, weighted by the document's length; f passes no gradient."""
    _, routing = layer(x, pack())
    ours = sequence_balance([routing], pack())
    theirs, at = torch.zeros(()), 0
    for length in LENGTHS:
        scores, indices = routing.scores[at : at + length], routing.indices[at : at + length]
        share = (scores / scores.sum(-1, keepdim=True)).mean(0)
        frequency = torch.tensor([4 / (2 * length) * (indices == e).sum().item() for e in range(4)])
        theirs = theirs + length * (frequency * share).sum()
        at += length
    torch.testing.assert_close(ours, theirs)
    a, b = (torch.autograd.grad(y, layer.gate.weight, retain_graph=True)[0] for y in (ours, theirs))
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_sequence_balance_is_lowest_when_even() -> None:
    """1 per token when experts and scores are even, E/k per token when all tokens crowd the same k experts."""
    layout = pack_of(tiny_config(), [8])
    even = torch.stack([torch.arange(8) % 4, (torch.arange(8) + 1) % 4], dim=1)
    scores = torch.ones(8, 4)
    assert sequence_balance([Routing(even, even.float(), scores, None)], layout) == pytest.approx(8.0)
    crowded = torch.tensor([[0, 1]]).expand(8, 2)
    scores = torch.tensor([[1.0, 1.0, 0.0, 0.0]]).expand(8, 4)
    assert sequence_balance([Routing(crowded, crowded.float(), scores, None)], layout) == pytest.approx(16.0)


def test_bf16_input_keeps_fp32_scores(layer, x) -> None:
    out, routing = layer.bfloat16()(x.bfloat16(), pack())
    assert out.dtype == torch.bfloat16 and routing.scores.dtype == routing.weights.dtype == torch.float32
