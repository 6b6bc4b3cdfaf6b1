"""Triton kernels of the indexer: the best score in each block of entries, the scores of candidate blocks, and the KL
loss; see model/indexer.py for the formulas.

Only the scores of candidate blocks are written to memory. A first pass keeps the best score of each block, and the
scores inside the candidate blocks are then computed again. Tiles of scores are [entries, queries x heads], so that the
sum over heads needs little or no communication between threads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.kernels.launch import launch, operator, padded
from model.kernels.sums import DETERMINISTIC_BYTES, add_in_order


@operator("index_peaks")
def block_peaks(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    visible_from: Tensor,
    visible_to: Tensor,
    low: int,
    blocks: int,
    block: int,
    own: bool,
    tie_break: float,
) -> Tensor:
    """Compute the best score of each block of `block` entries (a power of two), fp32 [C, blocks]; the score of a block
    without visible entries is -inf.

    Arguments: q [C, Hi, Di], weights fp32 [C, Hi], keys [N, Di], visible_from and visible_to int64 [C]. Block 0 begins
    at slot `low` or, with `own`, at each query's visible_from.
    """
    queries, heads, dim = q.shape
    peaks = torch.empty(queries, blocks, dtype=torch.float32, device=q.device)
    heads_tile = padded(heads)
    together = 1 if own else max(1, 128 // heads_tile)
    heads_tile = max(heads_tile, 16) if together == 1 else heads_tile
    launch(
        _peaks_kernel,
        (triton.cdiv(queries, together),),
        *(q, weights, keys, visible_from, visible_to, peaks, low, queries, blocks, tie_break),
        OWN=own,
        TOGETHER=together,
        HEADS=heads,
        HEADS_TILE=heads_tile,
        DIM=dim,
        DIM_TILE=padded(dim, 16),
        BLOCK=block,
        SLOTS_TILE=max(64, block),
        num_warps=8,
        num_stages=3,
        flops=2.0 * queries * blocks * block * heads * dim / 2,  # with a causal mask, half of the entries on average
    )
    return peaks


@operator("index_candidate_scores")
def candidate_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    candidates: Tensor,
    visible_from: Tensor,
    visible_to: Tensor,
    block: int,
    tie_break: float,
) -> Tensor:
    """Compute the scores fp32 [C, M * block] of the entries in each query's blocks int32 [C, M] (-1: no block); the
    score of an invisible entry is -inf. The blocks of a query begin at or after the slot visible_from (int64 [C]) of
    the query; the tie-break counts entries from that slot.
    """
    queries, heads, dim = q.shape
    count = candidates.shape[1]
    scores = torch.empty(queries, count * block, dtype=torch.float32, device=q.device)
    launch(
        _candidates_kernel,
        (queries,),
        *(q, weights, keys, candidates, visible_from, visible_to, scores, count, tie_break),
        HEADS=heads,
        HEADS_TILE=padded(heads, 16),
        DIM=dim,
        DIM_TILE=padded(dim, 16),
        BLOCK=block,
        SLOTS_TILE=64,
        num_warps=4,
        num_stages=3,
        flops=2.0 * queries * count * block * heads * dim,
    )
    return scores


def indexer_loss(
    q: Tensor, weights: Tensor, keys: Tensor, topk_indices: Tensor, mass: Tensor, taught: Tensor
) -> Tensor:
    """Compute the loss of `model.indexer.indexer_loss`, with the fields of its inputs as separate arguments."""
    tensors = (q, weights, keys, topk_indices, mass, taught)
    need = torch.is_grad_enabled() and any(x.requires_grad for x in (q, weights, keys))
    return _loss(*(x.contiguous() for x in tensors), need, torch.are_deterministic_algorithms_enabled())[0]


@operator("indexer_loss")
def _loss(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    topk_indices: Tensor,
    mass: Tensor,
    taught: Tensor,
    need: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the loss and, if `need` is true, the gradients of q, weights and keys, computed in one pass over the
    selected entries.
    """
    tokens, heads, dim = q.shape
    selected = topk_indices.shape[1]
    losses = torch.empty(tokens, dtype=torch.float32, device=q.device)
    d_q, d_weights = (torch.empty_like(x) if need else x.new_empty(0) for x in (q, weights))
    d_keys = torch.zeros(keys.shape if need else (0,), dtype=torch.float32, device=q.device)
    in_order = need and deterministic
    step = max(1, DETERMINISTIC_BYTES // (4 * dim * max(1, selected))) if in_order else tokens
    for start in range(0, tokens, step):
        rows = min(step, tokens - start)
        target = torch.empty(rows, selected, dim, dtype=torch.float32, device=q.device) if in_order else d_keys
        chosen = topk_indices[start : start + rows]
        launch(
            _loss_kernel,
            (rows,),
            *(q, weights, keys, topk_indices, mass, taught, losses, d_q, d_weights, target, start),
            HEADS=heads,
            HEADS_TILE=padded(heads, 16),
            DIM=dim,
            DIM_TILE=padded(dim, 16),
            SELECTED=selected,
            SLOTS_TILE=64,
            NEED=need,
            ATOMIC=not in_order,
            num_warps=8,
            num_stages=2,
            flops=8.0 * rows * selected * heads * dim,
        )
        if in_order:
            written = (taught[start : start + rows, None] & (chosen >= 0)).to(chosen.dtype)
            add_in_order(d_keys, target, chosen * written + written - 1)
    return losses.sum(), d_q, d_weights, d_keys.to(keys.dtype)


def _save_loss(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate_loss(ctx, grad: Tensor, *_):
    d_q, d_weights, d_keys = ctx.saved_tensors
    return (d_q * grad).to(d_q.dtype), d_weights * grad, (d_keys * grad).to(d_keys.dtype), None, None, None, None, None


_loss.register_autograd(_differentiate_loss, setup_context=_save_loss)


@triton.jit
def _load_rows(rows, place, seen, DIM: tl.constexpr, DIM_TILE: tl.constexpr):
    """Load a tile [len(place), DIM_TILE]: row i is row place[i] (int64) of the tensor, or zero if seen[i] is false."""
    channel = tl.arange(0, DIM_TILE)[None, :]
    return tl.load(rows + place[:, None] * DIM + channel, mask=seen[:, None] & (channel < DIM), other=0.0)


@triton.jit
def _peaks_kernel(
    q,
    weights,
    keys,
    visible_from,
    visible_to,
    peaks,
    low,
    queries,
    blocks,
    tie_break,
    OWN: tl.constexpr,
    TOGETHER: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS_TILE: tl.constexpr,
):
    """Compute the best score of each block for TOGETHER queries with all their heads, over the entries that any of
    these queries sees.
    """
    first = tl.program_id(0).to(tl.int64) * TOGETHER
    column = tl.arange(0, TOGETHER * HEADS_TILE)
    head = column % HEADS_TILE
    asking = first + column // HEADS_TILE
    real = (head < HEADS) & (asking < queries)
    query = _load_rows(q, asking * HEADS + head, real, DIM, DIM_TILE)
    weight = tl.load(weights + asking * HEADS + head, mask=real, other=0.0)[None, :]
    number = first + tl.arange(0, TOGETHER)
    here = number < queries
    start = tl.load(visible_from + number, mask=here, other=2**62)[None, :]
    stop = tl.load(visible_to + number, mask=here, other=0)[None, :]
    base = tl.cast(low, tl.int64)
    if OWN:
        base = tl.load(visible_from + first)
    # the range of whole tiles, counted from the base, that covers all entries that any of the queries sees
    seen_from = tl.maximum(tl.min(start) - base, 0) // SLOTS_TILE * SLOTS_TILE
    seen_to = tl.minimum(tl.max(tl.where(stop > start, stop, 0)) - base, blocks * BLOCK)
    BLOCKS_TILE: tl.constexpr = SLOTS_TILE // BLOCK
    in_tile = tl.arange(0, BLOCKS_TILE)[:, None]
    target = peaks + number[None, :] * blocks
    empty = tl.full([BLOCKS_TILE, TOGETHER], float("-inf"), tl.float32)
    for at in range(0, tl.minimum(seen_from, blocks * BLOCK), SLOTS_TILE):
        place = at // BLOCK + in_tile
        tl.store(target + place, empty, mask=here[None, :] & (place < blocks))
    for at in range(seen_from, seen_to, SLOTS_TILE):
        offset = at + tl.arange(0, SLOTS_TILE)
        slot = base + offset
        tile = _load_rows(keys, slot, offset < seen_to, DIM, DIM_TILE)
        dots = tl.dot(tile, tl.trans(query), input_precision="ieee")
        dots = tl.reshape(tl.maximum(dots, 0.0) * weight, [SLOTS_TILE, TOGETHER, HEADS_TILE])
        score = tl.sum(dots, 2) + (offset.to(tl.float32) * tie_break)[:, None]
        visible = (slot[:, None] >= start) & (slot[:, None] < stop)
        score = tl.reshape(tl.where(visible, score, float("-inf")), [BLOCKS_TILE, BLOCK, TOGETHER])
        place = at // BLOCK + in_tile
        tl.store(target + place, tl.max(score, 1), mask=here[None, :] & (place < blocks))
    after = tl.maximum(seen_from, tl.cdiv(tl.maximum(seen_to, 0), SLOTS_TILE) * SLOTS_TILE)
    for at in range(after, blocks * BLOCK, SLOTS_TILE):
        place = at // BLOCK + in_tile
        tl.store(target + place, empty, mask=here[None, :] & (place < blocks))


@triton.jit
def _candidates_kernel(
    q,
    weights,
    keys,
    candidates,
    visible_from,
    visible_to,
    scores,
    count,
    tie_break,
    HEADS: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS_TILE: tl.constexpr,
):
    asking = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_TILE)
    query = _load_rows(q, asking * HEADS + head, head < HEADS, DIM, DIM_TILE)
    weight = tl.load(weights + asking * HEADS + head, mask=head < HEADS, other=0.0)[None, :]
    start, stop = tl.load(visible_from + asking), tl.load(visible_to + asking)
    for at in range(0, count * BLOCK, SLOTS_TILE):
        place = at + tl.arange(0, SLOTS_TILE)
        inside = place < count * BLOCK
        owner = tl.load(candidates + asking * count + place // BLOCK, mask=inside, other=-1).to(tl.int64)
        slot = owner * BLOCK + place % BLOCK
        seen = (owner >= 0) & (slot < stop)
        tile = _load_rows(keys, slot, seen, DIM, DIM_TILE)
        dots = tl.dot(tile, tl.trans(query), input_precision="ieee")
        score = tl.sum(tl.maximum(dots, 0.0) * weight, 1) + (slot - start).to(tl.float32) * tie_break
        tl.store(scores + asking * count * BLOCK + place, tl.where(seen, score, float("-inf")), mask=inside)


@triton.jit
def _loss_kernel(
    q,
    weights,
    keys,
    topk_indices,
    mass,
    taught,
    losses,
    d_q,
    d_weights,
    d_keys,
    start,
    HEADS: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SELECTED: tl.constexpr,
    SLOTS_TILE: tl.constexpr,
    NEED: tl.constexpr,
    ATOMIC: tl.constexpr,
):
    """Process one query: a first pass computes the softmax denominators of student and target, a second pass the loss
    and the gradients. With ATOMIC, the gradients of keys are added to d_keys fp32 [N, Di]; without it, d_keys is [rows,
    K, Di], and the rows of the tokens from `start` on are written.
    """
    program = tl.program_id(0).to(tl.int64)
    token = program + start
    head, number = tl.arange(0, HEADS_TILE), tl.arange(0, SLOTS_TILE)
    row = token * HEADS + head
    query = _load_rows(q, row, head < HEADS, DIM, DIM_TILE)
    weight = tl.load(weights + row, mask=head < HEADS, other=0.0)[None, :]
    topk_indices += token * SELECTED
    mass += token * SELECTED
    end = tl.where(tl.load(taught + token) != 0, SELECTED, 0)  # other queries read nothing
    # each element of a tile has its own running sum; they are added up at the end
    top = tl.full([SLOTS_TILE], -3.0e38, tl.float32)
    total = tl.zeros([SLOTS_TILE], tl.float32)
    all_mass = tl.zeros([SLOTS_TILE], tl.float32)
    for at in range(0, end, SLOTS_TILE):
        index = tl.load(topk_indices + at + number, mask=at + number < SELECTED, other=-1)
        tile = _load_rows(keys, index.to(tl.int64), index >= 0, DIM, DIM_TILE)
        active = tl.maximum(tl.dot(tile, tl.trans(query), input_precision="ieee"), 0.0)
        score = tl.where(index >= 0, tl.sum(active * weight, 1), float("-inf"))
        new_top = tl.maximum(top, score)
        total = total * tl.exp(top - new_top) + tl.exp(score - new_top)
        top = new_top
        all_mass += tl.load(mass + at + number, mask=index >= 0, other=0.0)
    highest = tl.max(top, 0)
    total = tl.sum(total * tl.exp(top - highest), 0)
    normaliser = highest + tl.log(tl.maximum(total, 1.0))  # below 1 only where nothing is selected
    all_mass = tl.sum(all_mass, 0)
    divisor = tl.maximum(all_mass, 1.1754943508222875e-38)
    share = all_mass / divisor  # sum of the target: 1, or 0 if no entry has mass
    loss = tl.zeros([SLOTS_TILE], tl.float32)
    d_query = tl.zeros([HEADS_TILE, DIM_TILE], tl.float32)
    d_weight = tl.zeros([HEADS_TILE], tl.float32)
    for at in range(0, end, SLOTS_TILE):
        index = tl.load(topk_indices + at + number, mask=at + number < SELECTED, other=-1).to(tl.int64)
        valid = index >= 0
        tile = _load_rows(keys, index, valid, DIM, DIM_TILE)
        active = tl.maximum(tl.dot(tile, tl.trans(query), input_precision="ieee"), 0.0)
        student = tl.where(valid, tl.sum(active * weight, 1) - normaliser, 0.0)
        target = tl.load(mass + at + number, mask=valid, other=0.0) / divisor
        entropy = tl.where(target > 0, target * tl.log(tl.where(target > 0, target, 1.0)), 0.0)
        loss += entropy - target * student
        if NEED:
            d_score = tl.where(valid, tl.exp(student) * share - target, 0.0)
            d_weight += tl.sum(active * d_score[:, None], 0)
            d_dots = tl.where(active > 0, weight * d_score[:, None], 0.0).to(tile.dtype)
            d_query = tl.dot(tl.trans(d_dots), tile, acc=d_query, input_precision="ieee")
            d_tile = tl.dot(d_dots, query, input_precision="ieee")
            channel = tl.arange(0, DIM_TILE)[None, :]
            here = valid[:, None] & (channel < DIM)
            if ATOMIC:
                tl.atomic_add(d_keys + index[:, None] * DIM + channel, d_tile, mask=here, sem="relaxed")
            else:
                place = program * SELECTED + at + number
                tl.store(d_keys + place[:, None] * DIM + channel, d_tile, mask=here)
    tl.store(losses + token, tl.sum(loss, 0))
    if NEED:
        channel = tl.arange(0, DIM_TILE)[None, :]
        here = (head < HEADS)[:, None] & (channel < DIM)
        tl.store(d_q + row[:, None] * DIM + channel, d_query.to(d_q.dtype.element_ty), mask=here)
        tl.store(d_weights + row, d_weight, mask=head < HEADS)
