"""AdamW with decoupled weight decay, for norm weights, biases and other vectors (V4.1 report, arXiv 2609.19969,
optimisation).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from .settings import AdamWSettings


@torch.no_grad()
def adamw_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[int],
    *,
    lr: float,
    weight_decay: float,
    settings: AdamWSettings,
) -> None:
    """One step, in place on `params`, `means` and `squares` (fp32, shaped as the parameters), in a few fused
    operations.

    m = b1*m + (1-b1)*g;  v = b2*v + (1-b2)*g^2;  w = w*(1 - lr*wd) - lr * (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps),
    where `steps` holds each parameter's own t, counted from 1 (a parameter that was frozen before starts at 1).
    """
    b1, b2 = settings.beta1, settings.beta2
    grads = [g if g.dtype == torch.float32 else g.float() for g in grads]
    torch._foreach_lerp_(means, grads, 1 - b1)
    torch._foreach_mul_(squares, b2)
    torch._foreach_addcmul_(squares, grads, grads, value=1 - b2)
    divisors = torch._foreach_sqrt(squares)
    torch._foreach_div_(divisors, [sqrt(1 - b2**t) for t in steps])
    torch._foreach_add_(divisors, settings.eps)
    updates = torch._foreach_div(means, divisors)
    torch._foreach_mul_(updates, [-lr / (1 - b1**t) for t in steps])
    if weight_decay:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_add_(params, updates)
