"""Registers Triton kernels as PyTorch operators, and launches kernels or records their launches.

The files that define operators have no `from __future__ import annotations`, because PyTorch reads the operators'
schemas from the types.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

COMPILE_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")


@dataclass(frozen=True)
class Launch:
    """The record of one kernel launch: the kernel, the arguments and options with which it can be compiled, and
    estimates of its work.

    flops: floating-point operations of the kernel's matrix products (two for each multiply-add).
    bytes: the size of all tensor arguments, which is the minimum that must be moved between memory and chip.
    """

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    flops: float
    bytes: float


_recorded: list[Launch] | None = None


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """A context manager that collects the kernel launches on meta tensors inside its body; these kernels do not run."""
    global _recorded
    found: list[Launch] = []
    _recorded = found
    try:
        yield found
    finally:
        _recorded = None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, flops: float = 0.0, **keywords: Any) -> None:
    """Run a Triton kernel on the grid `grid`. `keywords` are the kernel's constexpr arguments and its compile options
    (COMPILE_OPTIONS). `flops` is the number of floating-point operations for the record of the launch (see `Launch`).
    The kernel is not run if the tensors are meta or fake tensors, or if the grid is empty.
    """
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    if any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
        if _recorded is not None:
            options = {k: v for k, v in keywords.items() if k in COMPILE_OPTIONS}
            constants = {k: v for k, v in keywords.items() if k not in COMPILE_OPTIONS}
            named = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
            moved = sum(t.numel() * t.element_size() for t in tensors)
            _recorded.append(Launch(kernel, named, options, flops, moved))
        return
    if not math.prod(grid):
        return
    if not tensors[0].is_cuda:  # Triton's interpreter does not accept compile options
        keywords = {k: v for k, v in keywords.items() if k not in COMPILE_OPTIONS}
    kernel[grid](*arguments, **keywords)


def operator(name: str) -> Callable[[Callable], Any]:
    """Register a function as the PyTorch operator `torch.ops.narrows.<name>`. The function takes tensors, allocates its
    results and launches kernels.

    For compilers, fake tensors and operation counters, the function is then a single operation. The function is its own
    fake implementation, since `launch` runs nothing on fake tensors.
    """

    def register(function: Callable) -> Any:
        registered = torch.library.custom_op(f"narrows::{name}", function, mutates_args=())
        registered.register_fake(function)
        return registered

    return register


def padded(size: int, least: int = 1) -> int:
    """Returns the width of a tile that holds `size` elements: the smallest power of two that is at least `size` and at
    least `least`.
    """
    return max(least, 1 << max(0, size - 1).bit_length())
