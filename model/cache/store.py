"""Storage for one kind of attention state, either packed (quantised) or plain.

In shapes, N is the number of rows written or read at once. The argument `places` contains row numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.quantize import KVFormat


class Store:
    """A growable table [rows, width] with one kind of attention state, packed in `format`, or plain if `format` is
    None.
    """

    def __init__(self, format: KVFormat | None, device: torch.device):
        self.format, self.device = format, device
        self.tensors: tuple[Tensor, ...] = ()
        self.width = 0

    def fit(self, capacity: int, like: Tensor) -> None:
        """Grow the table to at least `capacity` rows; the first call sets width and dtype to those of `like` [N,
        width].
        """
        if not self.tensors:
            self.width = like.shape[1]
            self.tensors = self._parts(like[:0])
        self.grow(capacity)

    def grow(self, capacity: int) -> None:
        """Grow the table to `capacity` rows, keeping its content; `fit` must have been called before."""
        if self.tensors[0].shape[0] < capacity:
            self.tensors = tuple(_enlarged(tensor, capacity) for tensor in self.tensors)

    def write(self, places: Tensor, x: Tensor) -> None:
        """Write x [N, width] into the rows with numbers `places` (int64 [N]), packing x if the store is packed."""
        self.put(places, self._parts(x))

    def put(self, places: Tensor, parts: tuple[Tensor, ...]) -> None:
        """Write `parts`, as `stored` returns them, into the rows with numbers `places` (int64 [N])."""
        for tensor, part in zip(self.tensors, parts, strict=True):
            as_bytes(tensor).index_copy_(0, places, as_bytes(part))

    def stored(self, places: Tensor) -> tuple[Tensor, ...]:
        """Returns the rows with numbers `places` (int64 [N]), not unpacked: codes and scales, or plain rows."""
        return tuple(as_bytes(tensor).index_select(0, places).view(tensor.dtype) for tensor in self.tensors)

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.format.pack(x) if self.format else (x,)

    def read(self, places: Tensor, dtype: torch.dtype, unit: int = 1) -> Tensor:
        """Read and unpack the rows with numbers `places` (int64 [...]); returns [..., width]. With `unit` > 1, each
        number in `places` stands for a block of `unit` consecutive rows, and the result is [number of blocks * unit,
        width].
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
    """View a tensor with one-byte elements as uint8, because indexing does not support all one-byte dtypes; other
    tensors are returned unchanged.
    """
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _enlarged(tensor: Tensor, capacity: int) -> Tensor:
    """A copy of the tensor with zero rows appended up to `capacity`. Rows that were never written are read too and
    masked later, so they must not be NaN.
    """
    old = as_bytes(tensor)
    new = old.new_zeros(capacity, old.shape[1])
    new[: old.shape[0]] = old
    return new.view(tensor.dtype)
