"""Sums in fp32 the gradients of a bf16 tensor that many layers read.

Autograd adds the gradients from all layers that read a tensor in the tensor's own dtype, so for a bf16 tensor each sum
would be rounded to eight significant bits. A collector is an fp32 tensor of the same shape as the bf16 tensor, but
almost without memory. It receives the gradients in place of the bf16 tensor, so autograd adds the gradients in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def collector(x: Tensor) -> Tensor | None:
    """Returns a collector for x: an fp32 tensor whose gradient becomes the gradient of x. Returns None if x needs no
    collector, because x is fp32 or has no gradient.
    """
    return None if x.dtype == torch.float32 or not x.requires_grad else _Collect.apply(x)


def read(x: Tensor, collected: Tensor | None) -> Tensor:
    """Returns x for use in one layer. The gradient from this layer is added to the gradient of the collector
    `collected`, or to the gradient of x if `collected` is None.
    """
    return x if collected is None else _Read.apply(x.detach(), collected)


def without_memory(x: Tensor) -> Tensor:
    """Returns an fp32 tensor of zeros with the shape of x that takes the memory of a single value."""
    return x.new_zeros((), dtype=torch.float32).expand(x.shape)


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return without_memory(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.to(ctx.dtype)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, collected: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, grad.float()
