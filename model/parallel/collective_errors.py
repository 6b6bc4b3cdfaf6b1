"""Agreement between processes that read or write a folder together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import all_gather_object

from model.parallel.ranks import RankGroup


@contextmanager
def all_or_none(ranks: RankGroup) -> Iterator[None]:
    """Something that all ranks do, or none: if one raises, all raise once all are done, the others an OSError with the
    reason.
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
    """Every rank's value."""
    values = [value]
    if ranks.size > 1:
        values = [None] * ranks.size
        all_gather_object(values, value, group=ranks.group)
    return values
