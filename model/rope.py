"""Rotary position embedding: adjacent pairs, fp32 complex multiply, on the last `qk_rope_head_dim` channels.

Shapes: T tokens, rope = `qk_rope_head_dim`, D channels of a head; phasors are [T, rope/2].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model.config import TextConfig
from model.kernels.switch import in_triton


def inverse_frequencies(config: TextConfig, compressed: bool) -> Tensor:
    """fp32 [rope/2] angular frequency of each pair.

    Window-only layers use `rope_theta` as it is; compressed layers use `compress_rope_theta` with YaRN: frequencies
    that turn fewer than beta_slow times over the original context are divided by `factor`, those above beta_fast are
    kept, with a linear ramp between (V4.1 released configuration).
    """
    dim = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if not compressed:
        return inv_freq
    scaling = config.rope_scaling

    def pair_that_turns(rotations: float) -> float:
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(scaling.beta_slow)), dim - 1)
    span = (high - low) or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return inv_freq / scaling.factor * ramp + inv_freq * (1 - ramp)


def rotations(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """complex64 [T, rope/2]: unit phasors of int64 positions [T]."""
    angles = positions.float()[:, None] * inv_freq.to(positions.device)[None, :]
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, phasors: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 2*phasors.shape[-1] channels of x [T, ..., D] by phasors [T, rope/2]; `inverse` turns back."""
    if in_triton(x):
        from model.kernels import rope as kernels

        return kernels.rotate(x, phasors, inverse)
    return _Rotate.apply(x, phasors.conj() if inverse else phasors)


class _Rotate(torch.autograd.Function):
    """One copy and one complex multiply; the gradient is the rotation by the conjugate."""

    @staticmethod
    def forward(ctx, x: Tensor, phasors: Tensor) -> Tensor:
        ctx.save_for_backward(phasors)
        return _turn(x, phasors)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (phasors,) = ctx.saved_tensors
        return _turn(grad, phasors.conj()), None


def _turn(x: Tensor, phasors: Tensor) -> Tensor:
    width = 2 * phasors.shape[-1]
    out = x.clone(memory_format=torch.contiguous_format)
    pairs = torch.view_as_complex(x[..., -width:].float().unflatten(-1, (-1, 2)).contiguous())
    phasors = phasors.reshape(phasors.shape[0], *[1] * (x.dim() - 2), width // 2)
    out[..., -width:] = torch.view_as_real(pairs * phasors).flatten(-2)
    return out
