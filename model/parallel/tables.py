"""Tables whose rows can be split over ranks: the token embedding, the Engram tables and the head.

In shapes, V is the number of rows of the whole table, U the number of distinct rows in a look-up and dim the number of
columns.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from model.no_wait import Watched, count_ids
from model.packed import PackedWeight
from model.parallel.exchange import exchange, exchange_counts
from model.parallel.ranks import RankGroup, Shard, row_shard
from model.precision import without_autocast


class Lookup(NamedTuple):
    """The result of a look-up.

    values: [U, dim], the distinct rows that were looked up.
    places: int64 of any shape, the index in `values` of each requested row.
    work: a handle while the rows are still being received, otherwise None. Call `arrived` before using `values`.
    """

    values: Tensor
    places: Tensor
    work: dist.Work | None = None

    def arrived(self) -> Lookup:
        if self.work is not None:
            self.work.wait()
        return self._replace(work=None)

    def rows(self) -> Tensor:
        """Returns the requested rows [*places.shape, dim] on the device of `places`. The table may be on another
        device.
        """
        return F.embedding(self.places.to(self.values.device), self.values).to(self.places.device)


class Table(nn.Embedding, Watched):
    """The rows that this rank holds of an embedding table with `rows` rows in total."""

    def __init__(self, rows: int, dim: int, ranks: RankGroup):
        shard = row_shard(rows, ranks)
        super().__init__(len(shard), dim)
        self.shard = shard

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the rows [*ids.shape, dim] of the int64 `ids`, which can have any shape."""
        return self.look_up(ids).arrived().rows()

    def look_up(self, ids: Tensor) -> Lookup:
        """Fetch the rows `ids` of the whole table, each distinct row once, from the ranks that hold them. All ranks
        must call this method.

        The rows are received asynchronously. Their gradients are summed on this rank and then sent to the ranks that
        hold the rows.
        """
        shard = self.shard
        if shard.ranks.size == 1:
            return self._from_host(ids) if on_host(self.weight) else Lookup(self.weight, ids)
        wanted, index = ids.unique(return_inverse=True)
        counts = count_ids(wanted // shard.height, shard.ranks.size)
        _, send, receive = exchange_counts(counts, shard.ranks)
        (asked,) = exchange((wanted,), send, receive, shard.ranks)
        if len(asked) and not len(shard):
            raise RuntimeError(self._complaint(f"{len(asked)} rows"))
        self.note((asked < shard.start) | (asked >= shard.stop), asked)
        # An id can only be out of range if the ranks are not at the same point of the program
        found = (asked - shard.start).clamp(0, len(shard) - 1)
        works: list[dist.Work] = []
        values = _Fetch.apply(self.weight, found, receive, send, shard.ranks, works)
        return Lookup(values, index, works[0])

    def _from_host(self, ids: Tensor) -> Lookup:
        """Copy the distinct rows of a table that stays in host memory, packed, to the device of `ids`."""
        wanted, index = ids.unique(return_inverse=True)
        return Lookup(cast(PackedWeight, self.weight).packed_rows(wanted), index)

    def complain(self, wrong: int, rows: int, evidence: list[int]) -> str:
        return self._complaint(f"row {evidence[0]}")

    def _complaint(self, what: str) -> str:
        shard = self.shard
        return (
            f"{shard.ranks.name(shard.ranks.rank)} was asked for {what} of a table of {shard.total} rows, of which it "
            f"holds [{shard.start}, {shard.stop}); the ranks are out of step"
        )


class _Fetch(torch.autograd.Function):
    """Sends the rows of the shard `weight` that each rank requested, and receives the rows that this rank requested.
    Appends the handle of the asynchronous exchange to `works`.
    """

    @staticmethod
    def forward(ctx, weight: Tensor, rows: Tensor, send: list[int], receive: list[int], ranks: RankGroup, works: list):
        ctx.save_for_backward(rows)
        ctx.height, ctx.send, ctx.receive, ctx.ranks = len(weight), send, receive, ranks
        found = weight.index_select(0, rows)  # on the device of `rows`, also if the table stays in host memory
        out = found.new_empty(sum(receive), weight.shape[1])
        works.append(dist.all_to_all_single(out, found, receive, send, group=ranks.group, async_op=True))
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        (rows,) = ctx.saved_tensors
        (grad,) = exchange((grad,), ctx.receive, ctx.send, ctx.ranks)
        return torch.ops.aten.embedding_dense_backward(grad, rows, ctx.height, -1, False), *(None,) * 5


def on_host(weight: Tensor) -> bool:
    """Whether a weight is packed and stays in host memory."""
    return isinstance(weight, PackedWeight) and weight.on_host


class Head(nn.Linear):
    """The rows that this rank holds of the weight of an output head for a vocabulary of `rows` tokens."""

    def __init__(self, dim: int, rows: int, ranks: RankGroup):
        shard = row_shard(rows, ranks)
        super().__init__(dim, len(shard), bias=False)
        self.shard = shard

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the logits fp32 [..., rows] from hidden states [..., dim]."""
        return logits(hidden, self.full_weight())

    def full_weight(self) -> Tensor:
        """Gather the whole weight [rows, dim] from all ranks, which must all call this method. The gradient of the
        whole weight is summed over the ranks.
        """
        return self.weight if self.shard.ranks.size == 1 else _Gather.apply(self.weight, self.shard)

    def weight_and_shard(self) -> tuple[Tensor, Shard | None]:
        """Returns the rows of the weight that this rank holds, and their shard (None if the rank holds all rows), for a
        loss that gathers the rows itself.
        """
        return self.weight, None if self.shard.ranks.size == 1 else self.shard


@without_autocast
def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns the logits fp32 [..., V] for hidden states [..., d] and weight [V, d] of any dtype, computed as in the
    released inference code.
    """
    return F.linear(hidden.float(), weight.float())


class _Gather(torch.autograd.Function):
    """Gathers the shards of all ranks into the whole weight. In the backward pass, the gradient of each shard is summed
    over the ranks.
    """

    @staticmethod
    def forward(ctx, weight: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return gather_rows(weight, shard)[: shard.total]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return sum_rows(_padded(grad, ctx.shard.ranks.size * ctx.shard.height), ctx.shard), None


def gather_rows(rows: Tensor, shard: Shard) -> Tensor:
    """Returns the concatenated rows of all ranks, [size * height, columns], given the rows [len(shard), columns] of
    each rank. A rank with fewer than `shard.height` rows contributes padding after its rows; only the last ranks have
    fewer rows, so the first `shard.total` rows of the result are the whole matrix. All ranks must call this function.
    """
    out = rows.new_empty(shard.ranks.size * shard.height, rows.shape[1])
    dist.all_gather_single(out, _padded(rows, shard.height), group=shard.ranks.group)
    return out


def sum_rows(whole: Tensor, shard: Shard) -> Tensor:
    """Returns this rank's rows [len(shard), columns] of the sum of `whole` [size * height, columns] over all ranks. The
    rows of `whole` are in the order of the result of `gather_rows`. All ranks must call this function.
    """
    out = whole.new_empty(shard.height, whole.shape[1])
    dist.reduce_scatter_single(out, whole, group=shard.ranks.group)
    return out[: len(shard)]


def _padded(rows: Tensor, height: int) -> Tensor:
    return F.pad(rows, (0, 0, 0, height - len(rows))).contiguous()
