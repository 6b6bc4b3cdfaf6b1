"""Sums in fp32 the gradients of a bf16 tensor that many layers read.

Autograd adds the gradients of all readers of a tensor in the tensor's own type. With bf16 each addition would be
rounded to eight bits. A collector is an fp32 tensor of the same shape, without memory of its own, that receives the
gradients in place of the tensor, so autograd adds them in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def collector(x: Tensor) -> Tensor | None:
    """Returns a collector for x, whose gradient becomes the gradient of x. Returns None if the sum needs none: x is
    fp32 or has no gradient.
    """
    return None if x.dtype == torch.float32 or not x.requires_grad else _Collect.apply(x)


def read(x: Tensor, collected: Tensor | None) -> Tensor:
    """Returns x for one reader. The gradient of the reader is added to that of the collector `collected`, or to that of
    x if it is None.
    """
    return x if collected is None else _Read.apply(x.detach(), collected)


def without_memory(x: Tensor) -> Tensor:
    """Returns an fp32 tensor of zeros of the shape of x that takes the memory of one value."""
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
