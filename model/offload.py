"""Keeps the inputs of blocks in host memory between the forward and the backward pass (`runtime.offload=inputs`).

On CUDA, copies run on a separate stream. The inputs of a block are copied to pinned memory while the block computes,
and copied back while the following block is recomputed, because the backward pass runs through the blocks in reverse
order. On a CPU nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class HostCopies:
    """Keeps in host memory the tensors that autograd saves for the blocks of one forward pass, in the order of the
    blocks.
    """

    def __init__(self) -> None:
        self._last: _HostCopy | None = None

    def saving(self) -> saved_tensors_hooks:
        """A context manager that moves the tensors saved by autograd to the host."""
        return saved_tensors_hooks(self._pack, _HostCopy.back)

    def _pack(self, x: Tensor) -> _HostCopy:
        self._last = _HostCopy(x.detach(), self._last)
        return self._last


class _HostCopy:
    """One tensor in host memory. `before` is the tensor that was moved just before this one; the backward pass, in
    reverse order, needs `before` just after this one.
    """

    def __init__(self, x: Tensor, before: _HostCopy | None):
        self.device, self.before = x.device, before
        self._host = to_host(x)
        self._fetched: Tensor | None = None

    def fetch(self) -> None:
        """Start to copy the tensor back to its device."""
        if self._fetched is None:
            self._fetched = to_device(self._host, self.device)

    def back(self) -> Tensor:
        """Return the tensor on its device, and start to copy back the tensor that was moved before it."""
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
    """Copy x to pinned memory asynchronously; returns x itself if it is not on CUDA."""
    if not x.is_cuda:
        return x
    side = _side_stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    x.record_stream(side)
    return host


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor that `to_host` returned back to the device, on a separate CUDA stream; other streams must wait for
    this stream before they use the result.
    """
    if device.type != "cuda":
        return host
    with torch.cuda.stream(_side_stream(device)):
        return host.to(device, non_blocking=True)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
