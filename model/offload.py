"""Block inputs in host memory between the forward and the backward (`runtime.offload=inputs`).

On CUDA a copy runs on a stream of its own: to pinned memory while the block computes, and back while the block behind
it is recomputed, since the backward goes through the blocks in reverse order. On a CPU nothing is moved.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class HostCopies:
    """Keeps on the host what the blocks of one pass save, in the order in which they do."""

    def __init__(self) -> None:
        self._last: _HostCopy | None = None

    def saving(self) -> saved_tensors_hooks:
        """A context in which tensors that autograd saves go to the host."""
        return saved_tensors_hooks(self._pack, _HostCopy.back)

    def _pack(self, x: Tensor) -> _HostCopy:
        self._last = _HostCopy(x.detach(), self._last)
        return self._last


class _HostCopy:
    """One tensor on the host; `before` is the one that was moved before it, which the backward needs after it."""

    def __init__(self, x: Tensor, before: _HostCopy | None):
        self.device, self.before = x.device, before
        self._host = to_host(x)
        self._fetched: Tensor | None = None

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self._fetched is None:
            self._fetched = to_device(self._host, self.device)

    def back(self) -> Tensor:
        """The tensor on its device again; the one before it is on its way then."""
        self.fetch()
        x, self._fetched = self._fetched, None
        assert x is not None
        if x.is_cuda:
            current = torch.cuda.current_stream(x.device)
            current.wait_stream(_side_stream(x.device))
            x.record_stream(current)
        if self.before is not None:
            self.before.fetch()
        return x


def to_host(x: Tensor) -> Tensor:
    """x in pinned memory, or itself if it is not on CUDA; the copy may still be running."""
    if not x.is_cuda:
        return x
    side = _side_stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    x.record_stream(side)
    return host


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """The reverse of `to_host`: valid on the side stream, on others once they have waited for it."""
    if device.type != "cuda":
        return host
    with torch.cuda.stream(_side_stream(device)):
        return host.to(device, non_blocking=True)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
