"""Sums rows of tensors in a fixed order, so that results are reproducible. Atomic additions would sum in a random
order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.kernels.launch import launch, operator, padded

DETERMINISTIC_BYTES = 2**31  # maximum bytes of rows that are written out at a time


@operator("sums_in_order")
def _sums_in_order(rows: Tensor, order: Tensor, bounds: Tensor) -> Tensor:
    """Compute the sums fp32 [N, D]: row n is the sum of `rows` [R, D] at the indices order[bounds[n]:bounds[n + 1]],
    added in the order of these indices.
    """
    count = len(bounds) - 1
    out = rows.new_empty(count, rows.shape[1])
    launch(
        _sum_in_order_kernel,
        (count,),
        *(rows, order, bounds, out),
        DIM=rows.shape[1],
        DIM_TILE=padded(rows.shape[1]),
        num_warps=4,
    )
    return out


def add_in_order(target: Tensor, rows: Tensor, index: Tensor) -> None:
    """Compute target[index] += rows, adding rows with the same index in their order. target fp32 [N, D], rows fp32
    [..., D], index [...]; rows with index -1 are ignored.
    """
    index, order = index.flatten().sort(stable=True)
    numbers = torch.arange(len(target) + 1, device=index.device, dtype=index.dtype)
    target += _sums_in_order(rows.flatten(0, -2), order, torch.searchsorted(index, numbers))


@triton.jit
def _sum_in_order_kernel(rows, order, bounds, out, DIM: tl.constexpr, DIM_TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, DIM_TILE)
    total = tl.zeros([DIM_TILE], tl.float32)
    for at in range(tl.load(bounds + program), tl.load(bounds + program + 1)):
        total += tl.load(rows + tl.load(order + at) * DIM + channel, mask=channel < DIM, other=0.0)
    tl.store(out + program * DIM + channel, total, mask=channel < DIM)
