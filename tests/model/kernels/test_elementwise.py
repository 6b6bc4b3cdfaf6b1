"""RMSNorm, SwiGLU and Engram's gate against the plain functions: values within 1e-5, gradients within 1e-4."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from compare import assert_equal, leaves
from tiny import tiny_model

from model.moe import clamped_swiglu
from model.norm import RMSNorm

pytest.importorskip("triton", reason="the package triton is not installed: pip install 'narrows[kernels]'")
from model.kernels import engram, moe, norm  # noqa: E402

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("shape", [(1, 8), (5, 3, 48), (7, 1280), (3, 5000)], ids=str)
def test_rms_norm(shape: tuple[int, ...], device: str, monkeypatch) -> None:
    monkeypatch.setattr(norm, "SUMMANDS", 2)  # several tiles a program
    x, weight = leaves(shape, shape[-1:], device=device)
    plain = RMSNorm(shape[-1], 1e-20).to(device)
    plain.weight = torch.nn.Parameter(weight.detach())
    ours, theirs = norm.rms_norm(x, plain.weight, 1e-20), plain(x)
    assert_equal((ours,), (theirs,), [x, plain.weight])


def test_rms_norm_of_zeros_is_zero(device: str) -> None:
    x = torch.zeros(2, 8, device=device, requires_grad=True)
    out = norm.rms_norm(x, torch.ones(8, device=device), 1e-20)
    assert not out.any()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(1, 4), (6, 40), (3, 1500)], ids=str)
def test_clamped_swiglu(shape: tuple[int, int], weighted: bool, device: str) -> None:
    gate, up, weights = leaves(shape, shape, shape[:1], device=device)
    weights = weights if weighted else None
    ours, theirs = (f(3 * gate, 3 * up, 2.0, weights) for f in (moe.clamped_swiglu, clamped_swiglu))
    assert_equal((ours,), (theirs,), [gate, up, *([weights] if weighted else [])])


def test_clamped_swiglu_of_no_rows(device: str) -> None:
    """An expert may get no token."""
    gate, up, weights = leaves((0, 8), (0, 8), (0,), device=device)
    out = moe.clamped_swiglu(gate, up, 2.0, weights)
    assert [g.shape for g in torch.autograd.grad(out.sum(), [gate, up, weights])] == [(0, 8), (0, 8), (0,)]


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("tokens", [1, 35])
def test_engram_gate(tokens: int, images: bool, device: str) -> None:
    layer = tiny_model(engram=True).layers[1].engram.to(device)
    n, d = layer.q_weight.shape
    streams, memory = leaves((tokens, n, d), (tokens, (n + 1) * d), device=device)
    image = (torch.arange(tokens, device=device) % 3 == 0) if images else None
    layer.wkv = torch.nn.Identity()
    lookup = SimpleNamespace(rows=lambda: memory[:, None])
    theirs = layer(streams, lookup, SimpleNamespace(image=image))
    weight = (layer.q_weight * layer.k_weight).float()
    ours = engram.add_gated(streams, memory.unflatten(1, (n + 1, d)), weight, image, layer.eps)
    assert_equal((ours,), (theirs,), [streams, memory, layer.q_weight, layer.k_weight])


def test_operators_hold_what_pytorch_asks_of_them(device: str) -> None:
    x, weight = leaves((3, 8), (8,), device=device)
    torch.library.opcheck(norm._norm, (x, weight, 1e-6), test_utils=CHECKS)
    torch.library.opcheck(moe._swiglu, (x, x.detach().clone().requires_grad_(), None, 1.0), test_utils=CHECKS)
    streams, memory, weight = leaves((3, 2, 8), (3, 3, 8), (2, 8), device=device)
    torch.library.opcheck(engram._add_gated, (streams, memory, weight, None, 1e-6), test_utils=CHECKS)
