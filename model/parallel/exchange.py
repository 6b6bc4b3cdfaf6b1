"""Differentiable exchange of tensor rows between ranks: each rank sends any number of rows to every other rank.

In shapes, R is the number of rows that this rank sends or receives; rows are ordered by rank and can have any shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from model.parallel.ranks import RankGroup


class RowCounts(NamedTuple):
    """How many rows each rank sends and receives in an exchange.

    received: int64 [size, ...], the number of rows of each kind that every rank sends to this rank.
    send: for every rank, the number of rows that this rank sends to it.
    receive: for every rank, the number of rows that this rank receives from it.
    """

    received: Tensor
    send: list[int]
    receive: list[int]


def exchange_counts(counts: Tensor, ranks: RankGroup) -> RowCounts:
    """Exchange row counts: counts int64 [size, ...] is the number of rows of each kind that this rank sends to every
    rank. The exchange of counts synchronises the host with the device.
    """
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=ranks.group)
    send, receive = torch.stack([counts, received]).view(2, ranks.size, -1).sum(2).tolist()
    return RowCounts(received, send, receive)


def exchange(tensors: Sequence[Tensor], send: list[int], receive: list[int], ranks: RankGroup) -> tuple[Tensor, ...]:
    """Send the first send[0] rows of every tensor to rank 0 of the group, the next send[1] to rank 1 and so on; returns
    the rows that this rank received, ordered by sending rank. The backward pass sends the gradient of each row back to
    the rank that sent the row.

    All ranks must call this function. All ranks must also run the backward pass of this function, so if at least one of
    the tensors requires a gradient on one rank, this must be the case on all ranks.
    """
    return Transfer(tensors, send, receive, ranks).finish()


class Packer(Protocol):
    """A format for sending rows with fewer bytes. `pack` converts rows to codes and scales; `unpack` converts codes and
    scales back to rows of a given width and dtype.
    """

    def pack(self, x: Tensor) -> tuple[Tensor, Tensor]: ...

    def unpack(self, codes: Tensor, scale: Tensor, width: int, dtype: torch.dtype) -> Tensor: ...


class Transfer:
    """An `exchange` that runs in the background. Creating a `Transfer` starts sending the rows, and `finish` waits for
    the received rows and returns them. The caller may do other work between creating the `Transfer` and calling
    `finish`.

    packer: if given, the rows of the first tensor [R, width] are sent in the format of this packer, which must
    represent their values exactly. Gradients are sent unpacked.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        send: list[int],
        receive: list[int],
        ranks: RankGroup,
        packer: Packer | None = None,
    ):
        self.tensors, self.send, self.receive, self.ranks, self._packer = tensors, send, receive, ranks, packer
        self._works: list[dist.Work] = []
        outgoing = [tensor.detach() for tensor in tensors]
        if packer is not None:
            codes, scales = packer.pack(outgoing[0])
            self._formats = codes.dtype, scales.dtype
            outgoing[:1] = codes.view(torch.uint8), scales.view(torch.uint8)
        self._incoming = [self._begin(rows) for rows in outgoing]

    def finish(self) -> tuple[Tensor, ...]:
        """Wait for the received rows and return them; gradients flow back through this call to the sent rows."""
        return _Exchange.apply(self, *self.tensors)

    def arrived(self) -> tuple[Tensor, ...]:
        """Wait for the received rows and return them without gradients."""
        for work in self._works:
            work.wait()
        if self._packer is None:
            return tuple(self._incoming)
        codes, scales = (bytes.view(kind) for bytes, kind in zip(self._incoming, self._formats, strict=False))
        rows = self.tensors[0]
        return self._packer.unpack(codes, scales, rows.shape[1], rows.dtype), *self._incoming[2:]

    def _begin(self, rows: Tensor) -> Tensor:
        out, work = _all_to_all(rows, self.send, self.receive, self.ranks)
        self._works.append(work)
        return out


class _Exchange(torch.autograd.Function):
    """Exchanges several tensors in one autograd node, so that backward exchanges run in the same order on all ranks."""

    @staticmethod
    def forward(ctx, transfer: Transfer, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.send, ctx.receive, ctx.ranks = transfer.send, transfer.receive, transfer.ranks
        return transfer.arrived()

    @staticmethod
    def backward(ctx, *grads: Tensor):
        found = [_all_to_all(grad, ctx.receive, ctx.send, ctx.ranks) for grad in grads]
        for _, work in found:
            work.wait()
        return None, *(grad for grad, _ in found)


def _all_to_all(rows: Tensor, send: list[int], receive: list[int], ranks: RankGroup) -> tuple[Tensor, dist.Work]:
    """Start an all-to-all exchange. Returns the tensor of received rows, which is filled only after waiting for the
    returned handle, and this handle.
    """
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    return out, dist.all_to_all_single(out, rows.contiguous(), receive, send, group=ranks.group, async_op=True)
