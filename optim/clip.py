"""Global gradient norm and gradient clipping, without host-device synchronisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from .ownership import RankGroupLike

NOT_SPLIT: Mapping[Tensor, RankGroupLike] = {}


@torch.no_grad()
def global_norm(params: Iterable[Tensor], parts: Mapping[Tensor, RankGroupLike] = NOT_SPLIT) -> Tensor:
    """Euclidean norm of all gradients together, as a 0-d fp32 tensor. A parameter listed twice counts once; parameters
    without a gradient are skipped.

    `parts` maps each parameter that is split over processes to the group of processes that hold it; all processes of a
    group must call this function together.
    """
    return _norm(_with_gradients(params), parts)


@torch.no_grad()
def clip_(params: Iterable[Tensor], max_norm: float, parts: Mapping[Tensor, RankGroupLike] = NOT_SPLIT) -> Tensor:
    """Scale all gradients in place so that their global norm is at most `max_norm`; returns the norm before scaling,
    a 0-d fp32 tensor with the same value on all processes.

    If the norm is within the limit, the gradients are unchanged bit for bit. If the returned norm is not finite, the
    gradients are unusable: skip the optimizer step. Raises ValueError if `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, got {max_norm!r}; to disable clipping, do not call clip_")
    trained = _with_gradients(params)
    norm = _norm(trained, parts)
    if trained:
        torch._foreach_mul_([_grad(p) for p in trained], (max_norm / norm).clamp(max=1.0))
    return norm


def _with_gradients(params: Iterable[Tensor]) -> list[Tensor]:
    unique = {id(p): p for p in params}
    return [p for p in unique.values() if p.grad is not None]


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def _norm(params: list[Tensor], parts: Mapping[Tensor, RankGroupLike]) -> Tensor:
    """The global norm: a parameter that is not split counts once, and of a split parameter the parts on all processes
    count.
    """
    unsplit = [_grad(p) for p in params if p not in parts]
    norms = [_norm_of(unsplit)] if unsplit else []
    for group, ranks in {parts[p].group: parts[p] for p in params if p in parts}.items():
        square = _norm_of([_grad(p) for p in params if p in parts and parts[p].group == group]).double().square()
        dist.all_reduce(square, group=ranks.group)
        norms.append(square.sqrt().float())
    if not norms:
        return torch.zeros(())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _norm_of(grads: list[Tensor]) -> Tensor:
    norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms))
