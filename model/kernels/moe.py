"""A Triton kernel for the clamped SwiGLU of the MoE experts; see model/moe.py for the formula."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.kernels.launch import launch, operator, padded

ELEMENTS = 1024  # elements of one tile


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    """Compute silu(min(gate, limit)) * clamp(up, -limit, limit) [* weights[:, None]] for rows [R, f], in the dtype of
    gate.
    """
    return _swiglu(gate.contiguous(), up.contiguous(), weights, limit)


@operator("clamped_swiglu")
def _swiglu(gate: Tensor, up: Tensor, weights: Tensor | None, limit: float) -> Tensor:
    out = torch.empty_like(gate)
    sizes = _sizes(gate, weights)
    launch(_swiglu_kernel, _grid(gate, sizes), *(gate, up, weights, out, limit, len(gate)), **sizes)
    return out


@operator("clamped_swiglu_backward")
def _swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, weights: Tensor | None, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of gate, up and weights; the gradient of weights is empty if there are no weights."""
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    d_weights = gate.new_empty(0) if weights is None else torch.empty_like(weights)
    tensors = (grad, gate, up, weights, d_gate, d_up, d_weights)
    sizes = _sizes(gate, weights)
    launch(_swiglu_backward_kernel, _grid(gate, sizes), *tensors, limit, len(gate), **sizes)
    return d_gate, d_up, d_weights


def _sizes(gate: Tensor, weights: Tensor | None) -> dict:
    width = gate.shape[1]
    columns = min(ELEMENTS, padded(width))
    tile = {"WIDTH": width, "COLUMNS": columns, "ROWS_TILE": ELEMENTS // columns}
    return tile | {"WEIGHTED": weights is not None, "num_warps": 4}


def _grid(gate: Tensor, sizes: dict) -> tuple[int]:
    return (triton.cdiv(len(gate), sizes["ROWS_TILE"]),)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.limit = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad: Tensor):
    d_gate, d_up, d_weights = _swiglu_backward(grad.contiguous(), *ctx.saved_tensors, ctx.limit)
    return d_gate, d_up, d_weights if d_weights.numel() or not len(d_gate) else None, None


_swiglu.register_autograd(_differentiate, setup_context=_save)


@triton.jit
def _clamped(gate, up, place, here, limit):
    """Returns the clamped gate, its sigmoid and the clamped up, all fp32, and two masks of the elements of gate and of
    up that are within the limits. NaN stays NaN.
    """
    g = tl.load(gate + place, mask=here, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=here, other=0.0).to(tl.float32)
    gate_inside, up_inside = g <= limit, tl.abs(u) <= limit
    g = tl.where(g > limit, limit, g)
    u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    return g, tl.sigmoid(g), u, gate_inside, up_inside


@triton.jit
def _swiglu_kernel(
    gate,
    up,
    weights,
    out,
    limit,
    rows,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS_TILE + tl.arange(0, ROWS_TILE)[:, None]
    for at in range(0, WIDTH, COLUMNS):
        column = at + tl.arange(0, COLUMNS)[None, :]
        here, place = (row < rows) & (column < WIDTH), row * WIDTH + column
        g, sigmoid, u, _, _ = _clamped(gate, up, place, here, limit)
        value = g * sigmoid * u
        if WEIGHTED:
            value *= tl.load(weights + row, mask=row < rows, other=0.0)
        tl.store(out + place, value.to(out.dtype.element_ty), mask=here)


@triton.jit
def _swiglu_backward_kernel(
    grad,
    gate,
    up,
    weights,
    d_gate,
    d_up,
    d_weights,
    limit,
    rows,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS_TILE + tl.arange(0, ROWS_TILE)[:, None]
    total = tl.zeros([ROWS_TILE, 1], tl.float32)
    for at in range(0, WIDTH, COLUMNS):
        column = at + tl.arange(0, COLUMNS)[None, :]
        here, place = (row < rows) & (column < WIDTH), row * WIDTH + column
        g, sigmoid, u, gate_inside, up_inside = _clamped(gate, up, place, here, limit)
        upstream = tl.load(grad + place, mask=here, other=0.0).to(tl.float32)
        if WEIGHTED:
            total += tl.sum(upstream * g * sigmoid * u, 1, keep_dims=True)
            upstream *= tl.load(weights + row, mask=row < rows, other=0.0)
        by_gate = tl.where(gate_inside, upstream * u * sigmoid * (1 + g * (1 - sigmoid)), 0.0)
        by_up = tl.where(up_inside, upstream * g * sigmoid, 0.0)
        tl.store(d_gate + place, by_gate.to(d_gate.dtype.element_ty), mask=here)
        tl.store(d_up + place, by_up.to(d_up.dtype.element_ty), mask=here)
    if WEIGHTED:
        tl.store(d_weights + row, total, mask=row < rows)
