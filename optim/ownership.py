"""Describes which processes hold a parameter, and chooses the one that updates it.

Among the processes that hold the same parameter values, one is the parameter's owner: it keeps the optimizer state,
computes the update and broadcasts the result to the others. A parameter has one owner for all its elements, because
Muon needs whole matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from typing import NamedTuple, Protocol

import torch.distributed as dist


class RankGroupLike(Protocol):
    """An ordered set of `size` processes; `rank` is the position of this process in it. If the set has one process,
    `group` is None.
    """

    @property
    def group(self) -> dist.ProcessGroup | None: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


class RowGroups(NamedTuple):
    """The processes over which the rows of a parameter are divided while the parameter is neither used nor updated.

    Attributes:
        keepers: consecutive processes of `ParameterPlacement.replica_group`, which together keep all rows; each keeps
            ceil(rows / size) consecutive rows, and the last processes fewer or none.
        copies: the processes that keep the same rows as this one, one process from every set of keepers, in order.
    """

    keepers: RankGroupLike
    copies: RankGroupLike


class ParameterPlacement(NamedTuple):
    """Which processes hold one parameter, from the point of view of this process.

    Attributes:
        replica_group: the processes that hold (or use, if `rows` is given) the same values of the parameter.
        shard_group: the processes over which the parameter is split along its first axis (rows or experts).
        numel: number of elements of the largest part of the parameter; every process has the same number here.
        rows: given if the parameter is a `DTensor`, of which each process keeps some rows; its owner updates the whole
            parameter.
    """

    replica_group: RankGroupLike
    shard_group: RankGroupLike
    numel: int
    rows: RowGroups | None = None


def assign_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Choose an owner for each parameter, so that the bytes of optimizer state (`sizes`) are balanced over `ranks`
    processes.

    The assignment is greedy: parameters are taken from the largest to the smallest, and each goes to the rank with the
    fewest bytes so far (the lowest such rank). The fullest rank then holds at most 4/3 of the bytes that the fullest
    rank of the best assignment would hold.
    """
    loads, owners = [(0, rank) for rank in range(ranks)], [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, owners[i] = loads[0]
        heapreplace(loads, (load + sizes[i], owners[i]))
    return owners
