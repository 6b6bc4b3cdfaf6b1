"""AdamW with decoupled weight decay, for norm weights, biases and other vectors (V4.1 report, arXiv 2609.19969,
optimisation).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .settings import AdamWSettings


@torch.no_grad()
def adamw_step(
    params: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    steps: Sequence[int],
    *,
    lr: float,
    weight_decay: float,
    settings: AdamWSettings,
) -> None:
    """One fused AdamW step that updates `params`, `means` and `squares` in place (all fp32, and of the same shapes).

    The update is m = b1*m + (1-b1)*g, v = b2*v + (1-b2)*g^2 and
    w = w*(1 - lr*wd) - lr * (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps). `steps` holds t for each parameter: the number
    of updates of the parameter, including the current one. A parameter that has just been unfrozen therefore has t = 1.
    """
    if not params:
        return
    wide = [p.float() for p in params]  # the fused operation takes one dtype; fp32 tensors are not copied
    number = {t: torch.full((), float(t), device=params[0].device) for t in set(steps)}
    torch._fused_adamw_(
        wide,
        [g.float() for g in grads],
        means,
        squares,
        [],
        [number[t] for t in steps],
        lr=lr,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=weight_decay,
        eps=settings.eps,
        amsgrad=False,
        maximize=False,
    )
    for p, updated in zip(params, wide, strict=True):
        if updated is not p:
            p.copy_(updated)
