"""Error handling for processes that read or write a folder together: an error of one process is raised in all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import all_gather_object

from model.parallel.ranks import RankGroup


@contextmanager
def all_or_none(ranks: RankGroup) -> Iterator[None]:
    """A context manager for work that must succeed on all ranks. If one rank raises an error, all ranks raise an error
    as soon as every rank has finished its work; a rank whose own work succeeded raises OSError with the reason.
    """
    mine = None
    try:
        yield
    except Exception as error:
        mine = error
    reasons = gather_objects(None if mine is None else f"{type(mine).__name__}: {mine}", ranks)
    if mine is not None:
        raise mine
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise OSError(f"rank {rank} failed: {reason}")


def gather_objects(value: Any, ranks: RankGroup) -> list[Any]:
    """Returns the list of the values of all ranks, in the order of the ranks. All ranks must call this function."""
    values = [value]
    if ranks.size > 1:
        values = [None] * ranks.size
        all_gather_object(values, value, group=ranks.group)
    return values
