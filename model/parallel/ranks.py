"""Defines how a model is split over processes: which process holds which experts and which rows of the tables.

`Parallel()` describes one process that holds the whole model. Parameters are split along their first dimension, which
the attribute `parameter.shard` describes; a parameter without this attribute is whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class RankGroup:
    """An ordered set of processes that share a part of the model. A set with a single process has size 1, and `group`
    is None.
    """

    group: ProcessGroup | None = None
    rank: int = 0  # this process's position in the set
    size: int = 1

    def __deepcopy__(self, memo: dict) -> RankGroup:
        """Returns the group itself, because a copied model is split over the same processes."""
        return self

    def name(self, rank: int) -> str:
        """Returns a name for rank `rank` of this group, for use in messages; the name contains its rank among all
        processes.
        """
        return f"rank {rank if self.group is None else dist.get_global_rank(self.group, rank)}"


ONE_RANK = RankGroup()


@dataclass(frozen=True)
class Parallel:
    """The processes that a model is split over.

    experts: the ranks over which the routed experts of a layer are split; rank r owns experts [r*E/size, (r+1)*E/size).
    tables: the ranks over which the rows of the Engram tables are split. With `shard_embeddings`, the rows of the token
    embedding and of the head are split over the same ranks. Rank r owns rows [r*c, (r+1)*c) with c = ceil(rows / size),
    so the last ranks may own fewer rows or none.
    context: the ranks over which the tokens of a micro-batch are split in consecutive chunks (context parallelism).
    dense: the ranks over which the rows of the blocks' dense matrices are split. While a block runs, its whole matrices
    are gathered on every rank (FSDP2, see `train/distributed/dense.py`), so results do not depend on this split.
    """

    experts: RankGroup = ONE_RANK
    tables: RankGroup = ONE_RANK
    shard_embeddings: bool = False
    context: RankGroup = ONE_RANK
    dense: RankGroup = ONE_RANK

    @property
    def vocabulary(self) -> RankGroup:
        """The ranks over which the rows of the token embedding and the head are split."""
        return self.tables if self.shard_embeddings else ONE_RANK

    @property
    def together(self) -> bool:
        """Whether several ranks must run each forward pass together."""
        return max(self.experts.size, self.tables.size, self.dense.size) > 1


ONE_PROCESS = Parallel()


@dataclass(frozen=True)
class Shard:
    """The part of a parameter that this rank holds: along the parameter's first dimension, the indices [start, stop) of
    0 ... `total` - 1. An index is a row of a matrix, or an expert.
    """

    ranks: RankGroup
    start: int
    stop: int
    total: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def height(self) -> int:
        """The number of rows (or experts) of a full shard. The last shards can be smaller."""
        return -(-self.total // self.ranks.size)


def rows_here(tensor: Tensor) -> Tensor:
    """Returns the rows of a parameter or buffer that this rank holds, as a plain detached tensor that shares memory
    with it.
    """
    tensor = tensor.detach()
    # A DTensor; importing its class for a check would take half a second
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def row_shard(total: int, ranks: RankGroup) -> Shard:
    """Returns the shard that this rank holds of a table with `total` rows."""
    shard = Shard(ranks, 0, 0, total)
    start, stop = (min(rank * shard.height, total) for rank in (ranks.rank, ranks.rank + 1))
    return replace(shard, start=start, stop=stop)


def expert_shard(total: int, ranks: RankGroup) -> Shard:
    """Returns the shard that this rank holds of a layer with `total` experts. Raises ValueError if the experts cannot
    be split evenly.
    """
    if total % ranks.size:
        raise ValueError(f"{total} routed experts cannot be split evenly over {ranks.size} ranks")
    return row_shard(total, ranks)


def mark_shards(model: nn.Module) -> None:
    """Set `parameter.shard` on the parameters of every module that has a `shard` and is split over several ranks."""
    for module in model.modules():
        shard = getattr(module, "shard", None)
        if shard is not None and shard.ranks.size > 1:
            for parameter in module.parameters(recurse=False):
                parameter.shard = shard  # type: ignore[attr-defined]
