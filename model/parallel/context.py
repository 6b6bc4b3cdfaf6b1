"""What the ranks of context parallelism exchange: rows of the tokens before a chunk, compressed entries, sums.

The ranks of a group hold consecutive chunks of the same tokens. All functions here are collective calls of the group:
every rank makes them in the same order, in the backward pass and in recomputation too, however few rows it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from model.parallel.exchange import exchange
from model.parallel.ranks import RankGroup


@dataclass(frozen=True)
class HaloPlan:
    """Who sends which rows to the ranks behind it, so that each gets those just before its chunk.

    index: int64 [rows sent], numbers of own tokens, ordered by receiving rank; sent, received: rows to and from every
    rank. All ranks derive their plans from the same layout, so that no counts are exchanged.
    """

    index: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """How many tokens before its chunk this rank receives rows of."""
        return sum(self.received)


@dataclass(frozen=True)
class GatherPlan:
    """How entries, of which every rank computes those that end in its chunk, become the slots of the whole layout.

    Each rank contributes `capacity` rows. place: int64 [N], of each slot the row that holds it, among those of all
    ranks one after another (0 for unused slots); slot: int64 [ranks * capacity], the slot of each row, -1 for rows that
    hold none.
    """

    capacity: int
    place: Tensor
    slot: Tensor


def with_halo(tensors: Sequence[Tensor], plan: HaloPlan, ranks: RankGroup) -> tuple[Tensor, ...]:
    """Put the rows of the tokens before the chunk in front of each [T, ...]. A token's gradient comes back to its
    owner, which adds it to its own.
    """
    rows = exchange([x.index_select(0, plan.index) for x in tensors], list(plan.sent), list(plan.received), ranks)
    return tuple(torch.cat(pair) for pair in zip(rows, tensors, strict=True))


def gather_entries(kv: Tensor, keys: Tensor, plan: GatherPlan, ranks: RankGroup) -> tuple[Tensor, Tensor]:
    """Own entries [capacity, D] and index keys [capacity, Di] -> those of all slots [N, D] and [N, Di], in one message.

    The backward sums the gradients of all ranks in fp32 and returns each entry's to the rank that computed it.
    """
    return _GatherSlots.apply(kv, keys, plan, ranks)


class _GatherSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv: Tensor, keys: Tensor, plan: GatherPlan, ranks: RankGroup) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.ranks, ctx.widths, ctx.types = plan, ranks, (kv.shape[1], keys.shape[1]), (kv.dtype, keys.dtype)
        rows = torch.cat([kv, keys], dim=1)
        found = rows.new_empty(ranks.size * plan.capacity, rows.shape[1])
        dist.all_gather_single(found, rows, group=ranks.group)
        parts = (part.index_select(0, plan.place) for part in found.split(ctx.widths, dim=1))
        return tuple(part.to(dtype) for part, dtype in zip(parts, ctx.types, strict=True))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        plan, ranks = ctx.plan, ctx.ranks
        held = plan.slot.clamp(min=0)
        rows = torch.cat([grad.index_select(0, held).float() for grad in grads], dim=1)
        rows.masked_fill_((plan.slot < 0)[:, None], 0.0)
        own = rows.new_empty(plan.capacity, rows.shape[1])
        dist.reduce_scatter_single(own, rows, group=ranks.group)
        parts = own.split(ctx.widths, dim=1)
        return *(part.to(dtype) for part, dtype in zip(parts, ctx.types, strict=True)), None, None


def sum_over(counts: Tensor, ranks: RankGroup) -> Tensor:
    """The sum of every rank's counts, without gradient; `counts` itself where there is one rank."""
    if ranks.size == 1:
        return counts
    total = counts.clone()
    dist.all_reduce(total, group=ranks.group)
    return total
