"""The lightning indexer: it scores compressed KV entries, keeps candidate blocks, selects the top-k entries, and is
trained to predict the attention.

The score of entry j for query t is sum_h w[t, h] * relu(q[t, h] . k[j]). The selection of entries is discrete and has
no gradient; `indexer_loss` trains the scores to match the attention mass of the main attention on the selected entries.
In shapes, T is the number of tokens, Hi the number of indexer heads, Di their dimension, N the number of entry slots, K
= `index_topk`, M the number of candidate blocks and b the block size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.config import TextConfig
from model.kernels.switch import in_triton
from model.layout import Entries, SequenceLayout
from model.norm import RMSNorm
from model.precision import without_autocast
from model.quantize import fake_quant_mxfp4
from model.rope import rotate
from model.rounding import Linear
from model.sparse import Scratch, chunk_elements

# A tie-break that is added per slot: all entries whose ReLUs are all zero score exactly 0, and the newest of them must
# win, whatever the shape of the batch. It is far below the rounding error of any other score.
TIE_BREAK = 2.0**-100


class IndexQuery(NamedTuple):
    """The query of an indexer: q [T, Hi, Di] (rotated and quantised), and the head weights fp32 [T, Hi]."""

    q: Tensor
    weights: Tensor


class Indexer(nn.Module):
    """The indexer of a Full or Reindex layer. An indexer computes queries, and in a Full layer also keys."""

    def __init__(self, config: TextConfig, owns_keys: bool):
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.dim, bias=False)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
        if owns_keys:
            self.wk = nn.Linear(config.head_dim, self.dim, bias=False)
            self.k_norm = RMSNorm(self.dim, config.rms_norm_eps)

    def query(self, x: Tensor, q_lat: Tensor, layout: SequenceLayout) -> IndexQuery:
        """Compute the query from x [T, d] and q_lat [T, q_lora]. x and q_lat are detached, so that the language-model
        loss does not train the indexer.
        """
        q = self.wq_b(q_lat.detach()).unflatten(-1, (self.heads, self.dim))
        q = fake_quant_mxfp4(rotate(q, layout.phasors_yarn))
        weights = self.weights_proj(x.detach()).float() * (self.dim**-0.5 * self.heads**-0.5)
        return IndexQuery(q, weights)

    def keys(self, latent: Tensor, entries: Entries) -> Tensor:
        """Compute the keys [N, Di], rotated and quantised, from the un-rotated latent [N, D], which is detached."""
        return fake_quant_mxfp4(rotate(self.k_norm(self.wk(latent.detach())), entries.phasors))


@torch.no_grad()
@without_autocast
def select(
    query: IndexQuery, keys: Tensor, entries: Entries, topk: int, block: int, pool: int | None
) -> tuple[Tensor, Tensor | None]:
    """Score all visible entries of every query and select the best.

    Returns topk_indices int32 [T, topk], the slots in descending order of score (-1 if fewer entries are visible). If
    `pool` is a number, also returns candidates int32 [T, min(pool, blocks)]: the block with the newest visible entry
    and the blocks with the best entries, to which later indexers are restricted. The cost is O(T * visible entries)
    multiply-adds; queries are processed in chunks, and no [T, N] matrix is made.
    """
    tokens = query.q.shape[0]
    topk_indices = torch.full((tokens, topk), -1, dtype=torch.int32, device=keys.device)
    blocks = (entries.own or entries.slots) // block
    restrict = pool is not None and blocks > pool
    candidates = torch.full((tokens, pool), -1, dtype=torch.int32, device=keys.device) if restrict else None
    selected = _selected_by_kernels if in_triton(query.q) and block & (block - 1) == 0 else _selected
    for rows, low, peaks, best in selected(query, keys, entries, topk, block):
        topk_indices[rows, : best.shape[1]] = best
        if restrict:
            kept = _best_blocks(peaks, entries.visible_from[rows], entries.visible_to[rows], low, block, pool)
            candidates[rows, : kept.shape[1]] = kept
    return topk_indices, candidates


def _selected(query: IndexQuery, keys: Tensor, entries: Entries, topk: int, block: int):
    """Yield one tuple for each chunk of queries: the range of queries, the first slot of the scored range, the best
    score of each block, and the slots of the best entries.
    """
    scored = _scores_of_own if entries.own else _scores_of_ranges
    for rows, low, scores in scored(query, keys, entries, block):
        peaks = scores.unflatten(1, (-1, block)).amax(-1)
        yield rows, low, peaks, _best(scores, peaks, topk, low, block)


def _selected_by_kernels(query: IndexQuery, keys: Tensor, entries: Entries, topk: int, block: int):
    """As `_selected`, but computed by Triton kernels that do not store all scores: only the scores in the best blocks
    are computed again. The block size must be a power of two.
    """
    from model.kernels.indexer import block_peaks

    if entries.own:
        tokens, blocks = query.q.shape[0], entries.own // block
        step = max(1, chunk_elements(keys.device) // (min(topk, blocks) * block))
        chunks = ((at, min(at + step, tokens), 0, 0) for at in range(0, tokens, step))
    else:
        chunks = _query_chunks(entries, 1 / block, block)
    for start, stop, low, high in chunks:
        rows = slice(start, stop)
        blocks = (entries.own or high - low) // block
        visible = entries.visible_from[rows], entries.visible_to[rows]
        asked = query.q[rows], query.weights[rows], keys
        peaks = block_peaks(*asked, *visible, low, blocks, block, bool(entries.own), TIE_BREAK)
        first = visible[0][:, None] if entries.own else low
        top = peaks.topk(min(topk, blocks), dim=-1)
        best = (top.indices + first // block).masked_fill_(top.values == float("-inf"), -1).to(torch.int32)
        yield rows, first, peaks, _best_of_blocks(*asked, best, *visible, topk, block)


def _best_of_blocks(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    blocks: Tensor,
    visible_from: Tensor,
    visible_to: Tensor,
    topk: int,
    block: int,
) -> Tensor:
    """Find, by a Triton kernel, the slots int32 [C, min(topk, M * block)] of the best entries in each query's blocks
    int32 [C, M].
    """
    from model.kernels.indexer import candidate_scores

    scores = candidate_scores(q, weights, keys, blocks, visible_from, visible_to, block, TIE_BREAK)
    best = scores.topk(min(topk, scores.shape[1]), dim=-1)
    slots = blocks.gather(1, best.indices // block) * block + best.indices % block
    return slots.masked_fill_(best.values == float("-inf"), -1).to(torch.int32)


def _scores_of_ranges(query: IndexQuery, keys: Tensor, entries: Entries, block: int):
    """Yield (range of queries, first slot, masked scores [C, n]) for each chunk of C consecutive queries; the queries
    of a chunk share one range of n slots.
    """
    scratch = Scratch()
    for start, stop, low, high in _query_chunks(entries, query.q.shape[1], block):
        rows = slice(start, stop)
        scores = _scores(query.q[rows], query.weights[rows], keys[low:high], scratch)
        scores.add_(torch.arange(high - low, device=keys.device) * TIE_BREAK)
        _hide_unseen_(scores, entries, start, stop, low)
        yield rows, low, scores


def _scores_of_own(query: IndexQuery, keys: Tensor, entries: Entries, block: int):
    """As `_scores_of_ranges`, if each query has its own range of `entries.own` slots; the yielded first slots are then
    a column [C, 1].
    """
    scratch = Scratch()
    keys = keys.view(-1, entries.own, keys.shape[1])
    step = max(1, chunk_elements(keys.device) // (query.q.shape[1] * entries.own))
    number = torch.arange(entries.own, device=keys.device)
    for start in range(0, query.q.shape[0], step):
        rows = slice(start, min(start + step, query.q.shape[0]))
        low = entries.visible_from[rows, None]
        scores = _scores(query.q[rows], query.weights[rows], keys[rows], scratch)
        scores.add_(number * TIE_BREAK)
        scores.masked_fill_(number >= entries.visible_to[rows, None] - low, float("-inf"))
        yield rows, low, scores


@torch.no_grad()
@without_autocast
def select_from_candidates(
    query: IndexQuery, keys: Tensor, entries: Entries, candidates: Tensor, topk: int, block: int
) -> Tensor:
    """Select the best entries int32 [T, topk] among each query's candidate blocks. The cost is O(T * M * b),
    independent of the context length.
    """
    tokens, pool = candidates.shape
    topk_indices = torch.full((tokens, topk), -1, dtype=torch.int32, device=keys.device)
    kernels = in_triton(query.q)
    per_query = pool * block * (1 if kernels else query.q.shape[1] + keys.shape[1])
    step = max(1, chunk_elements(keys.device) // per_query)
    within = torch.arange(block, device=keys.device, dtype=torch.int32)
    scratch = Scratch()
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        if kernels:
            visible = entries.visible_from[rows], entries.visible_to[rows]
            asked = query.q[rows], query.weights[rows], keys, candidates[rows]
            found = _best_of_blocks(*asked, *visible, topk, block)
            topk_indices[rows, : found.shape[1]] = found
            continue
        slots = (candidates[rows, :, None].clamp(min=0) * block + within).flatten(1)
        chosen = scratch.rows("chosen", keys, slots)
        scores = _scores(query.q[rows], query.weights[rows], chosen, scratch)
        allowed = (candidates[rows, :, None] >= 0).expand(-1, -1, block).flatten(1) & (
            slots < entries.visible_to[rows, None]
        )
        # fp32 tells slots apart up to 2^24, so they are counted from the query's first one
        scores.add_((slots - entries.visible_from[rows, None]) * TIE_BREAK).masked_fill_(~allowed, float("-inf"))
        best = scores.topk(min(topk, scores.shape[1]), dim=-1)
        found = slots.gather(1, best.indices).masked_fill_(best.values == float("-inf"), -1)
        topk_indices[rows, : found.shape[1]] = found
    return topk_indices


def _query_chunks(entries: Entries, cost: float, block: int):
    """Yield (start, stop, low, high): a range of queries, and the range of slots, in whole blocks, that they can see.
    The size of chunks is bounded even if a chunk spans many short documents; chunks whose queries see no entry are
    skipped. cost: the number of values kept in memory per query and slot.
    """
    first, last = entries.host_from.tolist(), entries.host_to.tolist()
    budget = chunk_elements(entries.visible_to.device)
    tokens, start = len(first), 0
    while start < tokens:
        low, size = first[start], 16
        # later queries see more slots, so a chunk is doubled only while its scores fit into the budget
        while size < tokens - start and cost * 2 * size * (last[min(start + 2 * size, tokens) - 1] - low) <= budget:
            size *= 2
        stop = min(start + size, tokens)
        high = min(-(-last[stop - 1] // block) * block, entries.slots)
        if high > low:
            yield start, stop, low, high
        start = stop


def _scores(q: Tensor, weights: Tensor, keys: Tensor, scratch: Scratch) -> Tensor:
    """Compute scores fp32 [C, n], for keys [n, Di] shared by all queries or keys [C, n, Di] of each query. The result
    is valid until the next call, which reuses its memory.
    """
    if keys.dim() == 2:
        dots = scratch.bmm("dots", q.flatten(0, 1)[None], keys.t()[None]).view(q.shape[0], q.shape[1], -1)
    else:
        dots = scratch.bmm("dots", q, keys.transpose(1, 2))
    return scratch.bmm("scores", weights[:, None, :], dots.relu_()).squeeze(1)


def _hide_unseen_(scores: Tensor, entries: Entries, start: int, stop: int, low: int) -> None:
    """Set the scores of entries that a query must not see to -inf. If all queries belong to one document, only its
    newest entries can be invisible.
    """
    first = low
    if entries.host_from[start] == entries.host_from[stop - 1]:
        first = int(entries.host_to[start])
    slot = torch.arange(first, low + scores.shape[1], device=scores.device)
    rows = slice(start, stop)
    unseen = (slot < entries.visible_from[rows, None]) | (slot >= entries.visible_to[rows, None])
    scores[:, first - low :].masked_fill_(unseen, float("-inf"))


def _best_blocks(
    peaks: Tensor, visible_from: Tensor, visible_to: Tensor, low: int | Tensor, block: int, pool: int
) -> Tensor:
    """The candidate blocks of a chunk of queries, int32 [C, min(pool, blocks in range)], -1 if fewer blocks are
    visible. Overwrites peaks [C, blocks], the best score of each block; low (a number or [C, 1]) is the first slot of
    the first block.
    """
    newest = (visible_to[:, None] - 1 - low).clamp(min=0) // block
    sees = visible_to > visible_from
    peaks.scatter_(1, newest, torch.where(sees, float("inf"), float("-inf"))[:, None])
    top = peaks.topk(min(pool, peaks.shape[1]), dim=-1)
    return (top.indices + low // block).masked_fill_(top.values == float("-inf"), -1).to(torch.int32)


def _best(scores: Tensor, peaks: Tensor, topk: int, low: int | Tensor, block: int) -> Tensor:
    """The slots of the best entries, int32 [C, min(topk, n)], -1 if fewer entries are visible; low (a number or [C, 1])
    is the slot of the first score.

    The best k entries are in the k blocks with the highest peaks (best scores), so only the entries of these blocks are
    sorted.
    """
    place = None
    if peaks.shape[1] > 2 * topk:
        blocks = peaks.topk(topk, dim=-1).indices
        place = (blocks[:, :, None] * block + torch.arange(block, device=scores.device)).flatten(1)
        scores = scores.gather(1, place)
    best = scores.topk(min(topk, scores.shape[1]), dim=-1)
    slots = best.indices if place is None else place.gather(1, best.indices)
    return (slots + low).masked_fill_(best.values == float("-inf"), -1).to(torch.int32)


class IndexerLossInputs(NamedTuple):
    """The inputs of the loss of one indexer: its query and keys (with autograd graph), and the entries that it
    selected.
    """

    query: IndexQuery
    keys: Tensor
    topk_indices: Tensor


def indexer_loss(
    indexer_loss_inputs: IndexerLossInputs, mass: Tensor, supervised: Tensor, rows: Tensor | None = None
) -> Tensor:
    """The indexer loss: the sum over the supervised queries of KL(target || student) on their selected entries, 0-d
    fp32.

    The target is the attention mass [T, K] on the selected entries, summed over the heads of all layers that use the
    selection, L1-normalised and detached. The student is the softmax of the indexer scores over the same entries.
    supervised bool [T]: the queries that the loss includes, unless they see no entry. rows int64 [R]: the indices of
    the supervised queries; without `rows`, the host waits for the device to count these queries. The loss is the
    indexer loss of V3.2's sparse training stage, applied to V4.1.
    """
    (q, weights), keys, topk_indices = indexer_loss_inputs
    if in_triton(q):
        from model.kernels import indexer as kernels

        return kernels.indexer_loss(q, weights, keys, topk_indices, mass, supervised)
    rows = supervised.nonzero().flatten() if rows is None else rows
    return _IndexerLoss.apply(q, weights, keys, topk_indices, mass, rows)


class _IndexerLoss(torch.autograd.Function):
    """Computes the loss and its gradients in one pass over chunks of queries, so that gathered keys are in memory for
    one chunk at a time.
    """

    @staticmethod
    @without_autocast
    def forward(ctx, q, weights, keys, topk_indices, mass, taught):
        tokens, heads, dim = q.shape
        k = topk_indices.shape[1]
        need = any(ctx.needs_input_grad[:3])
        d_q, d_weights = (torch.zeros_like(q), torch.zeros_like(weights)) if need else (None, None)
        d_keys = torch.zeros_like(keys, dtype=torch.float32) if need else None
        total = torch.zeros((), dtype=torch.float32, device=q.device)
        scratch = Scratch()
        step = max(1, chunk_elements(q.device) // max(1, k * (heads + dim)))
        for rows in taught.split(step):
            index = topk_indices.index_select(0, rows)
            missing = index < 0
            index = index.clamp(min=0).long()
            chosen = scratch.rows("chosen", keys, index)
            q_rows, w_rows = q.index_select(0, rows), weights.index_select(0, rows)
            active = scratch.bmm("active", q_rows, chosen.transpose(1, 2)).relu_()  # [R, Hi, K]
            scores = torch.bmm(w_rows[:, None, :], active).squeeze(1).masked_fill_(missing, float("-inf"))
            target = mass.index_select(0, rows).masked_fill(missing, 0.0)
            target = target / target.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            log_student = scores.log_softmax(-1)
            total += (torch.xlogy(target, target) - target * log_student.masked_fill(missing, 0.0)).sum()
            if not need:
                continue
            d_scores = log_student.exp().mul_(target.sum(-1, keepdim=True)).sub_(target)
            d_scores.masked_fill_(missing, 0.0)  # NaN for a query that sees no entry
            d_weights[rows] = torch.bmm(active, d_scores[:, :, None]).squeeze(-1)
            d_dots = (w_rows[:, :, None] * d_scores[:, None, :]).mul_(active > 0).to(q.dtype)
            d_q[rows] = torch.bmm(d_dots, chosen)
            d_chosen = scratch.bmm("d_chosen", d_dots.transpose(1, 2), q_rows)
            d_keys.index_add_(0, index.flatten(), d_chosen.flatten(0, 1))
        if need:
            ctx.save_for_backward(d_q, d_weights, d_keys.to(keys.dtype))
        return total

    @staticmethod
    def backward(ctx, grad):
        d_q, d_weights, d_keys = ctx.saved_tensors
        return d_q * grad, d_weights * grad, d_keys * grad, None, None, None
