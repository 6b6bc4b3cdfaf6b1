"""Global gradient norm and clipping, without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def global_norm(params: Iterable[Tensor]) -> Tensor:
    """Euclidean norm of all gradients together, 0-d fp32. A parameter listed twice counts once; one without a gradient
    counts not.
    """
    return _norm(_gradients(params))


@torch.no_grad()
def clip_(params: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients in place so that their global norm is at most `max_norm`; returns the norm before, 0-d fp32.

    Gradients within the limit keep their bits. If the returned norm is not finite the gradients are unusable: do not
    step. Raises ValueError if `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, got {max_norm!r}; leave clipping out to switch it off")
    grads = _gradients(params)
    norm = _norm(grads)
    if grads:
        torch._foreach_mul_(grads, (max_norm / norm).clamp(max=1.0))
    return norm


def _gradients(params: Iterable[Tensor]) -> list[Tensor]:
    unique = {id(p): p for p in params}
    return [p.grad for p in unique.values() if p.grad is not None]


def _norm(grads: list[Tensor]) -> Tensor:
    if not grads:
        return torch.zeros(())
    norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms))
