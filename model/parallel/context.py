"""The exchanges of context parallelism between ranks. Ranks exchange rows (vectors) of the tokens before a chunk,
compressed entries, and sums.

The ranks of a group hold consecutive chunks of the same tokens. All functions here are collective operations: every
rank of the group must call these functions in the same order, also in the backward pass and in recomputation, even if
the rank has no rows to send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from model.parallel.exchange import exchange
from model.parallel.ranks import RankGroup
from model.quantize import KV_INDEX, KVFormat
from model.summed_gradients import without_memory


@dataclass(frozen=True)
class HaloPlan:
    """Says which rows each rank sends to later ranks, so that every rank receives the rows of the tokens just before
    its chunk.

    index: int64 [rows sent], the indices of the tokens whose rows this rank sends, ordered by receiving rank. sent: for
    every rank, the number of rows that this rank sends to it. received: for every rank, the number of rows that this
    rank receives from it. All ranks derive their plans from the same layout, so the ranks need not exchange these
    counts.
    """

    index: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens before its own chunk whose rows this rank receives."""
        return sum(self.received)


@dataclass(frozen=True)
class GatherPlan:
    """Says how many slots of compressed entries each rank computes. Each rank computes consecutive slots; concatenated
    in rank order, these are the N slots of the whole layout.

    sizes: for every rank, the number of slots that it computes.
    """

    sizes: tuple[int, ...]

    @property
    def capacity(self) -> int:
        """The number of rows that every rank sends: the largest number of slots of any rank, at least 1. Ranks with
        fewer slots add padding rows.
        """
        return max(1, *self.sizes)

    def join(self, rows: Tensor) -> Tensor:
        """Returns the slots [N, ...], which are the rows [ranks * capacity, ...] of all ranks without padding."""
        parts = rows.split(self.capacity)
        return torch.cat([part[:size] for part, size in zip(parts, self.sizes, strict=True)])

    def add_divided(self, rows: Tensor, slots: Tensor) -> None:
        """Add each of the slots [N, ...] to the one of the rows [ranks * capacity, ...] that `join` takes it from."""
        for own, part in zip(rows.split(self.capacity), slots.split(self.sizes), strict=True):
            own[: len(part)] += part


def with_halo(tensors: Sequence[Tensor], plan: HaloPlan, ranks: RankGroup) -> tuple[Tensor, ...]:
    """Prepend to each tensor [T, ...] the rows of the tokens before the chunk, which are received from other ranks. In
    the backward pass, the gradient of a received row is sent back to the rank that sent the row, where it is added to
    the gradient of that row.
    """
    rows = exchange([x.index_select(0, plan.index) for x in tensors], list(plan.sent), list(plan.received), ranks)
    return tuple(torch.cat(pair) for pair in zip(rows, tensors, strict=True))


def gather_entries(
    kv: Tensor, keys: Tensor, plan: GatherPlan, ranks: RankGroup, packed: KVFormat | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gather the entries [capacity, D] and index keys [capacity, Di] of every rank into the slots [N, D] and [N, Di],
    in one message. Returns entries, index keys, and a collector of gradients for each of the two (see
    `model/summed_gradients.py`).

    packed: the format that kv has already been rounded to (None: send values). If it is given, the codes and scales of
    kv and keys are sent instead of the values; the result is the same, because keys are already rounded to `KV_INDEX`.

    The backward pass sums the gradients of all ranks in fp32 and returns the gradient of each entry to the rank that
    computed it.
    """
    return _GatherSlots.apply(kv, keys, plan, ranks, (packed, KV_INDEX if packed else None))


class _GatherSlots(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        kv: Tensor,
        keys: Tensor,
        plan: GatherPlan,
        ranks: RankGroup,
        formats: tuple[KVFormat | None, KVFormat | None],
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.device = kv.device
        ctx.plan, ctx.ranks, ctx.widths, ctx.types = plan, ranks, (kv.shape[1], keys.shape[1]), (kv.dtype, keys.dtype)
        sent = [_as_sent(x, form) for x, form in zip((kv, keys), formats, strict=True)]
        rows = torch.cat(sent, dim=1)
        found = rows.new_empty(ranks.size * plan.capacity, rows.shape[1])
        dist.all_gather_single(found, rows, group=ranks.group)
        parts = plan.join(found).split([x.shape[1] for x in sent], dim=1)
        slots = [_as_values(*given) for given in zip(parts, formats, ctx.widths, ctx.types, strict=True)]
        return *slots, *map(without_memory, slots)

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        plan, ranks = ctx.plan, ctx.ranks
        rows = torch.zeros(ranks.size * plan.capacity, sum(ctx.widths), dtype=torch.float32, device=ctx.device)
        for part, some in zip(rows.split(ctx.widths, dim=1), (grads[::2], grads[1::2]), strict=True):
            for grad in some:
                if grad is not None:
                    plan.add_divided(part, grad)
        own = rows.new_empty(plan.capacity, rows.shape[1])
        dist.reduce_scatter_single(own, rows, group=ranks.group)
        parts = own.split(ctx.widths, dim=1)
        return *(part.to(dtype) for part, dtype in zip(parts, ctx.types, strict=True)), None, None, None


def _as_sent(x: Tensor, form: KVFormat | None) -> Tensor:
    """Returns x itself if `form` is None, otherwise the codes and scales of each row of x as bytes, uint8 [rows,
    bytes].
    """
    return x if form is None else torch.cat([part.view(torch.uint8) for part in form.pack(x)], dim=1)


def _as_values(sent: Tensor, form: KVFormat | None, width: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `_as_sent`: converts received rows back to rows of `width` values."""
    if form is None:
        return sent.to(dtype).contiguous()
    codes, scales = sent.split(form.widths(width), dim=1)  # both formats have scales of one byte
    return form.unpack(codes.contiguous().view(form.codes), scales.contiguous().view(form.scale), width, dtype)


def sum_of_parts(part: Tensor, ranks: RankGroup) -> Tensor:
    """Returns the sum of the tensors `part` of all ranks, from which all ranks compute the same loss. In the backward
    pass, each rank gets only the gradient of its own part, so the loss itself may be counted on only one rank.
    """
    return part if ranks.size == 1 else _SumOfParts.apply(part, ranks)


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: Tensor, ranks: RankGroup) -> Tensor:
        return sum_over(part, ranks)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


def chunk_bounds(tokens: int, ranks: int) -> Tensor:
    """Returns int64 [C + 1]: the index of the first token of every rank's chunk, and at the end the number of all
    tokens. Chunk sizes differ by at most one; if there are fewer tokens than ranks, the last ranks get empty chunks.
    """
    return -(torch.arange(ranks + 1) * -tokens // ranks)


@torch.no_grad()
def gather_chunks(x: Tensor, tokens: int, ranks: RankGroup) -> Tensor:
    """Returns the rows [tokens, ...] of all ranks' chunks in order, given the rows x [T, ...] of this rank's chunk. No
    gradient is computed.
    """
    if ranks.size == 1:
        return x
    sizes = chunk_bounds(tokens, ranks.size).diff().tolist()
    capacity = max(sizes)
    sent = x.new_zeros(capacity, *x.shape[1:])
    sent[: len(x)] = x
    found = x.new_empty(ranks.size * capacity, *x.shape[1:])
    dist.all_gather_single(found, sent, group=ranks.group)
    parts = found.split(capacity)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def sum_over(counts: Tensor, ranks: RankGroup) -> Tensor:
    """Returns the sum of `counts` over all ranks, without gradient. With one rank, `counts` itself is returned."""
    if ranks.size == 1:
        return counts
    total = counts.clone()
    dist.all_reduce(total, group=ranks.group)
    return total
