"""Triton kernels of attention over a sliding window and selected entries; see model/sparse.py for the formulas.

Each program handles one query with all its heads, and loads tiles of window keys and of selected entries by their row
numbers. No input is padded or copied, and the backward pass recomputes the attention probabilities.

The backward pass has three kernels, which each recompute the probabilities, because a single kernel for all gradients
would need more registers than a GPU has. The first kernel computes the gradients of queries. The second kernel computes
the gradients of window keys: a program takes a block of keys and iterates over the queries that see them, so that only
one program writes each gradient. The third kernel computes the gradients of selected entries. Many queries can select
the same entry, so the gradient of an entry is summed with fp32 atomics in no fixed order. Under
`torch.use_deterministic_algorithms`, the gradients are instead written out for a chunk of queries at a time and summed
in the order of the queries.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.kernels.launch import launch, operator, padded
from model.kernels.sums import DETERMINISTIC_BYTES, add_in_order

LOG2E = tl.constexpr(1.4426950408889634)
# The size of a tile of keys in bytes, and the maximum size of one query's heads in bytes.
TILE_BYTES = 2**16


def sparse_attention(
    q: Tensor,
    window_kv: Tensor,
    window_start: Tensor,
    entries: Tensor | None,
    topk_indices: Tensor | None,
    sink: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor | None]:
    """Compute the results of `model.sparse.sparse_attention`, which has the same arguments."""
    if topk_indices is None:
        entries, topk_indices = window_kv.new_empty(0, window_kv.shape[1]), window_start.new_empty(0, dtype=torch.int32)
        topk_indices = topk_indices.expand(len(q), 0)
    tensors = (q, window_kv, window_start, entries, topk_indices, sink)
    out, mass, _ = _attention(*(x.contiguous() for x in tensors), scale, window)
    return out, (mass if topk_indices.shape[1] else None)


@operator("sparse_attention")
def _attention(
    q: Tensor,
    window_kv: Tensor,
    window_start: Tensor,
    entries: Tensor,
    topk_indices: Tensor,
    sink: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output, the attention mass on each selected entry fp32 [T, K], and the base-2 logarithms of the
    softmax denominators fp32 [T, H].
    """
    tokens, heads, dim = q.shape
    selected = topk_indices.shape[1]
    out, lse = torch.empty_like(q), torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    mass = torch.empty(tokens, selected, dtype=torch.float32, device=q.device)
    launch(
        _forward_kernel,
        (tokens,),
        *(q, window_kv, window_start, entries, topk_indices, sink, out, mass, lse, scale, len(window_kv) - tokens),
        **_sizes(q),
        **_selection(selected),
        num_stages=2,
        flops=2.0 * tokens * heads * dim * (2 * window + 3 * selected),
    )
    return out, mass, lse


@operator("sparse_attention_backward")
def _attention_backward(
    d_out: Tensor,
    q: Tensor,
    window_kv: Tensor,
    window_start: Tensor,
    entries: Tensor,
    topk_indices: Tensor,
    sink: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, window_kv, entries and sink."""
    tokens, heads, dim = q.shape
    selected = topk_indices.shape[1]
    d_q, d_window = torch.empty_like(q), torch.empty_like(window_kv)
    delta, d_sink = torch.empty_like(lse), torch.empty_like(lse)
    launch(
        _query_backward_kernel,
        (tokens,),
        *(d_out, q, window_kv, window_start, entries, topk_indices, sink, out, lse, d_q, delta, d_sink, scale),
        len(window_kv) - tokens,
        **_sizes(q),
        **_selection(selected),
        num_stages=1,
        flops=6.0 * tokens * heads * dim * (window + selected),
    )
    launch(
        _window_backward_kernel,
        (triton.cdiv(len(window_kv), _keys_tile(q)),),
        *(d_out, q, window_kv, window_start, lse, delta, d_window, scale, tokens, window, len(window_kv) - tokens),
        **_sizes(q),
        num_stages=1,
        flops=8.0 * tokens * heads * dim * (window + _keys_tile(q) - 1),
    )
    d_entries = q.new_zeros(len(entries) + 1, dim, dtype=torch.float32)  # the last row is for empty selections
    step = max(1, DETERMINISTIC_BYTES // (4 * dim * max(1, selected))) if deterministic else tokens
    for start in range(0, tokens if selected else 0, step):
        rows = min(step, tokens - start)
        target = q.new_empty(rows, selected, dim, dtype=torch.float32) if deterministic else d_entries
        launch(
            _entry_backward_kernel,
            (rows,),
            *(d_out, q, entries, topk_indices, lse, delta, target, scale, start, len(entries)),
            **_sizes(q, parts=4),
            **_selection(selected),
            ATOMIC=not deterministic,
            num_stages=1,
            flops=8.0 * rows * heads * dim * selected,
        )
        if deterministic:
            add_in_order(d_entries[:-1], target, topk_indices[start : start + rows])
    return d_q, d_window, d_entries[:-1].to(entries.dtype), d_sink.sum(0)


def supports(q: Tensor) -> bool:
    """Returns whether all heads of a query and their gradients fit into shared memory together. For example, 64 heads
    of dimension 512 fit into shared memory with 16-bit values, but not with fp32 values.
    """
    _, heads, dim = q.shape
    return padded(heads, 16) * padded(dim, 16) * q.element_size() <= TILE_BYTES


def _sizes(q: Tensor, parts: int = 0) -> dict:
    """Returns the tile sizes of the kernels. With `parts`, each row is split into `parts` tiles, each of at least 16
    channels.
    """
    _, heads, dim = q.shape
    tile = padded(dim, 16)
    parts = min(parts, tile // 16)
    columns = {"PARTS": parts, "PART": tile // parts} if parts else {"DIM_TILE": tile}
    shape = {"HEADS": heads, "HEADS_TILE": padded(heads, 16), "DIM": dim, "KEYS_TILE": _keys_tile(q)}
    return shape | columns | {"num_warps": 8}


def _keys_tile(q: Tensor) -> int:
    return min(64, TILE_BYTES // (padded(q.shape[2], 16) * q.element_size()))


def _selection(selected: int) -> dict:
    return {"SELECTED": selected, "SELECTED_TILE": padded(selected)}


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    out, mass, lse = output
    ctx.save_for_backward(*tensors, out, lse)
    ctx.mark_non_differentiable(mass, lse)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_out: Tensor, *_):
    q, window_kv, window_start, entries, topk_indices, sink, out, lse = ctx.saved_tensors
    d_q, d_window, d_entries, d_sink = _attention_backward(
        d_out.contiguous(),
        *(q, window_kv, window_start, entries, topk_indices, sink, out, lse),
        *(ctx.scale, ctx.window, torch.are_deterministic_algorithms_enabled()),
    )
    return d_q, d_window, None, d_entries, None, d_sink.to(sink.dtype), None, None


_attention.register_autograd(_differentiate, setup_context=_save)


@triton.jit
def _load_rows(rows, place, seen, DIM: tl.constexpr, DIM_TILE: tl.constexpr):
    """Load a tile [len(place), DIM_TILE]: row i is row place[i] (int64) of the tensor, or zero if seen[i] is false."""
    channel = tl.arange(0, DIM_TILE)[None, :]
    return tl.load(rows + place[:, None] * DIM + channel, mask=seen[:, None] & (channel < DIM), other=0.0)


@triton.jit
def _last(indices, SELECTED: tl.constexpr, SELECTED_TILE: tl.constexpr):
    """Returns the length of a query's list of selected entries without the -1 values at its end."""
    place = tl.arange(0, SELECTED_TILE)
    index = tl.load(indices + place, mask=place < SELECTED, other=-1)
    return tl.max(tl.where(index >= 0, place + 1, 0), 0)


@triton.jit
def _product(a, b, total, scale):
    """Returns total + a @ b. The condition in the code is always true; the condition hides from the compiler that the
    result of one matrix product is an operand of another. Otherwise the compiler would let both groups of four warps
    compute whole tiles.
    """
    if scale != 0:
        total = tl.dot(a, b, acc=total, input_precision="ieee")
    return total


@triton.jit
def _attend(q, keys, seen, top, total, part, scale):
    """Update the running softmax with another tile of keys; returns (largest exponent, denominator, weighted sum of
    keys).
    """
    score = tl.dot(q, tl.trans(keys), input_precision="ieee") * (scale * LOG2E)
    score = tl.where(seen[None, :], score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    p = tl.exp2(score - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    part = _product(p.to(keys.dtype), keys, part * shrink[:, None], scale)
    return new_top, total * shrink + tl.sum(p, 1), part


@triton.jit
def _forward_kernel(
    q,
    window_kv,
    window_start,
    entries,
    topk_indices,
    sink,
    out,
    mass,
    lse,
    scale,
    before,
    HEADS: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SELECTED: tl.constexpr,
    SELECTED_TILE: tl.constexpr,
    KEYS_TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, number = tl.arange(0, HEADS_TILE), tl.arange(0, KEYS_TILE)
    row = token * HEADS + head
    query = _load_rows(q, row, head < HEADS, DIM, DIM_TILE)
    top = tl.load(sink + head, mask=head < HEADS, other=0.0).to(tl.float32) * LOG2E
    total = tl.full([HEADS_TILE], 1.0, tl.float32)
    part = tl.zeros([HEADS_TILE, DIM_TILE], tl.float32)
    for at in range(tl.load(window_start + token) + before, token + before + 1, KEYS_TILE):
        seen = at + number <= token + before
        keys = _load_rows(window_kv, at + number, seen, DIM, DIM_TILE)
        top, total, part = _attend(query, keys, seen, top, total, part, scale)
    topk_indices += token * SELECTED
    if SELECTED:
        last = _last(topk_indices, SELECTED, SELECTED_TILE)
        for at in range(0, last, KEYS_TILE):
            index = tl.load(topk_indices + at + number, mask=at + number < SELECTED, other=-1)
            keys = _load_rows(entries, index.to(tl.int64), index >= 0, DIM, DIM_TILE)
            top, total, part = _attend(query, keys, index >= 0, top, total, part, scale)
    channel = tl.arange(0, DIM_TILE)[None, :]
    here = (head < HEADS)[:, None] & (channel < DIM)
    tl.store(out + row[:, None] * DIM + channel, (part / total[:, None]).to(out.dtype.element_ty), mask=here)
    shift = top + tl.log2(total)
    tl.store(lse + row, shift, mask=head < HEADS)
    if SELECTED:
        # the mass needs the final denominator, so the selected entries are read again, now from the GPU's cache
        for at in range(0, last, KEYS_TILE):
            index = tl.load(topk_indices + at + number, mask=at + number < SELECTED, other=-1)
            keys = _load_rows(entries, index.to(tl.int64), index >= 0, DIM, DIM_TILE)
            score = tl.dot(query, tl.trans(keys), input_precision="ieee") * (scale * LOG2E)
            real = (index >= 0)[None, :] & (head < HEADS)[:, None]
            p = tl.where(real, tl.exp2(score - shift[:, None]), 0.0)
            tl.store(mass + token * SELECTED + at + number, tl.sum(p, 0), mask=at + number < SELECTED)
        for at in range(tl.cdiv(last, KEYS_TILE) * KEYS_TILE, SELECTED, KEYS_TILE):
            empty = tl.zeros([KEYS_TILE], tl.float32)
            tl.store(mass + token * SELECTED + at + number, empty, mask=at + number < SELECTED)


@triton.jit
def _query_backward_kernel(
    d_out,
    q,
    window_kv,
    window_start,
    entries,
    topk_indices,
    sink,
    out,
    lse,
    d_q,
    delta,
    d_sink,
    scale,
    before,
    HEADS: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    KEYS_TILE: tl.constexpr,
    SELECTED: tl.constexpr,
    SELECTED_TILE: tl.constexpr,
):
    """Compute the gradient of one query and its contribution to the gradient of the attention sink. Also writes delta,
    the term that the softmax gradient subtracts, for the other two kernels.
    """
    token = tl.program_id(0).to(tl.int64)
    head, number = tl.arange(0, HEADS_TILE), tl.arange(0, KEYS_TILE)
    real = head < HEADS
    row = token * HEADS + head
    query = _load_rows(q, row, real, DIM, DIM_TILE)
    grad = _load_rows(d_out, row, real, DIM, DIM_TILE)
    result = _load_rows(out, row, real, DIM, DIM_TILE)
    inner = tl.sum(grad.to(tl.float32) * result.to(tl.float32), 1)
    shift = tl.load(lse + row, mask=real, other=float("inf"))
    tl.store(delta + row, inner, mask=real)
    sink_exponent = tl.load(sink + head, mask=real, other=0.0).to(tl.float32) * LOG2E
    tl.store(d_sink + row, -tl.exp2(sink_exponent - shift) * inner, mask=real)
    total = tl.zeros([HEADS_TILE, DIM_TILE], tl.float32)
    for at in range(tl.load(window_start + token) + before, token + before + 1, KEYS_TILE):
        seen = at + number <= token + before
        keys = _load_rows(window_kv, at + number, seen, DIM, DIM_TILE)
        total = _add_query_gradient(total, query, grad, keys, seen, shift, inner, scale)
    if SELECTED:
        topk_indices += token * SELECTED
        last = _last(topk_indices, SELECTED, SELECTED_TILE)
        for at in range(0, last, KEYS_TILE):
            index = tl.load(topk_indices + at + number, mask=at + number < SELECTED, other=-1)
            keys = _load_rows(entries, index.to(tl.int64), index >= 0, DIM, DIM_TILE)
            total = _add_query_gradient(total, query, grad, keys, index >= 0, shift, inner, scale)
    channel = tl.arange(0, DIM_TILE)[None, :]
    here = real[:, None] & (channel < DIM)
    tl.store(d_q + row[:, None] * DIM + channel, (total * scale).to(d_q.dtype.element_ty), mask=here)


@triton.jit
def _add_query_gradient(total, query, grad, keys, seen, shift, inner, scale):
    empty = tl.zeros([query.shape[0], keys.shape[0]], tl.float32)
    score = _product(query, tl.trans(keys), empty, scale) * (scale * LOG2E)
    p = tl.where(seen[None, :], tl.exp2(score - shift[:, None]), 0.0)
    d_score = p * (_product(grad, tl.trans(keys), empty, scale) - inner[:, None])
    return tl.dot(d_score.to(keys.dtype), keys, acc=total, input_precision="ieee")


@triton.jit
def _add_key_gradient(total, query, grad, keys, seen, shift, inner, scale):
    """Add the contribution of one query to the gradient `total` of a tile of keys. Tiles are [keys, heads], and seen is
    [keys].
    """
    empty = tl.zeros([keys.shape[0], query.shape[0]], tl.float32)
    score = _product(keys, tl.trans(query), empty, scale) * (scale * LOG2E)
    p = tl.where(seen[:, None], tl.exp2(score - shift[None, :]), 0.0)
    d_score = p * (_product(keys, tl.trans(grad), empty, scale) - inner[None, :]) * scale
    total = _product(p.to(keys.dtype), grad, total, scale)
    return _product(d_score.to(keys.dtype), query, total, scale)


@triton.jit
def _entry_backward_kernel(
    d_out,
    q,
    entries,
    topk_indices,
    lse,
    delta,
    d_entries,
    scale,
    start,
    none,
    HEADS: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    DIM: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    KEYS_TILE: tl.constexpr,
    SELECTED: tl.constexpr,
    SELECTED_TILE: tl.constexpr,
    ATOMIC: tl.constexpr,
):
    """Compute the contribution of one query to the gradients of its selected entries.

    With ATOMIC, the contribution is added to d_entries fp32 [N + 1, D], whose last row, number `none`, receives the
    gradients for unused positions (-1) in the list of selected entries. Without ATOMIC, d_entries is [rows, K, D], and
    the rows of the tokens from `start` on are written. Rows are split into PARTS tiles with PART channels each, because
    results are rearranged in shared memory, where whole rows would not fit.
    """
    program = tl.program_id(0).to(tl.int64)
    token = program + start
    head, number = tl.arange(0, HEADS_TILE), tl.arange(0, KEYS_TILE)
    real = head < HEADS
    row = token * HEADS + head
    query = _load_parts(q, row, real, DIM, PART, PARTS)
    grad = _load_parts(d_out, row, real, DIM, PART, PARTS)
    shift = tl.load(lse + row, mask=real, other=float("inf"))
    inner = tl.load(delta + row, mask=real, other=0.0)
    topk_indices += token * SELECTED
    for at in range(0, _last(topk_indices, SELECTED, SELECTED_TILE), KEYS_TILE):
        index = tl.load(topk_indices + at + number, mask=at + number < SELECTED, other=-1).to(tl.int64)
        seen = index >= 0
        keys = _load_parts(entries, index, seen, DIM, PART, PARTS)
        score, d_score = tl.zeros([KEYS_TILE, HEADS_TILE], tl.float32), tl.zeros([KEYS_TILE, HEADS_TILE], tl.float32)
        for part in tl.static_range(PARTS):
            score = _product(keys[part], tl.trans(query[part]), score, scale)
            d_score = _product(keys[part], tl.trans(grad[part]), d_score, scale)
        p = tl.where(seen[:, None], tl.exp2(score * (scale * LOG2E) - shift[None, :]), 0.0)
        d_score = (p * (d_score - inner[None, :]) * scale).to(keys[0].dtype)
        for part in tl.static_range(PARTS):
            total = _product(p.to(keys[0].dtype), grad[part], tl.zeros([KEYS_TILE, PART], tl.float32), scale)
            total = _product(d_score, query[part], total, scale)
            channel = part * PART + tl.arange(0, PART)[None, :]
            if ATOMIC:
                target = d_entries + tl.where(seen, index, none)[:, None] * DIM + channel
                if PART * PARTS == DIM:  # without masks, which would need more registers
                    tl.atomic_add(target, total, sem="relaxed")
                else:
                    tl.atomic_add(target, total, mask=channel < DIM, sem="relaxed")
            else:
                target = d_entries + (program * SELECTED + at + number)[:, None] * DIM + channel
                tl.store(target, total, mask=(at + number < SELECTED)[:, None] & (channel < DIM))


@triton.jit
def _load_parts(rows, place, seen, DIM: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):
    """Load rows like `_load_rows`, but return them as a tuple of PARTS tiles [len(place), PART] with consecutive
    channels.
    """
    parts = ()
    for part in tl.static_range(PARTS):
        channel = part * PART + tl.arange(0, PART)[None, :]
        tile = tl.load(rows + place[:, None] * DIM + channel, mask=seen[:, None] & (channel < DIM), other=0.0)
        parts = parts + (tile,)  # type: ignore[assignment]
    return parts


@triton.jit
def _window_backward_kernel(
    d_out,
    q,
    window_kv,
    window_start,
    lse,
    delta,
    d_window,
    scale,
    tokens,
    window,
    before,
    HEADS: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    KEYS_TILE: tl.constexpr,
):
    """Compute the gradient of a block of window keys, summed over the queries that see them. The first `before` keys
    belong to tokens before the first query.
    """
    first = tl.program_id(0).to(tl.int64) * KEYS_TILE
    key = first + tl.arange(0, KEYS_TILE)
    head = tl.arange(0, HEADS_TILE)
    real = head < HEADS
    keys = _load_rows(window_kv, key, key < tokens + before, DIM, DIM_TILE)
    total = tl.zeros([KEYS_TILE, DIM_TILE], tl.float32)
    query_from, query_to = tl.maximum(first - before, 0), first - before + KEYS_TILE - 1 + window
    for token in range(query_from, tl.minimum(query_to, tokens)):
        seen = (key <= token + before) & (key >= tl.load(window_start + token) + before)
        row = token * HEADS + head
        query = _load_rows(q, row, real, DIM, DIM_TILE)
        grad = _load_rows(d_out, row, real, DIM, DIM_TILE)
        shift = tl.load(lse + row, mask=real, other=float("inf"))
        inner = tl.load(delta + row, mask=real, other=0.0)
        total = _add_key_gradient(total, query, grad, keys, seen, shift, inner, scale)
    channel = tl.arange(0, DIM_TILE)[None, :]
    here = (key < tokens + before)[:, None] & (channel < DIM)
    tl.store(d_window + key[:, None] * DIM + channel, total.to(d_window.dtype.element_ty), mask=here)
