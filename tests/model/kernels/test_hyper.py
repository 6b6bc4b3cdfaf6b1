"""The mHC kernels against the plain functions: values within 1e-5, gradients within 1e-4."""

from __future__ import annotations

import pytest
import torch
from compare import assert_equal, leaves
from torch import Tensor

from model.config import TextConfig
from model.hyper import HyperConnection, collapse, expand

pytest.importorskip("triton", reason="the package triton is not installed: pip install 'narrows[kernels]'")
from model.kernels import hyper as fast  # noqa: E402


def connection(n: int, d: int, iters: int, device: str) -> HyperConnection:
    config = TextConfig(hidden_size=d, hc_mult=n, hc_sinkhorn_iters=iters)
    hc = HyperConnection(config).to(device)
    generator = torch.Generator().manual_seed(0)
    for parameter in hc.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        torch.nn.init.zeros_(parameter).data += drawn * (parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 1)
    return hc


@pytest.mark.parametrize(
    ("tokens", "n", "d", "iters"),
    [(1, 4, 32, 20), (130, 4, 10, 20), (5, 4, 96, 1), (6, 2, 33, 3), (67, 3, 40, 2)],
)
def test_coefficients(tokens: int, n: int, d: int, iters: int, device: str) -> None:
    hc = connection(n, d, iters, device)
    (streams,) = leaves((tokens, n, d), device=device)
    parameters = [hc.fn, hc.base, hc.scale]
    ours = fast.coefficients(streams, *parameters, iters, hc.hc_eps, hc.eps)
    assert_equal(ours, tuple(hc(streams)), [streams, *parameters])


def test_coefficients_with_some_unused(device: str) -> None:
    """The last layer's post and comb, or pre, may reach no loss."""
    hc = connection(4, 8, 20, device)
    (streams,) = leaves((3, 4, 8), device=device)
    for part in range(3):
        ours = fast.coefficients(streams, hc.fn, hc.base, hc.scale, 20, hc.hc_eps, hc.eps)[part]
        assert_equal((ours,), (hc(streams)[part],), [streams, hc.fn, hc.base, hc.scale])


def test_large_logits(device: str) -> None:
    """Saturated coefficients, where comb is close to a permutation."""
    hc = connection(4, 8, 20, device)
    hc.scale.data *= 30
    (streams,) = leaves((9, 4, 8), device=device)
    ours = fast.coefficients(streams, hc.fn, hc.base, hc.scale, 20, hc.hc_eps, hc.eps)
    assert_equal(ours, tuple(hc(streams)), [streams, hc.fn, hc.base, hc.scale])


@pytest.mark.parametrize(("tokens", "n", "d"), [(1, 4, 32), (5, 4, 1100), (3, 2, 7), (4, 3, 16)])
def test_collapse_and_expand(tokens: int, n: int, d: int, device: str) -> None:
    streams, y, pre, post, comb = leaves(
        (tokens, n, d), (tokens, d), (tokens, n), (tokens, n), (tokens, n, n), device=device
    )
    assert_equal((fast.collapse(streams, pre),), (collapse(streams, pre),), [streams, pre])
    ours, theirs = (f(streams, y, post, comb) for f in (fast.expand, expand))
    assert_equal((ours,), (theirs,), [streams, y, post, comb])


def test_bf16_streams_accumulate_in_fp32(device: str) -> None:
    streams, y, pre, post, comb = leaves((4, 4, 40), (4, 40), (4, 4), (4, 4), (4, 4, 4), device=device)
    narrow, y = streams.detach().bfloat16(), y.detach().bfloat16()
    for ours, theirs in (
        (fast.collapse(narrow, pre), collapse(narrow.float(), pre)),
        (fast.expand(narrow, y, post, comb), expand(narrow.float(), y.float(), post, comb)),
    ):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), theirs, atol=0, rtol=2**-7)


def test_operators_hold_what_pytorch_asks_of_them(device: str) -> None:
    """Schema, fake implementation and autograd registration."""
    hc = connection(4, 8, 3, device)
    streams, y, pre, post, comb = leaves((3, 4, 8), (3, 8), (3, 4), (3, 4), (3, 4, 4), device=device)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    parameters: tuple[Tensor, ...] = (hc.fn, hc.base, hc.scale)
    torch.library.opcheck(fast._coefficients, (streams, *parameters, 3, 1e-6, 1e-20), test_utils=checks)
    torch.library.opcheck(fast._collapse, (streams, pre), test_utils=checks)
    torch.library.opcheck(fast._expand, (streams, y, post, comb), test_utils=checks)
