"""Which processes hold a parameter, and which of them updates it.

Whole parameters are assigned, so that every matrix is whole where it is updated. Of the processes that hold the same
values, one is the owner: it keeps the optimizer state, computes the update and sends the result to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from typing import NamedTuple, Protocol

import torch.distributed as dist


class RankGroupLike(Protocol):
    """An ordered set of `size` processes; `rank` is this process's position. With one process, `group` is None."""

    @property
    def group(self) -> dist.ProcessGroup | None: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


class ParameterPlacement(NamedTuple):
    """Where one parameter is held, seen from this process.

    Attributes:
        replica_group: the processes that hold the same values.
        shard_group: the processes among which a parameter is split along its first axis (rows or experts).
        numel: elements of the largest part, the same number on every process.
    """

    replica_group: RankGroupLike
    shard_group: RankGroupLike
    numel: int


def assign_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The owner of each parameter (their state takes `sizes` bytes), balanced over `ranks`.

    Greedy: the largest first, each to the rank with the least so far (the lowest rank among equals). The fullest rank
    holds at most 4/3 of the best possible.
    """
    loads, owners = [(0, rank) for rank in range(ranks)], [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, owners[i] = loads[0]
        heapreplace(loads, (load + sizes[i], owners[i]))
    return owners
