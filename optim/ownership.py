"""Where a parameter lies among processes, and which of them updates it.

Ownership goes by whole parameters, so that every matrix is whole where it is updated: of the processes that hold the
same values one, the owner, keeps the optimizer state and computes the update, and the others receive it.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from typing import NamedTuple, Protocol

import torch.distributed as dist


class RankGroupLike(Protocol):
    """An ordered set of processes: `rank` is the own place among `size`; the group of one process is None."""

    group: dist.ProcessGroup | None
    rank: int
    size: int


class ParameterPlacement(NamedTuple):
    """Of one parameter, as this process holds it.

    Attributes:
        replica_group: the processes that hold the same values.
        shard_group: the processes that hold the other rows (or experts) of a parameter that is split along
            its first axis.
        numel: elements of the largest part; the same number in all of them.
    """

    replica_group: RankGroupLike
    shard_group: RankGroupLike
    numel: int


def assign_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The owner of each of several indivisible things, so that the fullest of `ranks` has little: the largest first,
    each to the one that has least so far (the lowest number of equals). At most 4/3 of the best possible.
    """
    loads, owners = [(0, rank) for rank in range(ranks)], [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, owners[i] = loads[0]
        heapreplace(loads, (load + sizes[i], owners[i]))
    return owners
