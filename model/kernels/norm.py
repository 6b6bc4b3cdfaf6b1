"""A Triton kernel for RMSNorm; see model/norm.py for the formula."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.kernels.launch import launch, operator, padded

ELEMENTS = 4096  # elements of one tile
SUMMANDS = 256  # number of programs in the backward pass; each sums the weight's gradient over its rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last axis in fp32; the result has the dtype of x."""
    return _norm(x.contiguous(), weight, eps)[0]


@operator("rms_norm")
def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the normalised rows, and the inverse root mean squares of the rows (fp32 [rows]), which the backward pass
    needs.
    """
    rows = x.numel() // weight.shape[0]
    out, scale = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    sizes = _sizes(weight)
    launch(
        _norm_kernel,
        (triton.cdiv(rows, sizes["ROWS_TILE"]),),
        *(x, weight, out, scale, rows, eps),
        **sizes,
    )
    return out, scale


@operator("rms_norm_backward")
def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    rows, sizes = len(scale), _sizes(weight)
    tiles = triton.cdiv(rows, sizes["ROWS_TILE"])
    each = max(1, triton.cdiv(tiles, SUMMANDS))
    programs = triton.cdiv(tiles, each)
    d_x = torch.empty_like(x)
    d_weight = torch.empty(programs, weight.shape[0], dtype=torch.float32, device=x.device)
    launch(_norm_backward_kernel, (programs,), *(grad, x, weight, scale, d_x, d_weight, rows, each), **sizes)
    return d_x, d_weight.sum(0).to(weight.dtype)


def _sizes(weight: Tensor) -> dict:
    tile = padded(weight.shape[0])
    return {"DIM": weight.shape[0], "DIM_TILE": tile, "ROWS_TILE": max(1, ELEMENTS // tile), "num_warps": 8}


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


_norm.register_autograd(
    lambda ctx, grad, _: (*_norm_backward(grad.contiguous(), *ctx.saved_tensors), None), setup_context=_save
)


@triton.jit
def _norm_kernel(x, weight, out, scale, rows, eps, DIM: tl.constexpr, DIM_TILE: tl.constexpr, ROWS_TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS_TILE + tl.arange(0, ROWS_TILE)
    column = tl.arange(0, DIM_TILE)
    here = (row < rows)[:, None] & (column < DIM)[None, :]
    place = row[:, None] * DIM + column[None, :]
    value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)
    tl.store(scale + row, inverse, mask=row < rows)
    factor = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)
    tl.store(out + place, (value * inverse[:, None] * factor[None, :]).to(out.dtype.element_ty), mask=here)


@triton.jit
def _norm_backward_kernel(
    grad,
    x,
    weight,
    scale,
    d_x,
    d_weight,
    rows,
    each,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    ROWS_TILE: tl.constexpr,
):
    """Compute the gradients of x and weight. Each program processes `each` tiles of rows, and sums the contributions of
    these rows to the gradient of the weight.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DIM_TILE)
    factor = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([DIM_TILE], tl.float32)
    for tile in range(program * each, program * each + each):
        row = tile * ROWS_TILE + tl.arange(0, ROWS_TILE)
        here = (row < rows)[:, None] & (column < DIM)[None, :]
        place = row[:, None] * DIM + column[None, :]
        inverse = tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
        unit = tl.load(x + place, mask=here, other=0.0).to(tl.float32) * inverse
        g = tl.load(grad + place, mask=here, other=0.0).to(tl.float32)
        total += tl.sum(g * unit, 0)
        g = g * factor
        along = tl.sum(g * unit, 1)[:, None] / DIM
        tl.store(d_x + place, (inverse * (g - unit * along)).to(d_x.dtype.element_ty), mask=here)
    tl.store(d_weight + program * DIM + column, total, mask=column < DIM)
