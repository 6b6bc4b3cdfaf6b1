"""Differentiable exchange of tensor rows between ranks: each rank sends any number of rows to every other rank.

In shapes, R is the number of rows sent or received by this rank, ordered by rank; rows can have any shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from model.parallel.ranks import RankGroup


class RowCounts(NamedTuple):
    """The sizes of an exchange: received int64 [size, ...], the number of rows of each kind that every rank sends to
    this one; send and receive, the numbers of rows to send to and receive from every rank, as Python integers.
    """

    received: Tensor
    send: list[int]
    receive: list[int]


def exchange_counts(counts: Tensor, ranks: RankGroup) -> RowCounts:
    """Exchange row counts: counts int64 [size, ...] is the number of rows of each kind that this rank sends to every
    rank. This synchronises the host with the device.
    """
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=ranks.group)
    send, receive = torch.stack([counts, received]).view(2, ranks.size, -1).sum(2).tolist()
    return RowCounts(received, send, receive)


def exchange(tensors: Sequence[Tensor], send: list[int], receive: list[int], ranks: RankGroup) -> tuple[Tensor, ...]:
    """Send the first send[0] rows of every tensor to rank 0 of the group, the next send[1] to rank 1 and so on; returns
    the rows received, ordered by rank. The backward pass sends gradients back to the senders of the rows.

    All ranks must call this function. They must also all run its backward pass, so whether at least one of the tensors
    requires a gradient must be the same on all ranks.
    """
    return _Exchange.apply(send, receive, ranks, *tensors)


class _Exchange(torch.autograd.Function):
    """Exchanges several tensors in one autograd node, so that backward exchanges run in the same order on all ranks."""

    @staticmethod
    def forward(ctx, send: list[int], receive: list[int], ranks: RankGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.send, ctx.receive, ctx.ranks = send, receive, ranks
        return tuple(_all_to_all(tensor, send, receive, ranks) for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None, None, None, *(_all_to_all(grad, ctx.receive, ctx.send, ctx.ranks) for grad in grads)


def _all_to_all(rows: Tensor, send: list[int], receive: list[int], ranks: RankGroup) -> Tensor:
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=ranks.group)
    return out
