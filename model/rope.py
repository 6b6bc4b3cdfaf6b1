"""Rotary position embedding (RoPE) of the last `qk_rope_head_dim` channels: adjacent channels are pairs, rotated by an
fp32 complex multiplication, written in real numbers.

In shapes, T is the number of tokens, rope = `qk_rope_head_dim`, and D the channels of a head; phasors, pairs of cosine
and sine, are fp32 [T, rope/2, 2].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model.config import TextConfig
from model.kernels.switch import in_triton


def inverse_frequencies(config: TextConfig, compressed: bool) -> Tensor:
    """The angular frequency of each pair of channels, fp32 [rope/2].

    Window layers use `rope_theta` without interpolation. Layers with compressed KV use `compress_rope_theta` with YaRN
    (V4.1 released configuration): frequencies with fewer than beta_slow rotations over the original context length are
    divided by `factor`, frequencies with more than beta_fast rotations are unchanged, and frequencies in between are
    interpolated linearly.
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
    """The rotations of int64 positions [T] as pairs of cosine and sine, fp32 [T, rope/2, 2]."""
    angles = positions.float()[:, None] * inv_freq.to(positions.device)[None, :]
    return torch.view_as_real(torch.polar(torch.ones_like(angles), angles))


def rotate(x: Tensor, phasors: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 2*phasors.shape[1] channels of x [T, ..., D] by phasors [T, rope/2, 2]; `inverse` rotates in the
    opposite direction.
    """
    if in_triton(x):
        from model.kernels import rope as kernels

        return kernels.rotate(x, phasors, inverse)
    return _Rotate.apply(x, phasors, inverse)


class _Rotate(torch.autograd.Function):
    """The autograd function of `rotate`, which copies x once; the gradient is rotated in the opposite direction."""

    @staticmethod
    def forward(ctx, x: Tensor, phasors: Tensor, inverse: bool) -> Tensor:
        ctx.save_for_backward(phasors)
        ctx.inverse = inverse
        return _turn(x, phasors, inverse)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (phasors,) = ctx.saved_tensors
        return _turn(grad, phasors, not ctx.inverse), None, None


def _turn(x: Tensor, phasors: Tensor, inverse: bool) -> Tensor:
    """Multiply every pair of channels (a, b), as a + bi, by cosine + i * sine (or by its conjugate if `inverse`),
    without PyTorch's complex dtypes.
    """
    pairs = phasors.shape[-2]
    cosine, sine = phasors.reshape(phasors.shape[0], *[1] * (x.dim() - 2), pairs, 2).unbind(-1)
    if inverse:
        sine = -sine
    out = x.clone(memory_format=torch.contiguous_format)
    a, b = x[..., -2 * pairs :].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = out[..., -2 * pairs :].unflatten(-1, (-1, 2))
    turned[..., 0] = a * cosine - b * sine
    turned[..., 1] = b * cosine + a * sine
    return out
