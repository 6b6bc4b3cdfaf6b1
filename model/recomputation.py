"""Activation checkpointing of a block: only the inputs of the block are kept, and the backward pass runs the block
again.

Some results of the first pass are kept in an immutable value (`first_pass`) and reused by the recomputation: the
entries and experts that the block selected, the entries that the block received from other ranks, and the number of
rows that the block exchanged with each rank. Recomputation therefore does not score entries again and does not
synchronise the host with the device, and every rank exchanges rows in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.offload import HostCopies


class State(Protocol):
    """The interface of a block's first argument: a NamedTuple with a field `streams` [T, n, d]."""

    @property
    def streams(self) -> Tensor: ...

    @property
    def _replace(self) -> Callable[..., Any]: ...


class Checkpointable(Protocol):
    """The interface of a block's output: a NamedTuple whose field `first_pass` holds, detached from the graph, the
    results that a recomputation reuses.
    """

    @property
    def first_pass(self) -> Any: ...

    @property
    def _replace(self) -> Callable[..., Any]: ...


Out = TypeVar("Out", bound=Checkpointable)


def run(
    block: Callable[..., Out], state: State, *arguments: Any, recompute: bool, host: HostCopies | None = None
) -> Out:
    """Run `block(state, *arguments, None)` and return its output without `first_pass`. With `recompute`, and if
    gradients are enabled, activations are not kept: the backward pass calls `block(state, *arguments, first_pass)` to
    recompute the activations. Until the backward pass, `host` keeps the residual streams of `state` in host memory; if
    `host` is None, the residual streams stay on the device.
    """
    if not (recompute and torch.is_grad_enabled()):
        return block(state, *arguments, None)._replace(first_pass=None)
    first, rest = None, state._replace(streams=None)

    def again(streams: Tensor) -> Out:
        nonlocal first
        out = block(rest._replace(streams=streams), *arguments, first)
        if first is None:
            first = out.first_pass
        return out._replace(first_pass=None)

    # autograd saves only the tensor arguments of `checkpoint` here, which are the streams
    with nullcontext() if host is None else host.saving():
        return checkpoint(again, state.streams, use_reentrant=False)
