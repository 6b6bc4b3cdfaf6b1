"""Storage of one kind of attention state, packed or plain.

Shapes: N rows written or read at once, `places` rows of room.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.quantize import KVFormat


class Store:
    """A table [places, width] of one kind of state, packed by `format` or plain. It can grow and keeps its content."""

    def __init__(self, format: KVFormat | None, device: torch.device):
        self.format, self.device = format, device
        self.tensors: tuple[Tensor, ...] = ()
        self.width = 0

    def fit(self, capacity: int, like: Tensor) -> None:
        """Make room for `capacity` rows with the width, dtype and device of `like` [N, width]."""
        if not self.tensors:
            self.width = like.shape[1]
            self.tensors = self._parts(like[:0])
        self.grow(capacity)

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` rows in a store that `fit` has been called on."""
        if self.tensors[0].shape[0] < capacity:
            self.tensors = tuple(_enlarged(tensor, capacity) for tensor in self.tensors)

    def write(self, places: Tensor, x: Tensor) -> None:
        """Store x [N, width] at int64 places [N], packing it if the store is packed."""
        self.put(places, self._parts(x))

    def put(self, places: Tensor, parts: tuple[Tensor, ...]) -> None:
        """Store rows that `stored` returned at int64 places [N]."""
        for tensor, part in zip(self.tensors, parts, strict=True):
            as_bytes(tensor).index_copy_(0, places, as_bytes(part))

    def stored(self, places: Tensor) -> tuple[Tensor, ...]:
        """The rows at int64 places [N] as they are stored, without unpacking: codes and scales, or the plain rows."""
        return tuple(as_bytes(tensor).index_select(0, places).view(tensor.dtype) for tensor in self.tensors)

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.format.pack(x) if self.format else (x,)

    def read(self, places: Tensor, dtype: torch.dtype, unit: int = 1) -> Tensor:
        """The unpacked rows [..., width] at int64 places [...]. With `unit` > 1, a place is a run of `unit` consecutive
        rows, and the result is [number of places * unit, width].
        """
        parts = []
        for tensor in self.tensors:
            raw = as_bytes(tensor)
            found = raw.view(-1, unit * raw.shape[1]).index_select(0, places.flatten())
            shape = (*places.shape, -1) if unit == 1 else (places.numel() * unit, raw.shape[1])
            parts.append(found.view(shape).view(tensor.dtype))
        if not self.format:
            return parts[0].to(dtype)
        codes, scale = parts
        return self.format.unpack(codes, scale, self.width, dtype)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


def as_bytes(tensor: Tensor) -> Tensor:
    """Types of one byte as uint8, because indexing operations do not support all of them; other types unchanged."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _enlarged(tensor: Tensor, capacity: int) -> Tensor:
    """The tensor with zero rows appended. Unwritten places are read too, and masked later, so they must not be NaN."""
    old = as_bytes(tensor)
    new = old.new_zeros(capacity, old.shape[1])
    new[: old.shape[0]] = old
    return new.view(tensor.dtype)
