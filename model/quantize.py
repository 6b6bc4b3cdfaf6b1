"""Fake quantisation of the attention state: the forward rounds, the backward passes straight through.

The three formats of the V4.1 report. They are part of the forward pass (they move the top-k), so training applies
them too:
  FP8 window KV   groups of 32, UE8M0 scale, E4M3 values
  MXFP4 indexer   groups of 32, UE8M0 scale, E2M1 values
  FP4 main KV     groups of 16, E4M3 scale, E2M1 values, no global scale
The straight-through gradient is the identity, also where a value was clipped.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E4M3_SMALLEST = 2.0**-9  # smallest positive E4M3 value (subnormal)


def fake_quant_fp8(x: Tensor) -> Tensor:
    """E4M3 in groups of 32 along the last axis with a power-of-two scale: the sliding-window KV. Same shape and dtype
    as `x`.
    """
    return _StraightThrough.apply(x, _fp8)


def fake_quant_mxfp4(x: Tensor) -> Tensor:
    """E2M1 in groups of 32 along the last axis with a power-of-two scale: indexer queries and keys."""
    return _StraightThrough.apply(x, _mxfp4)


def fake_quant_fp4(x: Tensor) -> Tensor:
    """E2M1 in groups of 16 along the last axis with an E4M3 scale: the shared main KV, after rotation."""
    return _StraightThrough.apply(x, _fp4)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, rounder) -> Tensor:
        return rounder(x.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


def _fp8(x: Tensor) -> Tensor:
    groups, width = _groups(x, 32)
    scale = _power_of_two_above(groups.abs().amax(-1, keepdim=True).clamp_(min=1e-4) / E4M3_MAX)
    values = (groups / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    return _ungroup(values.mul_(scale), x.shape, width)


def _mxfp4(x: Tensor) -> Tensor:
    groups, width = _groups(x, 32)
    scale = _power_of_two_above(groups.abs().amax(-1, keepdim=True).clamp_(min=E2M1_MAX * 2.0**-126) / E2M1_MAX)
    return _ungroup(round_e2m1(groups / scale).mul_(scale), x.shape, width)


def _fp4(x: Tensor) -> Tensor:
    groups, width = _groups(x, 16)
    amax = groups.abs().amax(-1, keepdim=True).clamp_(min=E2M1_MAX * E4M3_SMALLEST)
    scale = (amax / E2M1_MAX).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    return _ungroup(round_e2m1(groups / scale).mul_(scale), x.shape, width)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value (0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives), ties to the even mantissa, clipped at 6.
    fp32.
    """
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    magnitude = x.abs()
    # spacing of the grid is .5 below 2, 1 below 4, 2 above; dividing by it makes round-half-even the even mantissa
    step = (magnitude >= 2).float().add_(1).add_((magnitude >= 4).float(), alpha=2).mul_(0.5)
    return (x / step).round_().mul_(step)


def _power_of_two_above(x: Tensor) -> Tensor:
    """Smallest power of two >= x for positive normal fp32 x, exactly, from the exponent bits."""
    bits = x.contiguous().view(torch.int32)
    exponent = (bits + 0x7FFFFF) & 0x7F800000  # a nonzero mantissa carries into the exponent
    return exponent.view(torch.float32)


def _groups(x: Tensor, size: int) -> tuple[Tensor, int]:
    """[..., width] -> [..., ceil(width/size), size]; a partial last group is filled with zeros."""
    width = x.shape[-1]
    if width % size:
        x = torch.nn.functional.pad(x, (0, size - width % size))
    return x.unflatten(-1, (-1, size)), width


def _ungroup(groups: Tensor, shape: torch.Size, width: int) -> Tensor:
    return groups.flatten(-2)[..., :width].reshape(shape)
