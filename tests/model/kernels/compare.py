"""Comparison of a kernel with its plain function."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def leaves(*shapes: tuple[int, ...], device: str = "cpu", seed: int = 0) -> list[Tensor]:
    """Random fp32 tensors that want gradients."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]


def assert_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Values within 1e-5 and gradients of `inputs` within 1e-4, of a random combination of the outputs; relative to the
    largest of each tensor where that is above 1.
    """
    generator = torch.Generator().manual_seed(1)
    upstream = []
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        close(a, b, 1e-5)
        upstream.append(torch.randn(b.shape, generator=generator).to(b.device, b.dtype))
    found, expected = (torch.autograd.grad(outputs, inputs, upstream) for outputs in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        close(a, b, 1e-4)


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    if b.numel():
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())
