"""Hyper-connections: Sinkhorn and coefficients against plain autograd code, collapse and expand against einsum."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_config, tiny_model, tokens
from torch import Tensor

import model.backbone
from model.hyper import HyperConnection, collapse, expand, sinkhorn

EPS = 1e-6


def plain_sinkhorn(logits: Tensor, iters: int) -> Tensor:
    """[T, n, n], first index = source stream. Softmax over the last axis + eps; a column normalisation (over axis -2);
    then iters-1 times rows, columns; denominators + eps.
    """
    m = logits.softmax(-1) + EPS
    m = m / (m.sum(-2, keepdim=True) + EPS)
    for _ in range(iters - 1):
        m = m / (m.sum(-1, keepdim=True) + EPS)
        m = m / (m.sum(-2, keepdim=True) + EPS)
    return m


@pytest.mark.parametrize("iters", [1, 2, 20])
def test_sinkhorn_against_autograd(iters: int) -> None:
    logits = (3 * torch.randn(7, 4, 4, generator=torch.Generator().manual_seed(0))).requires_grad_()
    ours = sinkhorn(logits.permute(1, 2, 0), iters, EPS).permute(2, 0, 1)
    theirs = plain_sinkhorn(logits, iters)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    upstream = torch.randn(7, 4, 4, generator=torch.Generator().manual_seed(1))
    a, b = (torch.autograd.grad(m, logits, upstream)[0] for m in (ours, theirs))
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_sinkhorn_is_doubly_stochastic() -> None:
    logits = torch.randn(4, 4, 9, generator=torch.Generator().manual_seed(0))
    m = sinkhorn(logits, 20, EPS)
    for axis in (0, 1):
        torch.testing.assert_close(m.sum(axis), torch.ones(4, 9), atol=1e-3, rtol=0)


def plain_mix(hc: HyperConnection, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Report, mHC: one projection of the flattened streams, normalised by their root mean square."""
    flat = streams.flatten(1)
    mixes = (flat @ hc.fn.t()) / (flat.square().mean(-1, keepdim=True) + 1e-20).sqrt()
    scale = torch.cat([hc.scale[0].expand(4), hc.scale[1].expand(4), hc.scale[2].expand(16)])
    logits = mixes * scale + hc.base
    pre = torch.sigmoid(logits[:, :4]) + EPS
    post = 2 * torch.sigmoid(logits[:, 4:8])
    return pre, post, plain_sinkhorn(logits[:, 8:].reshape(-1, 4, 4), 20)


def test_coefficients_against_autograd() -> None:
    hc = tiny_model().layers[0].hc_attn
    streams = torch.randn(6, 4, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    upstream = [torch.randn(s, generator=torch.Generator().manual_seed(1)) for s in ((6, 4), (6, 4), (6, 4, 4))]
    leaves = [streams, hc.fn, hc.base, hc.scale]
    ours, theirs = tuple(hc(streams)), plain_mix(hc, streams)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    ours, theirs = (torch.autograd.grad(mix, leaves, upstream) for mix in (ours, theirs))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_collapse_and_expand_against_einsum() -> None:
    g = torch.Generator().manual_seed(0)
    streams, y = torch.randn(5, 4, 6, generator=g), torch.randn(5, 6, generator=g)
    pre, post, comb = (torch.randn(s, generator=g) for s in ((5, 4), (5, 4), (5, 4, 4)))
    leaves = [t.requires_grad_() for t in (streams, pre, y, post, comb)]
    ours = collapse(streams, pre), expand(streams, y, post, comb)
    theirs = (
        torch.einsum("tnd,tn->td", streams, pre),
        post[:, :, None] * y[:, None, :] + torch.einsum("tid,tij->tjd", streams, comb),
    )
    upstream = [torch.randn(out.shape, generator=g) for out in ours]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    ours, theirs = (torch.autograd.grad(out, leaves, upstream) for out in (ours, theirs))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_coefficients_stay_fp32(autocast: bool) -> None:
    hc = HyperConnection(tiny_config().text)
    for parameter in hc.parameters():
        torch.nn.init.normal_(parameter)
    streams = torch.randn(5, 4, 32).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mix = hc(streams)
        out = expand(streams, collapse(streams, mix.pre), mix.post, mix.comb)
    assert {t.dtype for t in mix} == {torch.float32} and out.dtype == torch.bfloat16
    for a, b in zip(mix, hc(streams.float()), strict=True):
        assert torch.equal(a, b)


def test_sublayers_read_with_the_mix_of_the_sublayer_before(monkeypatch) -> None:
    """The very first reads stream 0 alone; each later one, and the final norm, the previous sublayer's `pre`."""
    built, read, made = tiny_model(), [], []
    plain = model.hyper.collapse
    monkeypatch.setattr(model.hyper, "collapse", lambda x, pre: (read.append(pre), plain(x, pre))[1])
    for layer in built.layers:
        for hc in (layer.hc_attn, layer.hc_ffn):
            hc.register_forward_hook(lambda module, args, mix: made.append(mix.pre))
    built(tokens(1, 3))
    assert read[0].tolist() == [[1.0, 0.0, 0.0, 0.0]] * 3
    assert len(read) == 13 and all(torch.equal(a, b) for a, b in zip(read[1:], made, strict=True))
