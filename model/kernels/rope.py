"""A Triton kernel that applies RoPE (`rotate` of model/rope.py) and then one of the fake quantisers of
model/quantize.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.kernels.launch import launch, operator, padded
from model.kernels.rounding import fake_round, narrow, widen

ELEMENTS = 2048  # elements of one program's tile


def rotate(x: Tensor, phasors: Tensor | None, inverse: bool = False, rounding: str = "none") -> Tensor:
    """Rotate the last channels of x [T, ..., D] by phasors fp32 [T, rope/2, 2] (None: no rotation), then round to the
    format `rounding` (none, fp8, mxfp4, fp4). The backward pass treats the rounding as the identity.
    """
    return _rotate(x.contiguous(), phasors, inverse, rounding)


@operator("rotate_and_round")
def _rotate(x: Tensor, phasors: Tensor | None, inverse: bool, rounding: str) -> Tensor:
    width = x.shape[-1]
    rows = x.numel() // width
    out = torch.empty_like(x)
    tile = padded(width, 32)
    rows_tile = max(1, ELEMENTS // tile)
    launch(
        _rotate_kernel,
        (triton.cdiv(rows, rows_tile),),
        *(x, phasors, out, rows, max(1, rows // x.shape[0]) if len(x) else 1),
        WIDTH=width,
        ROTATED=0 if phasors is None else 2 * phasors.shape[1],
        INVERSE=inverse,
        FORMAT=rounding,
        ROWS_TILE=rows_tile,
        WIDTH_TILE=tile,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def _save(ctx, inputs, output) -> None:
    _, phasors, ctx.inverse, _ = inputs
    ctx.save_for_backward(phasors)


def _differentiate(ctx, grad: Tensor):
    (phasors,) = ctx.saved_tensors
    if phasors is not None:
        grad = _rotate(grad.contiguous(), phasors, not ctx.inverse, "none")
    return grad, None, None, None


_rotate.register_autograd(_differentiate, setup_context=_save)


@triton.jit
def _rotate_kernel(
    x,
    phasors,
    out,
    rows,
    rows_of_token,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    INVERSE: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS_TILE + tl.arange(0, ROWS_TILE)
    column = tl.arange(0, WIDTH_TILE)[None, :]
    here = (row < rows)[:, None] & (column < WIDTH)
    place = row[:, None] * WIDTH + column
    value = widen(tl.load(x + place, mask=here, other=0.0))
    if ROTATED:
        channel = column - (WIDTH - ROTATED)
        turns = here & (channel >= 0)
        partner = row[:, None] * WIDTH + (WIDTH - ROTATED) + (channel ^ 1)
        other = widen(tl.load(x + partner, mask=turns, other=0.0))
        angle = phasors + (row // rows_of_token)[:, None] * ROTATED + (channel // 2) * 2
        cosine = tl.load(angle, mask=turns, other=1.0)
        sine = tl.load(angle + 1, mask=turns, other=0.0)
        if INVERSE:
            sine = -sine
        sine = tl.where(channel % 2 == 0, -sine, sine)
        turned = value * cosine + other * sine
        value = tl.where(turns, widen(narrow(turned, out.dtype.element_ty)), value)
    if FORMAT != "none":
        value = fake_round(value, FORMAT, ROWS_TILE, WIDTH_TILE)
    tl.store(out + place, narrow(value, out.dtype.element_ty), mask=here)
