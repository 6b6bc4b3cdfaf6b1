"""Where the drafts of a batch stand: their anchors, and the context keys that each block sees."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from model.layout import SequenceLayout


class DraftLayout(NamedTuple):
    """Which context keys each of N blocks of B drafts attends to, and the RoPE factors of the drafts. places int64 [N,
    W], W the window: for each block, the rows of its context keys in the key tensor that a layer of the drafter is
    given; hidden bool [N, W]: true where there is no key (before the document or outside the window); phasors fp32
    [N*B, rope/2, 2]: the RoPE factors of the drafts.

    image: is None because routers read it and drafts are always routed as text, with the router's `bias`, even after an
    image.
    """

    places: Tensor
    hidden: Tensor
    phasors: Tensor
    image: None = None


class Anchors(NamedTuple):
    """The anchors of a batch. shape: the shape [A] or [B, A] of the given tensor; real int64 [N]: the indices of its
    elements that are anchors and not padding (-1); last int64 [N]: for each anchor, the index of the token before it
    among the layout's tokens.
    """

    shape: torch.Size
    real: Tensor
    last: Tensor

    def flatten(self, x: Tensor) -> Tensor:
        """[A, ...] or [B, A, ...] -> [N, ...], without the padding."""
        return x.flatten(0, len(self.shape) - 1).index_select(0, self.real)

    def unflatten(self, x: Tensor) -> Tensor:
        """[N, ...] -> [A, ...] or [B, A, ...], zero at the padding."""
        if len(self.real) != self.shape.numel():
            x = x.new_zeros(self.shape.numel(), *x.shape[1:]).index_copy(0, self.real, x)
        return x.view(*self.shape, *x.shape[1:])


class SplitLayout(NamedTuple):
    """A micro-batch under context parallelism: the layout of all its tokens, which the drafter reads, and that of this
    rank's chunk, which the backbone computes.
    """

    whole: SequenceLayout
    chunk: SequenceLayout

    def to(self, device: torch.device) -> SplitLayout:
        """The same on another device."""
        return SplitLayout(self.whole.to(device), self.chunk.to(device))

    def pinned(self) -> SplitLayout:
        """The same in pinned memory, see `SequenceLayout`."""
        return SplitLayout(self.whole.pinned(), self.chunk.pinned())
