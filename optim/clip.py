"""Global gradient norm and gradient clipping, without host-device synchronisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from .ownership import RankGroupLike
from .row_exchange import NOTHING, Collected

NOT_SPLIT: Mapping[Tensor, RankGroupLike] = {}


@torch.no_grad()
def global_norm(
    params: Iterable[Tensor],
    parts: Mapping[Tensor, RankGroupLike] = NOT_SPLIT,
    collected: Collected = NOTHING,
) -> Tensor:
    """Euclidean norm of all gradients together, as a 0-d fp32 tensor. A parameter listed twice counts once; parameters
    without a gradient are skipped.

    `parts` maps each parameter that is split over processes to the group of processes that hold it; `collected` has the
    gradients that are held whole by a single process. All processes of the groups in `parts` must call this function
    together.
    """
    return _norm(_with_gradients(params, collected), parts, collected)


@torch.no_grad()
def clip_(
    params: Iterable[Tensor],
    max_norm: float,
    parts: Mapping[Tensor, RankGroupLike] = NOT_SPLIT,
    collected: Collected = NOTHING,
) -> Tensor:
    """Scale all gradients in place so that their global norm is at most `max_norm`; returns the norm before scaling,
    a 0-d fp32 tensor with the same value on all processes.

    If the norm is within the limit, the gradients are unchanged bit for bit. If the returned norm is not finite, the
    gradients are unusable: skip the optimizer step. Raises ValueError if `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, got {max_norm!r}; to disable clipping, do not call clip_")
    trained = _with_gradients(params, collected)
    norm = _norm(trained, parts, collected)
    grads = [grad for p in trained if (grad := collected.gradients.get(p, p.grad)) is not None]
    if grads:
        torch._foreach_mul_(grads, (max_norm / norm).clamp(max=1.0))
    return norm


def _with_gradients(params: Iterable[Tensor], collected: Collected) -> list[Tensor]:
    unique = {id(p): p for p in params}
    return [p for p in unique.values() if p.grad is not None or p in collected.gradients]


def _norm(params: list[Tensor], parts: Mapping[Tensor, RankGroupLike], collected: Collected) -> Tensor:
    """The global norm: a parameter that is not split counts once, and of a split parameter the parts on all processes
    count.
    """
    unsplit = [p for p in params if p not in parts]
    norms = [torch.linalg.vector_norm(_norms(unsplit, collected))] if unsplit else []
    for group, ranks in {parts[p].group: parts[p] for p in params if p in parts}.items():
        split = [p for p in params if p in parts and parts[p].group == group]
        square = torch.linalg.vector_norm(_norms(split, NOTHING)).double().square()
        dist.all_reduce(square, group=ranks.group)
        norms.append(square.sqrt().float())
    if not norms:
        return torch.zeros(())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _norms(params: list[Tensor], collected: Collected) -> Tensor:
    """The norm of every parameter's gradient, fp32, including gradients that another process holds. Norms are computed
    one by one, so that the global norm does not depend on which process holds a gradient.
    """
    grads = {p: grad for p in params if (grad := collected.gradients.get(p, p.grad)) is not None}
    norms = dict(zip(grads, torch._foreach_norm(list(grads.values()), 2, dtype=torch.float32), strict=True))
    spread = [p for p in params if p in collected.gradients]
    if collected.ranks is not None and spread:
        found = torch.stack([norms[p] if p in norms else torch.zeros((), device=p.device) for p in spread])
        dist.all_reduce(found, group=collected.ranks.group)
        norms |= dict(zip(spread, found.unbind(), strict=True))
    return torch.stack([norms[p] for p in params])
