"""Activation checkpointing of a block: only its inputs are kept, and the backward runs the block again.

What a block selects, what it receives from other ranks and how many rows it exchanges with them is kept from the first
pass, as an immutable value, and handed to the second: so recomputation scores nothing, waits for no device, and issues
the same exchanges in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.checkpoint import checkpoint


class Checkpointable(Protocol):
    """What a block returns: a NamedTuple with a field `first_pass`, detached from the graph, for its recomputation."""

    @property
    def first_pass(self) -> Any: ...

    def _replace(self, **changes: Any) -> Any: ...


Out = TypeVar("Out", bound=Checkpointable)


def run(block: Callable[..., Out], *arguments: Any, recompute: bool) -> Out:
    """`block(*arguments, None)`, its `first_pass` left out. With `recompute`, where gradients are recorded, the
    backward calls `block(*arguments, first_pass)` to have again what the first call computed.
    """
    if not (recompute and torch.is_grad_enabled()):
        return block(*arguments, None)._replace(first_pass=None)
    first = None

    def again(*arguments: Any) -> Out:
        nonlocal first
        out = block(*arguments, first)
        if first is None:
            first = out.first_pass
        return out._replace(first_pass=None)

    return checkpoint(again, *arguments, use_reentrant=False)
