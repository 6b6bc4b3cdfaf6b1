"""The anchors of a batch of drafts, and the context keys that each block of drafts attends to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from model.layout import SequenceLayout


class DraftLayout(NamedTuple):
    """Which context keys each of N blocks of B drafts attends to, and the RoPE factors of the drafts.
    places: int64 [N, W], for each block, the row numbers of its context keys in the tensor `context_keys` of a stage.
    hidden: bool [N, W], true where there is no key (before the document or outside the sliding window of W tokens).
    phasors: fp32 [N*B, rope/2, 2], the RoPE factors of the drafts.

    image: always None. Routers read this field, and drafts are always routed as text (with the router's `bias`), even
    after an image.
    """

    places: Tensor
    hidden: Tensor
    phasors: Tensor
    image: None = None


class Anchors(NamedTuple):
    """The anchors of a batch.
    shape: the shape [A] or [B, A] of the tensor of anchors that the caller passed.
    real: int64 [N], the flat indices of the elements of this tensor that are anchors and not padding (-1).
    last: int64 [N], for each anchor, the index of the token before it among the tokens of the layout.
    """

    shape: torch.Size
    real: Tensor
    last: Tensor

    def flatten(self, x: Tensor) -> Tensor:
        """Flatten x [A, ...] or [B, A, ...] to [N, ...], leaving out the padding."""
        return x.flatten(0, len(self.shape) - 1).index_select(0, self.real)

    def unflatten(self, x: Tensor) -> Tensor:
        """Reshape x [N, ...] to [A, ...] or [B, A, ...], with zeros at the padding."""
        if len(self.real) != self.shape.numel():
            x = x.new_zeros(self.shape.numel(), *x.shape[1:]).index_copy(0, self.real, x)
        return x.view(*self.shape, *x.shape[1:])


class SplitLayout(NamedTuple):
    """The layouts of a micro-batch under context parallelism: `whole` is the layout of all tokens, which the drafter
    reads; `chunk` is the layout of this rank's chunk, for which the backbone runs.
    """

    whole: SequenceLayout
    chunk: SequenceLayout

    def to(self, device: torch.device) -> SplitLayout:
        """Returns a copy of the two layouts on another device."""
        return SplitLayout(self.whole.to(device), self.chunk.to(device))

    def pinned(self) -> SplitLayout:
        """Returns a copy of the two layouts in pinned memory, see `SequenceLayout`."""
        return SplitLayout(self.whole.pinned(), self.chunk.pinned())
