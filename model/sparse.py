"""Attention over a sliding window and selected compressed entries: a plain reference implementation, and an
implementation with linear cost in the sequence length.

For each query and head h, both implementations compute p = exp(q.k * scale) / (sum_k exp(q.k * scale) + exp(sink_h))
and out = sum_k p k, with an fp32 softmax. The keys k are those in the query's window and its selected entries; there is
one KV head, and the values are the same vectors as the keys. In shapes, T is the number of tokens, H the number of
heads, D the head dimension, N the number of entry slots, K the number of selected entries and W the window size.

`gathered_attention` computes the same attention for queries that each have their own tensor of keys (in decoding and
drafting).

`dense_attention` masks full [T, T] and [T, N] score matrices. `sparse_attention` cuts the queries into blocks of C
queries, gathers for each block the selected entries and the C + W keys that the block can see, and recomputes the
probabilities in the backward pass. `sparse_attention` takes O(T * (W + K)) time and O(T) memory, and makes no matrix of
size T x T or T x N.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from model.kernels.switch import in_triton
from model.precision import without_autocast

# The number of scores in memory at once: small enough for a CPU's cache, and large enough to use a GPU fully.
CHUNK_ELEMENTS = {"cpu": 2**19, "cuda": 2**27}
QUERY_BLOCK = 64


def chunk_elements(device: torch.device) -> int:
    """The maximum number of attention scores in memory at once on a device; accelerators other than CUDA use CUDA's
    number.
    """
    return CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cuda"])


def dense_attention(
    q: Tensor,
    window_kv: Tensor,
    window_start: Tensor,
    entries: Tensor | None,
    topk_indices: Tensor | None,
    sink: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    """The reference implementation of attention. q [T, H, D]; window_kv [h + T, D], the keys of the h tokens before the
    first query, followed by the keys of the T query tokens; window_start int [T], the first token in each query's
    window, counted from the first query (negative: an earlier token); entries [N, D], topk_indices int [T, K] (-1 =
    none), sink fp32 [H] -> (out [T, H, D], mass fp32 [T, K]: probability of each selected entry summed over heads).
    """
    tokens, near = q.shape[0], window_kv.shape[0]
    index = torch.arange(tokens, device=q.device)
    key = torch.arange(tokens - near, tokens, device=q.device)
    visible = (key[None, :] <= index[:, None]) & (key[None, :] >= window_start[:, None])
    keys = window_kv
    if topk_indices is not None:
        chosen = torch.zeros(tokens, entries.shape[0] + 1, dtype=torch.bool, device=q.device)
        chosen.scatter_(1, torch.where(topk_indices < 0, entries.shape[0], topk_indices).long(), True)
        visible = torch.cat([visible, chosen[:, :-1]], dim=1)
        keys = torch.cat([keys, entries], dim=0)
    p = _probabilities(torch.einsum("thd,sd->ths", q, keys), ~visible, sink, scale)
    out = torch.einsum("ths,sd->thd", p.to(keys.dtype), keys)
    mass = None
    if topk_indices is not None:
        on_entries = p[..., near:].detach().sum(1)
        mass = on_entries.gather(1, topk_indices.clamp(min=0).long()) * (topk_indices >= 0)
    return out, mass


def _probabilities(dots: Tensor, hidden: Tensor, sink: Tensor, scale: float) -> Tensor:
    """The softmax of dots [T, H, n] over the keys and the attention sink, returned without the sink's column: fp32 [T,
    H, n]. hidden bool [T, n] marks masked keys.
    """
    scores = (dots.float() * scale).masked_fill(hidden[:, None, :], float("-inf"))
    scores = torch.cat([scores, sink.float()[None, :, None].expand(scores.shape[0], -1, 1)], dim=-1)
    return scores.softmax(-1)[..., :-1]


@without_autocast
def gathered_attention(q: Tensor, keys: Tensor, hidden: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Attention in which every query has its own keys, for decoding and for training a drafter: q [T, H, D], keys [T,
    n, D], hidden bool [T, n] (masked keys), sink fp32 [H]. Returns [T, H, D].
    """
    p = _probabilities(torch.bmm(q, keys.transpose(1, 2)), hidden, sink, scale)
    return torch.bmm(p.to(keys.dtype), keys)


@torch.no_grad()
def dense_attention_mass(
    q: Tensor,
    window_kv: Tensor,
    window_start: Tensor,
    entries: Tensor,
    visible_from: Tensor,
    visible_to: Tensor,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """The attention probability that each entry would get if queries attended to the window and *all* visible entries,
    summed over heads: fp32 [T, N].

    This attention mass is the reference for measuring the quality of a selection. The cost is quadratic in the sequence
    length, so use small batches.
    """
    slot = torch.arange(entries.shape[0], device=q.device, dtype=torch.int32)
    seen = (slot >= visible_from[:, None]) & (slot < visible_to[:, None])
    _, mass = dense_attention(q, window_kv, window_start, entries, slot.where(seen, -1), sink, scale)
    return mass


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
    """Attention with linear cost: same arguments and results as `dense_attention`, plus the window size W; h must be
    less than W.
    """
    if in_triton(q):
        from model.kernels import sparse as kernels

        if kernels.supports(q):
            return kernels.sparse_attention(q, window_kv, window_start, entries, topk_indices, sink, scale, window)
    if topk_indices is None:
        entries = window_kv.new_zeros(0, window_kv.shape[1])
        topk_indices = torch.empty(q.shape[0], 0, dtype=torch.int32, device=q.device)
    out, mass = _SparseAttention.apply(q, window_kv, window_start, entries, topk_indices, sink, scale, window)
    return out, (mass if topk_indices.shape[1] else None)


class _Blocks:
    """Cuts the token axis into blocks of C queries, each of which sees a span of `before` + C keys, and groups the
    blocks into chunks of bounded size.
    """

    def __init__(self, q: Tensor, window: int, selected: int):
        tokens, heads, dim = q.shape
        self.tokens, self.heads, self.dim = tokens, heads, dim
        self.size = min(QUERY_BLOCK, max(16, window))
        # A multiple of the block size, so that key gradients can be added block by block
        self.before = -(-(window - 1) // self.size) * self.size
        self.span = self.before + self.size
        self.count = -(-tokens // self.size)
        per_block = self.size * (heads * (self.span + selected) + selected * dim)
        budget = chunk_elements(q.device)
        self.step = max(1, min(self.count, budget // per_block))

    def chunks(self):
        return ((at, min(at + self.step, self.count)) for at in range(0, self.count, self.step))

    def pad_queries(self, x: Tensor) -> Tensor:
        """Pad [T, ...] to [count*size, ...] with zero rows after the last token."""
        missing = self.count * self.size - self.tokens
        return x if not missing else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])

    def pad_keys(self, x: Tensor) -> Tensor:
        """Pad the keys [h + T, D], of which h precede the first query, to [before + count*size, D] with zero rows on
        both sides.
        """
        halo = x.shape[0] - self.tokens
        return F.pad(x, (0, 0, self.before - halo, self.count * self.size - self.tokens))

    def key_spans(self, padded: Tensor, start: int, stop: int) -> Tensor:
        """A view [blocks, span, D] of the padded keys: the key spans of the blocks, which overlap."""
        row = padded.stride(0)
        return padded.as_strided(
            (stop - start, self.span, padded.shape[1]),
            (self.size * row, row, 1),
            padded.storage_offset() + start * self.size * row,
        )

    def hidden(self, window_start: Tensor, start: int, stop: int) -> Tensor:
        """A mask bool [blocks, C, 1, span], true if a key is outside the query's window. `window_start` is padded."""
        query = torch.arange(start * self.size, stop * self.size, device=window_start.device).view(-1, self.size, 1)
        block = torch.arange(start, stop, device=window_start.device)[:, None, None] * self.size
        key = block - self.before + torch.arange(self.span, device=window_start.device)
        first = window_start[start * self.size : stop * self.size].view(-1, self.size, 1)
        return ((key > query) | (key < first)).unsqueeze(2)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx, q, window_kv, window_start, entries, topk_indices, sink, scale, window):
        chunks = _Chunks(q, window_kv, window_start, entries, topk_indices, sink, scale, window)
        blocks, scratch = chunks.blocks, chunks.scratch
        padded = blocks.count * blocks.size
        out = q.new_empty(padded, blocks.heads, blocks.dim)
        lse = q.new_empty(padded, blocks.heads, dtype=torch.float32)
        mass = q.new_empty(padded, topk_indices.shape[1], dtype=torch.float32)
        for start, stop in blocks.chunks():
            rows = slice(start * blocks.size, stop * blocks.size)
            near, far, keys, chosen = chunks.scores(start, stop)
            lse[rows], total = chunks.exponentiate_(near, far)
            part = scratch.bmm("part", near.to(keys.dtype), keys).view(-1, blocks.heads, blocks.dim)
            if far.shape[-1]:
                scratch.add_bmm_(part, far.to(chosen.dtype), chosen)
                mass[rows] = torch.bmm((1 / total).unsqueeze(1), far).squeeze(1)
            torch.div(part, total.unsqueeze(-1), out=out[rows])
        ctx.save_for_backward(q, window_kv, window_start, entries, topk_indices, sink, out, lse)
        ctx.scale, ctx.window = scale, window
        mass = mass[: blocks.tokens]
        ctx.mark_non_differentiable(mass)
        return out[: blocks.tokens], mass

    @staticmethod
    def backward(ctx, d_out, _):
        q, window_kv, window_start, entries, topk_indices, sink, out, lse = ctx.saved_tensors
        chunks = _Chunks(q, window_kv, window_start, entries, topk_indices, sink, ctx.scale, ctx.window)
        blocks, scratch = chunks.blocks, chunks.scratch
        d_out = blocks.pad_queries(d_out.contiguous())
        delta = (d_out.float() * out.float()).sum(-1)  # [T, H]: the term that the softmax gradient subtracts
        d_sink = -(torch.exp(sink.float() - lse) * delta)[: blocks.tokens].sum(0)
        d_q = torch.empty_like(chunks.q)
        d_window = torch.zeros_like(chunks.keys, dtype=torch.float32)
        d_entries = torch.zeros_like(entries, dtype=torch.float32)
        for start, stop in blocks.chunks():
            rows = slice(start * blocks.size, stop * blocks.size)
            near, far, keys, chosen = chunks.scores(start, stop)
            chunks.exp_(near, far, lse[rows])
            q_block, g_block = chunks.q_block(start, stop), d_out[rows].view(near.shape[0], -1, blocks.dim)
            d_near = scratch.bmm("d_near", g_block, keys.transpose(1, 2))
            d_near = d_near.sub_(delta[rows].view(near.shape[0], -1, 1)).mul_(near).to(q.dtype)
            d_keys = scratch.bmm("d_keys", d_near.transpose(1, 2), q_block)
            scratch.add_bmm_(d_keys, near.to(q.dtype).transpose(1, 2), g_block, ctx.scale)
            # spans overlap: part p of the span of block b is key block b + p
            for piece in range(blocks.span // blocks.size):
                at = slice((start + piece) * blocks.size, (stop + piece) * blocks.size)
                part = d_keys[:, piece * blocks.size : (piece + 1) * blocks.size]
                d_window[at].view(part.shape).add_(part)
            grad = scratch.bmm("part", d_near, keys).view(-1, blocks.heads, blocks.dim)
            if far.shape[-1]:
                d_far = scratch.bmm("d_far", d_out[rows], chosen.transpose(1, 2))
                d_far = d_far.sub_(delta[rows].unsqueeze(-1)).mul_(far).to(q.dtype)
                scratch.add_bmm_(grad, d_far, chosen)
                d_chosen = scratch.bmm("d_chosen", d_far.transpose(1, 2), chunks.q[rows])
                scratch.add_bmm_(d_chosen, far.to(q.dtype).transpose(1, 2), d_out[rows], ctx.scale)
                d_entries.index_add_(0, chunks.index[rows].flatten(), d_chosen.flatten(0, 1))
            torch.mul(grad, ctx.scale, out=d_q[rows])
        end = blocks.before + blocks.tokens
        d_window = d_window[end - len(window_kv) : end].to(window_kv.dtype)
        d_entries, d_sink = d_entries.to(entries.dtype), d_sink.to(sink.dtype)
        return d_q[: blocks.tokens], d_window, None, d_entries, None, d_sink, None, None


class Scratch:
    """Named buffers that all chunks of a call reuse, because page faults of new buffers would take longer than the
    arithmetic.
    """

    def __init__(self):
        self.buffers: dict[str, Tensor] = {}

    def empty(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = like.new_empty(size, dtype=dtype)
        return self.buffers[name][:size].view(shape)

    def rows(self, name: str, table: Tensor, index: Tensor) -> Tensor:
        """Gather the rows [..., D] of table [N, D] at the indices [...] into the buffer `name`."""
        out = self.empty(name, (*index.shape, table.shape[1]), table)
        torch.index_select(table, 0, index.flatten(), out=out.view(-1, table.shape[1]))
        return out

    def bmm(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """The batched matrix product of a and b in fp32: for bf16 factors, too, the sums are not rounded to bf16."""
        out = self.empty(name, (a.shape[0], a.shape[1], b.shape[2]), a, torch.float32)
        if a.dtype == torch.float32:
            return torch.bmm(a, b, out=out)
        if a.is_cuda:
            return torch.bmm(a, b, out_dtype=torch.float32, out=out)
        return torch.bmm(a.float(), b.float(), out=out)

    def add_bmm_(self, total: Tensor, a: Tensor, b: Tensor, beta: float = 1.0) -> Tensor:
        """total fp32 = beta * total + the batched product of a and b."""
        if a.dtype == torch.float32:
            return total.baddbmm_(a, b, beta=beta)
        return total.mul_(beta).add_(self.bmm("added", a, b))


class _Chunks:
    """The padded inputs of one attention call. The scores of a chunk are computed in the same way in the forward and
    backward pass.
    """

    def __init__(self, q, window_kv, window_start, entries, topk_indices, sink, scale, window):
        self.blocks = blocks = _Blocks(q, window, topk_indices.shape[1])
        self.scratch = Scratch()
        self.entries, self.sink, self.scale = entries, sink.float(), scale
        self.q = blocks.pad_queries(q.contiguous())
        self.keys = blocks.pad_keys(window_kv)
        self.window_start = blocks.pad_queries(window_start)
        topk_indices = blocks.pad_queries(topk_indices)
        self.index = topk_indices.clamp(min=0).long()
        self.missing = topk_indices < 0

    def q_block(self, start: int, stop: int) -> Tensor:
        """The queries of a chunk of blocks, [blocks, C*H, D]."""
        size = self.blocks.size
        return self.q[start * size : stop * size].view(stop - start, -1, self.blocks.dim)

    def scores(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute masked fp32 dot products with window keys, near [blocks, C*H, span], and with selected entries, far
        [rows, H, K]; also returns the window keys [blocks, span, D] and the selected entries [rows, K, D]. The results
        are valid until the next call.
        """
        blocks, scratch = self.blocks, self.scratch
        rows = slice(start * blocks.size, stop * blocks.size)
        keys = blocks.key_spans(self.keys, start, stop)
        near = scratch.bmm("near", self.q_block(start, stop), keys.transpose(1, 2))
        hidden = blocks.hidden(self.window_start, start, stop)
        near.view(stop - start, blocks.size, blocks.heads, -1).masked_fill_(hidden, float("-inf"))
        chosen = scratch.rows("chosen", self.entries, self.index[rows])
        far = scratch.bmm("far", self.q[rows], chosen.transpose(1, 2))
        far.masked_fill_(self.missing[rows].unsqueeze(1), float("-inf"))
        return near, far, keys, chosen

    def exp_(self, near: Tensor, far: Tensor, shift: Tensor) -> None:
        """Compute exp(dot * scale - shift) in place, with shift fp32 [rows, H]."""
        shift = -shift
        torch.add(shift.view(near.shape[0], -1, 1), near, alpha=self.scale, out=near).exp_()
        torch.add(shift.unsqueeze(-1), far, alpha=self.scale, out=far).exp_()

    def exponentiate_(self, near: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
        """Turn dot products into exp(score - top) in place. Returns two tensors fp32 [rows, H]: the log of the softmax
        denominator over all keys and the sink, and this denominator divided by exp(top).
        """
        heads = self.blocks.heads
        top = near.amax(-1).view(-1, heads)
        if far.shape[-1]:
            top = top.maximum(far.amax(-1))
        top = (top * self.scale).maximum(self.sink)
        self.exp_(near, far, top)
        total = near.sum(-1).view(-1, heads) + far.sum(-1) + torch.exp(self.sink - top)
        return top + total.log(), total
