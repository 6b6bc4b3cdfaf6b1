"""Engram's gate in Triton: adds the gated, looked-up values to the residual streams; see model/engram.py for the
formulas.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.kernels.launch import launch, operator, padded

COLUMNS = 1024  # columns of one tile of a token's streams


def add_gated(streams: Tensor, memory: Tensor, weight: Tensor, image: Tensor | None, eps: float) -> Tensor:
    """Add to each residual stream (streams [T, n, d]) the value memory[:, n] times the gate of the stream. The gate
    depends on the normalised dot product of the stream and its key.

    memory [T, n + 1, d] holds n keys and then the value; weight is fp32 [n, d]; image bool [T] marks the tokens whose
    gate is 0.
    """
    return _add_gated(streams.contiguous(), memory.contiguous(), weight, image, eps)


@operator("engram_gate")
def _add_gated(streams: Tensor, memory: Tensor, weight: Tensor, image: Tensor | None, eps: float) -> Tensor:
    out = torch.empty_like(streams)
    launch(_gate_kernel, (len(streams),), *(streams, memory, weight, image, out, eps), **_sizes(streams, image))
    return out


@operator("engram_gate_backward")
def _add_gated_backward(
    grad: Tensor, streams: Tensor, memory: Tensor, weight: Tensor, image: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of streams, memory and weight. The gradient of weight is summed over tokens in a fixed
    order.
    """
    tokens, n, d = streams.shape
    d_streams, d_memory, d_weight = torch.empty_like(streams), torch.empty_like(memory), torch.empty_like(weight)
    d_dot = torch.empty(tokens, n, dtype=torch.float32, device=streams.device)
    tensors = (grad, streams, memory, weight, image, d_streams, d_memory, d_dot)
    launch(_gate_backward_kernel, (tokens,), *tensors, eps, **_sizes(streams, image))
    launch(
        _weight_backward_kernel,
        (n * triton.cdiv(d, 64),),
        *(streams, memory, d_dot, d_weight, tokens),
        N=n,
        DIM=d,
        TOKENS_TILE=32,
        COLUMNS=64,
        num_warps=4,
    )
    return d_streams, d_memory, d_weight


def _sizes(streams: Tensor, image: Tensor | None) -> dict:
    _, n, d = streams.shape
    columns = min(COLUMNS, padded(d))
    return {"N": n, "N_TILE": padded(n), "DIM": d, "COLUMNS": columns, "IMAGES": image is not None, "num_warps": 8}


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


_add_gated.register_autograd(
    lambda ctx, grad: (*_add_gated_backward(grad.contiguous(), *ctx.saved_tensors, ctx.eps), None, None),
    setup_context=_save,
)


@triton.jit
def _tile(rows, token, at, count, N_TILE: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a tile fp32 [N_TILE, COLUMNS] of a token that has STRIDE rows: the first `count` rows, beginning at column
    `at`. The rest of the tile is zero.
    """
    number, column = tl.arange(0, N_TILE)[:, None], at + tl.arange(0, COLUMNS)[None, :]
    here = (number < count) & (column < DIM)
    return tl.load(rows + token * (STRIDE * DIM) + number * DIM + column, mask=here, other=0.0).to(tl.float32)


@triton.jit
def _agreement(
    streams, memory, weight, token, eps, N: tl.constexpr, N_TILE: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr
):
    """Returns three tensors [N_TILE]: the normalised dot products of a token's streams and keys, the inverse root mean
    squares of the streams, and the inverse root mean squares of the keys.
    """
    dot = tl.zeros([N_TILE], tl.float32)
    squares = tl.zeros([N_TILE], tl.float32)
    key_squares = tl.zeros([N_TILE], tl.float32)
    for at in range(0, DIM, COLUMNS):
        x = _tile(streams, token, at, N, N_TILE, N, DIM, COLUMNS)
        key = _tile(memory, token, at, N, N_TILE, N + 1, DIM, COLUMNS)
        dot += tl.sum(x * _tile(weight, token * 0, at, N, N_TILE, N, DIM, COLUMNS) * key, 1)
        squares += tl.sum(x * x, 1)
        key_squares += tl.sum(key * key, 1)
    norm, key_norm = tl.rsqrt(squares / DIM + eps), tl.rsqrt(key_squares / DIM + eps)
    return dot * (1.0 / tl.sqrt(DIM * 1.0)) * norm * key_norm, norm, key_norm


@triton.jit
def _gate(s, image, token, IMAGES: tl.constexpr):
    """Returns the gate for a normalised dot product s: sigmoid(sign(s) * sqrt(max(|s|, 1e-6))), or 0 for image tokens.
    The gates of all streams of a token are computed together.
    """
    sign = tl.where(s > 0, 1.0, tl.where(s < 0, -1.0, 0.0))
    gate = tl.sigmoid(sign * tl.sqrt(tl.maximum(tl.abs(s), 1e-6)))
    if IMAGES:
        gate = tl.where(tl.load(image + token) != 0, 0.0, gate)
    return gate


@triton.jit
def _gate_kernel(
    streams,
    memory,
    weight,
    image,
    out,
    eps,
    N: tl.constexpr,
    N_TILE: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    IMAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    s, _, _ = _agreement(streams, memory, weight, token, eps, N, N_TILE, DIM, COLUMNS)
    gate = _gate(s, image, token, IMAGES)
    number = tl.arange(0, N_TILE)[:, None]
    for at in range(0, DIM, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        value = tl.load(memory + (token * (N + 1) + N) * DIM + column, mask=column < DIM, other=0.0).to(tl.float32)
        added = (gate[:, None] * value[None, :]).to(out.dtype.element_ty).to(tl.float32)
        x = _tile(streams, token, at, N, N_TILE, N, DIM, COLUMNS)
        here = (number < N) & (column < DIM)[None, :]
        place = token * (N * DIM) + number * DIM + column[None, :]
        tl.store(out + place, (x + added).to(out.dtype.element_ty), mask=here)


@triton.jit
def _gate_backward_kernel(
    grad,
    streams,
    memory,
    weight,
    image,
    d_streams,
    d_memory,
    d_dot,
    eps,
    N: tl.constexpr,
    N_TILE: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    IMAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    s, norm, key_norm = _agreement(streams, memory, weight, token, eps, N, N_TILE, DIM, COLUMNS)
    gate = _gate(s, image, token, IMAGES)
    number = tl.arange(0, N_TILE)
    by_value = tl.zeros([N_TILE], tl.float32)
    for at in range(0, DIM, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        value = tl.load(memory + (token * (N + 1) + N) * DIM + column, mask=column < DIM, other=0.0).to(tl.float32)
        by_value += tl.sum(_tile(grad, token, at, N, N_TILE, N, DIM, COLUMNS) * value[None, :], 1)
    # a gate of 0 has gate * (1 - gate) = 0, and a gate whose |s| was raised to 1e-6 does not depend on s
    size = tl.abs(s)
    d_s = tl.where(size >= 1e-6, by_value * gate * (1 - gate) * 0.5 * tl.rsqrt(tl.maximum(size, 1e-6)), 0.0)
    product = d_s * norm * key_norm * (1.0 / tl.sqrt(DIM * 1.0))
    along, key_along = d_s * s * norm * norm / DIM, d_s * s * key_norm * key_norm / DIM
    tl.store(d_dot + token * N + number, product, mask=number < N)
    for at in range(0, DIM, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        here = (number < N)[:, None] & (column < DIM)[None, :]
        x = _tile(streams, token, at, N, N_TILE, N, DIM, COLUMNS)
        key = _tile(memory, token, at, N, N_TILE, N + 1, DIM, COLUMNS)
        g = _tile(grad, token, at, N, N_TILE, N, DIM, COLUMNS)
        scaled = product[:, None] * _tile(weight, token * 0, at, N, N_TILE, N, DIM, COLUMNS)
        place = number[:, None] * DIM + column[None, :]
        d_x = g + scaled * key - along[:, None] * x
        tl.store(d_streams + token * (N * DIM) + place, d_x.to(d_streams.dtype.element_ty), mask=here)
        d_key = scaled * x - key_along[:, None] * key
        tl.store(d_memory + token * ((N + 1) * DIM) + place, d_key.to(d_memory.dtype.element_ty), mask=here)
        d_value = tl.sum(gate[:, None] * g, 0)
        place = (token * (N + 1) + N) * DIM + column
        tl.store(d_memory + place, d_value.to(d_memory.dtype.element_ty), mask=column < DIM)


@triton.jit
def _weight_backward_kernel(
    streams,
    memory,
    d_dot,
    d_weight,
    tokens,
    N: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradient of COLUMNS columns of one stream's weight, summed over all tokens."""
    program = tl.program_id(0).to(tl.int64)
    stream, column = program % N, program // N * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for at in range(0, tokens, TOKENS_TILE):
        token = at + tl.arange(0, TOKENS_TILE).to(tl.int64)
        here = (token < tokens)[:, None] & (column < DIM)[None, :]
        factor = tl.load(d_dot + token * N + stream, mask=token < tokens, other=0.0)[:, None]
        x = tl.load(streams + (token * N + stream)[:, None] * DIM + column[None, :], mask=here, other=0.0)
        key = tl.load(memory + (token * (N + 1) + stream)[:, None] * DIM + column[None, :], mask=here, other=0.0)
        total += tl.sum(factor * x.to(tl.float32) * key.to(tl.float32), 0)
    tl.store(d_weight + stream * DIM + column, total, mask=column < DIM)
