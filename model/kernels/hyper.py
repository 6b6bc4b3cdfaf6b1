"""Triton kernels of mHC: the coefficients with their Sinkhorn iterations, collapse, and expand; see model/hyper.py for
the formulas.

The plain PyTorch functions launch about 1,300 small operations per layer. In this file, the coefficients take two
kernels (three in the backward pass), and collapse and expand take one kernel each. Tokens are the last axis of the
coefficients' tiles, so that one thread holds the whole n x n matrix of a token and a Sinkhorn step needs only
registers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.kernels.launch import launch, operator, padded

TOKENS = 128  # number of tokens per program in the kernels of the coefficients, one token for each thread
COLUMNS = 1024  # columns of one tile of collapse and expand

# Each matrix product runs on tensor cores as three TF32 products, whose total error is about that of fp32. A plain fp32
# product would take longer than reading the streams.
PRECISION = tl.constexpr("tf32x3")


def coefficients(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, hc_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the coefficients pre [T, n], post [T, n] and comb [T, n, n] of a HyperConnection with parameters fn, base
    and scale, from residual streams [T, n, d].
    """
    return _coefficients(streams.contiguous(), fn, base, scale, iters, hc_eps, eps)[:3]


@operator("mhc_coefficients")
def _coefficients(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, hc_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the coefficients pre, post and comb, and the tensors saved for the backward pass: mixes [(2+n)n, T], the
    inverse root mean squares [T], and the denominators of every Sinkhorn step [2*iters - 1, n, T]. With the
    denominators, the backward pass inverts the Sinkhorn steps starting from comb.
    """
    tokens, n, d = streams.shape
    rows = fn.shape[0]
    new: dict[str, Any] = {"dtype": torch.float32, "device": streams.device}
    pre, post, comb = torch.empty(tokens, n, **new), torch.empty(tokens, n, **new), torch.empty(tokens, n, n, **new)
    mixes, norm = torch.empty(rows, tokens, **new), torch.empty(tokens, **new)
    denominators = torch.empty(2 * iters - 1, n, tokens, **new)
    launch(
        _product_kernel,
        (triton.cdiv(tokens, 64),),
        *(streams, fn, mixes, norm, tokens, n * d, eps),
        ROWS=rows,
        ROWS_TILE=padded(rows, 16),
        TOKENS_TILE=64,
        WIDTH_TILE=64,
        num_warps=4,
        num_stages=3,
        flops=2.0 * tokens * rows * n * d,
    )
    launch(
        _coefficients_kernel,
        (triton.cdiv(tokens, TOKENS),),
        *(mixes, base, scale, pre, post, comb, denominators, tokens, hc_eps),
        STEPS=2 * iters - 1,
        N=n,
        N_TILE=padded(n),
        TOKENS_TILE=TOKENS,
        num_warps=4,
    )
    return pre, post, comb, mixes, norm, denominators


@operator("mhc_coefficients_backward")
def _coefficients_backward(
    d_pre: Tensor,
    d_post: Tensor,
    d_comb: Tensor,
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    comb: Tensor,
    mixes: Tensor,
    norm: Tensor,
    denominators: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of streams, fn, base and scale. Sums over tokens are computed in a fixed order."""
    tokens, n, d = streams.shape
    rows = fn.shape[0]
    new: dict[str, Any] = {"dtype": torch.float32, "device": streams.device}
    programs = triton.cdiv(tokens, TOKENS)
    d_product, along = torch.empty(rows, tokens, **new), torch.empty(tokens, **new)
    d_base, d_scale = torch.empty(programs, rows, **new), torch.empty(programs, 3, **new)
    launch(
        _coefficients_backward_kernel,
        (programs,),
        *(d_pre, d_post, d_comb, mixes, base, scale, comb, norm, denominators),
        *(d_product, along, d_base, d_scale, tokens, 1.0 / (n * d)),
        STEPS=denominators.shape[0],
        N=n,
        N_TILE=padded(n),
        TOKENS_TILE=TOKENS,
        num_warps=4,
    )
    d_streams, d_fn = torch.empty_like(streams), torch.empty_like(fn)
    launch(
        _product_backward_kernel,
        (triton.cdiv(n * d, 64),),
        *(streams, fn, d_product, along, d_streams, d_fn, tokens, n * d),
        ROWS=rows,
        ROWS_TILE=padded(rows, 16),
        TOKENS_TILE=32,
        WIDTH_TILE=64,
        num_warps=4,
        num_stages=3,
        flops=4.0 * tokens * rows * n * d,
    )
    return d_streams, d_fn, d_base.sum(0), d_scale.sum(0)


def _save_coefficients(ctx, inputs, output) -> None:
    streams, fn, base, scale, *_ = inputs
    ctx.save_for_backward(streams, fn, base, scale, *output[2:])
    ctx.shapes = output[0].shape
    ctx.mark_non_differentiable(*output[3:])
    ctx.set_materialize_grads(False)


def _differentiate_coefficients(ctx, d_pre, d_post, d_comb, *_):
    streams, fn, base, scale, comb, *rest = ctx.saved_tensors
    d_pre, d_post = (comb.new_zeros(ctx.shapes) if d is None else d.contiguous() for d in (d_pre, d_post))
    d_comb = torch.zeros_like(comb) if d_comb is None else d_comb.contiguous()
    found = _coefficients_backward(d_pre, d_post, d_comb, streams, fn, base, scale, comb, *rest)
    return *found, None, None, None


_coefficients.register_autograd(_differentiate_coefficients, setup_context=_save_coefficients)


def _tile(streams: Tensor) -> dict:
    """Returns the tile sizes of the kernels of collapse and expand: a tile has COLUMNS columns of one token, or all
    columns of several tokens if a token has fewer columns.
    """
    _, n, d = streams.shape
    columns = min(COLUMNS, padded(d))
    return {
        "N": n,
        "N_TILE": padded(n),
        "TOKENS_TILE": max(1, COLUMNS // columns),
        "COLUMNS": columns,
        "num_warps": 4,
    }


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Collapse the residual streams [T, n, d] with weights pre fp32 [T, n]: returns sum_i pre[:, i] * streams[:, i],
    [T, d] in the dtype of the streams.
    """
    return _collapse(streams.contiguous(), pre.contiguous())


@operator("mhc_collapse")
def _collapse(streams: Tensor, pre: Tensor) -> Tensor:
    tokens, n, d = streams.shape
    out = streams.new_empty(tokens, d)
    sizes = _tile(streams)
    launch(
        _collapse_kernel,
        (triton.cdiv(tokens, sizes["TOKENS_TILE"]), triton.cdiv(d, sizes["COLUMNS"])),
        *(streams, pre, out, tokens, d),
        **sizes,
        flops=2.0 * streams.numel(),
    )
    return out


@operator("mhc_collapse_backward")
def _collapse_backward(grad: Tensor, streams: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
    tokens, n, d = streams.shape
    d_streams, d_pre, sizes = torch.empty_like(streams), torch.empty_like(pre), _tile(streams)
    launch(
        _collapse_backward_kernel,
        (triton.cdiv(tokens, sizes["TOKENS_TILE"]),),
        *(grad, streams, pre, d_streams, d_pre, tokens, d),
        **sizes,
        flops=3.0 * streams.numel(),
    )
    return d_streams, d_pre


_collapse.register_autograd(
    lambda ctx, grad: _collapse_backward(grad.contiguous(), *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def expand(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Update the residual streams X [T, n, d] with a sublayer's output y [T, d]: X'[j] = post[j] * y + sum_i comb[i, j]
    * X[i].
    """
    return _expand(*(x.contiguous() for x in (streams, y, post, comb)))


@operator("mhc_expand")
def _expand(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    tokens, n, d = streams.shape
    out = torch.empty_like(streams)
    sizes = _tile(streams)
    launch(
        _expand_kernel,
        (triton.cdiv(tokens, sizes["TOKENS_TILE"]), triton.cdiv(d, sizes["COLUMNS"])),
        *(streams, y, post, comb, out, tokens, d),
        **sizes,
        flops=2.0 * streams.numel() * (n + 1),
    )
    return out


@operator("mhc_expand_backward")
def _expand_backward(
    grad: Tensor, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, n, d = streams.shape
    d_streams, d_y = torch.empty_like(streams), torch.empty_like(y)
    d_post, d_comb, sizes = torch.empty_like(post), torch.empty_like(comb), _tile(streams)
    launch(
        _expand_backward_kernel,
        (triton.cdiv(tokens, sizes["TOKENS_TILE"]),),
        *(grad, streams, y, post, comb, d_streams, d_y, d_post, d_comb, tokens, d),
        **(sizes | {"num_warps": 8}),
        flops=4.0 * streams.numel() * (n + 1),
    )
    return d_streams, d_y, d_post, d_comb


_expand.register_autograd(
    lambda ctx, grad: _expand_backward(grad.contiguous(), *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@triton.jit
def _product_kernel(
    flat,
    fn,
    mixes,
    norm,
    tokens,
    width,
    eps,
    ROWS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    TOKENS_TILE: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
):
    """Compute mixes = fn @ flat^T * norm with norm = rsqrt(mean(flat^2) + eps), reading the streams only once."""
    token = tl.program_id(0).to(tl.int64) * TOKENS_TILE + tl.arange(0, TOKENS_TILE)
    row, column = tl.arange(0, ROWS_TILE), tl.arange(0, WIDTH_TILE)
    total = tl.zeros([TOKENS_TILE, ROWS_TILE], tl.float32)
    squares = tl.zeros([TOKENS_TILE], tl.float32)
    for at in range(0, width, WIDTH_TILE):
        inside = at + column < width
        x = tl.load(
            flat + token[:, None] * width + (at + column)[None, :],
            mask=(token < tokens)[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        weight = tl.load(
            fn + row[None, :] * width + (at + column)[:, None],
            mask=(row < ROWS)[None, :] & inside[:, None],
            other=0.0,
        )
        total += tl.dot(x, weight, input_precision=PRECISION)
        squares += tl.sum(x * x, 1)
    scale = tl.rsqrt(squares / width + eps)
    tl.store(norm + token, scale, mask=token < tokens)
    place = row[None, :].to(tl.int64) * tokens + token[:, None]
    tl.store(mixes + place, total * scale[:, None], mask=(token < tokens)[:, None] & (row < ROWS)[None, :])


@triton.jit
def _product_backward_kernel(
    flat,
    fn,
    d_product,
    along,
    d_flat,
    d_fn,
    tokens,
    width,
    ROWS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    TOKENS_TILE: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
):
    """Compute d_flat = d_product^T @ fn - along * flat and d_fn = d_product @ flat. Each program handles WIDTH_TILE
    columns of all tokens.
    """
    column = tl.program_id(0).to(tl.int64) * WIDTH_TILE + tl.arange(0, WIDTH_TILE)
    row = tl.arange(0, ROWS_TILE)
    inside, real = column < width, row < ROWS
    weight_place = row[:, None] * width + column[None, :]
    weight = tl.load(fn + weight_place, mask=real[:, None] & inside[None, :], other=0.0)
    total = tl.zeros([ROWS_TILE, WIDTH_TILE], tl.float32)
    for at in range(0, tokens, TOKENS_TILE):
        token = at + tl.arange(0, TOKENS_TILE).to(tl.int64)
        here = token < tokens
        place = token[:, None] * width + column[None, :]
        x = tl.load(flat + place, mask=here[:, None] & inside[None, :], other=0.0).to(tl.float32)
        grad = tl.load(
            d_product + row[:, None].to(tl.int64) * tokens + token[None, :],
            mask=real[:, None] & here[None, :],
            other=0.0,
        )
        back = tl.load(along + token, mask=here, other=0.0)
        d_x = tl.dot(tl.trans(grad), weight, input_precision=PRECISION) - back[:, None] * x
        tl.store(d_flat + place, d_x.to(d_flat.dtype.element_ty), mask=here[:, None] & inside[None, :])
        total += tl.dot(grad, x, input_precision=PRECISION)
    tl.store(d_fn + weight_place, total, mask=real[:, None] & inside[None, :])


@triton.jit
def _sums(mixes, base, scale, first, token, tokens, N: tl.constexpr, N_TILE: tl.constexpr):
    """Load N rows of mixes, beginning at row `first`, and compute logits = mixes * scale + base. Returns mixes and
    logits, each [N_TILE, tokens].
    """
    row = tl.arange(0, N_TILE)[:, None]
    here = (row < N) & (token < tokens)[None, :]
    mix = tl.load(mixes + (first + row).to(tl.int64) * tokens + token[None, :], mask=here, other=0.0)
    return mix, mix * tl.load(scale) + tl.load(base + first + row, mask=row < N, other=0.0)


@triton.jit
def _softmax(mixes, base, scale, token, tokens, N: tl.constexpr, N_TILE: tl.constexpr):
    """Returns mixes, and the softmax of logits over the target axis. Each result is [source, target, tokens], and is
    zero at padding.
    """
    source, target = tl.arange(0, N_TILE)[:, None, None], tl.arange(0, N_TILE)[None, :, None]
    row = 2 * N + source * N + target
    real = (source < N) & (target < N)
    mix = tl.load(
        mixes + row.to(tl.int64) * tokens + token[None, None, :],
        mask=real & (token < tokens)[None, None, :],
        other=0.0,
    )
    logits = mix * tl.load(scale + 2) + tl.load(base + row, mask=real, other=0.0)
    logits = tl.where(target < N, logits, float("-inf"))
    powers = tl.exp(logits - tl.max(logits, 1)[:, None, :])
    return mix, tl.where(real, powers / tl.sum(powers, 1)[:, None, :], 0.0)


@triton.jit
def _coefficients_kernel(
    mixes,
    base,
    scale,
    pre,
    post,
    comb,
    denominators,
    tokens,
    hc_eps,
    STEPS: tl.constexpr,
    N: tl.constexpr,
    N_TILE: tl.constexpr,
    TOKENS_TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS_TILE + tl.arange(0, TOKENS_TILE)
    stream = tl.arange(0, N_TILE)
    here = (stream < N)[:, None] & (token < tokens)[None, :]
    place = token[None, :] * N + stream[:, None]
    _, logits = _sums(mixes, base, scale, 0, token, tokens, N, N_TILE)
    tl.store(pre + place, tl.sigmoid(logits) + hc_eps, mask=here)
    _, logits = _sums(mixes, base, scale + 1, N, token, tokens, N, N_TILE)
    tl.store(post + place, 2 * tl.sigmoid(logits), mask=here)
    _, soft = _softmax(mixes, base, scale, token, tokens, N, N_TILE)
    real = (stream < N)[:, None, None] & (stream < N)[None, :, None]
    m = tl.where(real, soft + hc_eps, 0.0)
    step_place = denominators + stream[:, None].to(tl.int64) * tokens + token[None, :]
    total = tl.sum(m, 0) + hc_eps
    tl.store(step_place, total, mask=here)
    m = m / total[None, :, :]
    for _ in range(1, STEPS, 2):
        step_place += tl.cast(tokens, tl.int64) * N
        total = tl.sum(m, 1) + hc_eps
        tl.store(step_place, total, mask=here)
        m = m / total[:, None, :]
        step_place += tl.cast(tokens, tl.int64) * N
        total = tl.sum(m, 0) + hc_eps
        tl.store(step_place, total, mask=here)
        m = m / total[None, :, :]
    pair = (stream[:, None] * N + stream[None, :])[:, :, None]
    tl.store(comb + token[None, None, :] * (N * N) + pair, m, mask=real & (token < tokens)[None, None, :])


@triton.jit
def _coefficients_backward_kernel(
    d_pre,
    d_post,
    d_comb,
    mixes,
    base,
    scale,
    comb,
    norm,
    denominators,
    d_product,
    along,
    d_base,
    d_scale,
    tokens,
    inverse_width,
    STEPS: tl.constexpr,
    N: tl.constexpr,
    N_TILE: tl.constexpr,
    TOKENS_TILE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    token = program * TOKENS_TILE + tl.arange(0, TOKENS_TILE)
    stream = tl.arange(0, N_TILE)
    row = stream[:, None]
    known = token < tokens
    here = (row < N) & known[None, :]
    place = token[None, :] * N + row
    scale_here = tl.load(norm + token, mask=known, other=0.0)
    d_base += program * ((2 + N) * N)
    d_scale += program * 3

    # pre and post
    radial = tl.zeros([TOKENS_TILE], tl.float32)
    for part in tl.static_range(2):
        mix, logits = _sums(mixes, base, scale + part, part * N, token, tokens, N, N_TILE)
        s = tl.sigmoid(logits)
        grad = tl.load((d_post if part else d_pre) + place, mask=here, other=0.0) * (s * (1 - s)) * (1 + part)
        tl.store(d_base + part * N + stream, tl.sum(grad, 1), mask=stream < N)
        tl.store(d_scale + part, tl.sum(tl.sum(grad * mix, 1), 0))
        d_mix = grad * tl.load(scale + part)
        radial += tl.sum(d_mix * mix, 0)
        tl.store(
            d_product + (part * N + row).to(tl.int64) * tokens + token[None, :], d_mix * scale_here[None, :], mask=here
        )

    # comb: invert the Sinkhorn steps, last step first; the matrix before a step is the matrix after it times the
    # denominators
    real = (stream < N)[:, None, None] & (stream < N)[None, :, None]
    here3 = real & known[None, None, :]
    pair = (stream[:, None] * N + stream[None, :])[:, :, None]
    grad = tl.load(d_comb + token[None, None, :] * (N * N) + pair, mask=here3, other=0.0)
    m = tl.load(comb + token[None, None, :] * (N * N) + pair, mask=here3, other=0.0)
    mix, soft = _softmax(mixes, base, scale, token, tokens, N, N_TILE)
    stride = tl.cast(tokens, tl.int64) * N
    step_place = denominators + (STEPS - 1) * stride + row.to(tl.int64) * tokens + token[None, :]
    for _ in range(1, STEPS, 2):
        total = tl.load(step_place, mask=here, other=1.0)
        grad = (grad - tl.sum(grad * m, 0)[None, :, :]) / total[None, :, :]
        m = m * total[None, :, :]
        step_place -= stride
        total = tl.load(step_place, mask=here, other=1.0)
        grad = (grad - tl.sum(grad * m, 1)[:, None, :]) / total[:, None, :]
        m = m * total[:, None, :]
        step_place -= stride
    total = tl.load(step_place, mask=here, other=1.0)
    grad = (grad - tl.sum(grad * m, 0)[None, :, :]) / total[None, :, :]
    grad = soft * (grad - tl.sum(grad * soft, 1)[:, None, :])

    tl.store(d_base + 2 * N + stream[:, None] * N + stream[None, :], tl.sum(grad, 2), mask=row < N)
    tl.store(d_scale + 2, tl.sum(tl.sum(tl.sum(grad * mix, 2), 1), 0))
    d_mix = grad * tl.load(scale + 2)
    radial += tl.sum(tl.sum(d_mix * mix, 1), 0)
    place3 = (2 * N + pair).to(tl.int64) * tokens + token[None, None, :]
    tl.store(d_product + place3, d_mix * scale_here[None, None, :], mask=here3)
    tl.store(along + token, radial * scale_here * scale_here * inverse_width, mask=known)


@triton.jit
def _collapse_kernel(
    streams,
    pre,
    out,
    tokens,
    d,
    N: tl.constexpr,
    N_TILE: tl.constexpr,
    TOKENS_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token, number, column = _place(TOKENS_TILE, N_TILE)
    column += tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    known = (token < tokens) & (number < N)
    x = tl.load(streams + (token * N + number) * d + column, mask=known & (column < d), other=0.0).to(tl.float32)
    total = tl.sum(x * tl.load(pre + token * N + number, mask=known, other=0.0), 1, keep_dims=True)
    tl.store(out + token * d + column, total.to(out.dtype.element_ty), mask=(token < tokens) & (column < d))


@triton.jit
def _place(TOKENS_TILE: tl.constexpr, N_TILE: tl.constexpr):
    """Returns the indices of a tile [tokens, streams, columns]: the int64 token indices [TOKENS_TILE, 1, 1], the stream
    indices [1, N_TILE, 1], and a zero [1, 1, 1], which is the index of the first column.
    """
    token = tl.program_id(0).to(tl.int64) * TOKENS_TILE + tl.arange(0, TOKENS_TILE)[:, None, None]
    return token, tl.arange(0, N_TILE)[None, :, None], tl.zeros([1, 1, 1], tl.int32)


@triton.jit
def _collapse_backward_kernel(
    grad,
    streams,
    pre,
    d_streams,
    d_pre,
    tokens,
    d,
    N: tl.constexpr,
    N_TILE: tl.constexpr,
    TOKENS_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token, number, zero = _place(TOKENS_TILE, N_TILE)
    known = (token < tokens) & (number < N)
    weight = tl.load(pre + token * N + number, mask=known, other=0.0)
    total = tl.zeros([TOKENS_TILE, N_TILE, 1], tl.float32)
    for at in range(0, d, COLUMNS):
        column = zero + at + tl.arange(0, COLUMNS)[None, None, :]
        here, place = known & (column < d), (token * N + number) * d + column
        g = tl.load(grad + token * d + column, mask=(token < tokens) & (column < d), other=0.0).to(tl.float32)
        x = tl.load(streams + place, mask=here, other=0.0).to(tl.float32)
        total += tl.sum(x * g, 2, keep_dims=True)
        tl.store(d_streams + place, (g * weight).to(d_streams.dtype.element_ty), mask=here)
    tl.store(d_pre + token * N + number, total, mask=known)


@triton.jit
def _expand_kernel(
    streams,
    y,
    post,
    comb,
    out,
    tokens,
    d,
    N: tl.constexpr,
    N_TILE: tl.constexpr,
    TOKENS_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token, number, column = _place(TOKENS_TILE, N_TILE)
    column += tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    real = token < tokens
    known, inside = real & (number < N), real & (column < d)
    x = tl.load(streams + (token * N + number) * d + column, mask=known & inside, other=0.0).to(tl.float32)
    new = tl.load(y + token * d + column, mask=inside, other=0.0).to(tl.float32)
    for target in tl.static_range(N):
        weight = tl.load(comb + (token * N + number) * N + target, mask=known, other=0.0)
        total = tl.sum(x * weight, 1, keep_dims=True)
        total += new * tl.load(post + token * N + target, mask=real, other=0.0)
        tl.store(out + (token * N + target) * d + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _expand_backward_kernel(
    grad,
    streams,
    y,
    post,
    comb,
    d_streams,
    d_y,
    d_post,
    d_comb,
    tokens,
    d,
    N: tl.constexpr,
    N_TILE: tl.constexpr,
    TOKENS_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token, number, zero = _place(TOKENS_TILE, N_TILE)
    target_number = tl.trans(number, 0, 2, 1)  # [1, 1, N_TILE]
    real = token < tokens
    known = real & (number < N)
    sum_post = tl.zeros([TOKENS_TILE, 1, N_TILE], tl.float32)
    sum_comb = tl.zeros([TOKENS_TILE, N_TILE, N_TILE], tl.float32)  # [., source, target]
    for at in range(0, d, COLUMNS):
        column = zero + at + tl.arange(0, COLUMNS)[None, None, :]
        inside, place = real & (column < d), (token * N + number) * d + column
        x = tl.load(streams + place, mask=known & inside, other=0.0).to(tl.float32)
        new = tl.load(y + token * d + column, mask=inside, other=0.0).to(tl.float32)
        d_x = tl.zeros([TOKENS_TILE, N_TILE, COLUMNS], tl.float32)
        d_new = tl.zeros([TOKENS_TILE, 1, COLUMNS], tl.float32)
        for target in tl.static_range(N):
            g = tl.load(grad + (token * N + target) * d + column, mask=inside, other=0.0).to(tl.float32)
            d_x += g * tl.load(comb + (token * N + number) * N + target, mask=known, other=0.0)
            d_new += g * tl.load(post + token * N + target, mask=real, other=0.0)
            chosen = target_number == target
            sum_post += tl.where(chosen, tl.sum(g * new, 2, keep_dims=True), 0.0)
            sum_comb += tl.where(chosen, tl.sum(x * g, 2, keep_dims=True), 0.0)
        tl.store(d_streams + place, d_x.to(d_streams.dtype.element_ty), mask=known & inside)
        tl.store(d_y + token * d + column, d_new.to(d_y.dtype.element_ty), mask=inside)
    tl.store(d_post + token * N + target_number, sum_post, mask=real & (target_number < N))
    place = (token * N + number) * N + target_number
    tl.store(d_comb + place, sum_comb, mask=known & (target_number < N))
