"""Mixture of experts (MoE): a router with square-root softplus scores and two selection biases (for text and for
images), routed experts with clamped SwiGLU, and a shared expert.

In shapes, T is the number of tokens, d the hidden size, E the number of experts, k the experts per token and f the
intermediate size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import TextConfig
from model.kernels.switch import in_triton
from model.layout import SequenceLayout
from model.no_wait import Watched, count_ids
from model.packed import PackedWeight, packed_grouped_linear
from model.parallel.context import sum_over
from model.parallel.exchange import RowCounts, Transfer, exchange, exchange_counts
from model.parallel.ranks import RankGroup, expert_shard
from model.quantize import FP4_ROWS, KV_WINDOW, fake_quant_fp8
from model.rounding import Linear, Rounds


class Routing(NamedTuple):
    """The result of the router: `indices` int64 [T, k] of the chosen experts, their `weights` fp32 [T, k], the `scores`
    fp32 [T, E] without bias, and `load` int64 [2, E], which counts how often each expert was chosen by text tokens (0)
    and by image tokens (1). `rows`: how many rows the ranks exchange, or None if the experts are not split over ranks.
    """

    indices: Tensor
    weights: Tensor
    scores: Tensor
    load: Tensor
    rows: RowCounts | None = None

    def none(self) -> Routing:
        """An empty routing, without tokens and with zero load."""
        return Routing(self.indices[:0], self.weights[:0], self.scores[:0], torch.zeros_like(self.load))


class MoEFirstPass(NamedTuple):
    """The results of an MoE layer's first forward pass that the recomputation of the layer reuses: `indices`, `load`
    and `rows` of the routing, and the output [T, d] of the layer (None: the results of the experts are exchanged and
    summed again).
    """

    indices: Tensor
    load: Tensor
    rows: RowCounts | None
    output: Tensor | None


class Gate(nn.Module):
    """The router: it chooses experts by score + bias, and weights their outputs by score only. The biases are buffers
    that only load balancing changes.
    """

    bias: Tensor
    bias_vl: Tensor

    def __init__(self, config: TextConfig):
        super().__init__()
        experts = config.n_routed_experts
        self.k, self.scaling = config.num_experts_per_tok, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size))
        self.register_buffer("bias", torch.zeros(experts, dtype=torch.float32))
        self.register_buffer("bias_vl", torch.zeros(experts, dtype=torch.float32))

    def forward(
        self, x: Tensor, image: Tensor | None, replayed_experts: Tensor | None = None, first: MoEFirstPass | None = None
    ) -> Routing:
        """Route the tokens x [T, d]; image bool [T] marks image tokens (None: text only). replayed_experts int64 [T,
        k]: experts to use instead of the router's choice (-1: the router's choice). Replayed experts are weighted by
        the current scores, so that the weights of the router still get gradients. `first` is passed only in
        recomputation, which uses the experts chosen in the first pass again.
        """
        with torch.autocast(x.device.type, enabled=False):
            scores = F.softplus(F.linear(x.float(), self.weight.float())).sqrt()
            indices = self._choose(scores.detach(), image, replayed_experts) if first is None else first.indices
            weights = scores.gather(1, indices)
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scaling
        if first is not None:
            return Routing(indices, weights, scores, load=first.load, rows=first.rows)
        return Routing(indices, weights, scores, load=count_load(indices, image, len(self.bias)))

    def _choose(self, scores: Tensor, image: Tensor | None, replayed_experts: Tensor | None) -> Tensor:
        bias = self.bias if image is None else torch.where(image[:, None], self.bias_vl, self.bias)
        indices = (scores + bias).topk(self.k, dim=-1).indices
        return indices if replayed_experts is None else torch.where(replayed_experts >= 0, replayed_experts, indices)


class Experts(Watched, Rounds):
    """The routed experts of a layer that this rank holds, stacked in w1, w3 [E, f, d] and w2 [E, d, f]."""

    packing, option = FP4_ROWS, "expert_quant"

    def __init__(self, config: TextConfig, layer: int, ranks: RankGroup):
        super().__init__()
        self.layer, self.shard = layer, expert_shard(config.n_routed_experts, ranks)
        e, d, f = len(self.shard), config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.w1 = nn.Parameter(torch.empty(e, f, d))
        self.w2 = nn.Parameter(torch.empty(e, d, f))
        self.w3 = nn.Parameter(torch.empty(e, f, d))
        self.adapter: Callable[[str, Tensor, Tensor], Tensor] | None = None  # see `linear`

    def linear(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Multiply rows [R, in], sorted by expert, by the stacked weight `name`. If there is an `adapter`, it is called
        with the same arguments and its result is added.
        """
        out = grouped_linear(rows, self.rounded(getattr(self, name)), ends)
        return out if self.adapter is None else out + self.adapter(name, rows, ends)

    def forward(
        self,
        x: Tensor,
        routing: Routing,
        meanwhile: Callable[[], Tensor],
        combine: bool = True,
        fp8: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Returns the weighted sum of the outputs of each token's experts, fp32 [T, d], for x [T, d], and the result of
        `meanwhile`, which is called while tokens travel between ranks. With `combine=False`, the weighted sum is
        replaced by an empty tensor [0, d], and only the tensors that the backward pass needs are computed; results are
        neither exchanged nor summed. With `fp8`, x is rounded to FP8 and travels in that format.
        """
        k = routing.indices.shape[1]
        if fp8:
            x = fake_quant_fp8(x)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        experts = routing.indices.flatten()
        order = experts.argsort(stable=True)  # sort the copies of the tokens by expert
        place = _inverse(order)
        token = order.div(k, rounding_mode="floor")
        rows = _Dispatch.apply(x, token, place, k)
        weights = routing.weights.flatten().index_select(0, order)
        if routing.rows is None:
            beside, y = meanwhile(), self._weighted(rows, weights, routing.load.sum(0))
        else:
            tags = torch.stack([weights, experts.index_select(0, order).to(weights.dtype)], dim=1)
            _, send, receive = routing.rows
            transfer = Transfer((rows, tags), send, receive, self.shard.ranks, KV_WINDOW if fp8 else None)
            beside = meanwhile()
            rows, tags = transfer.finish()
            y = self._weighted_for_others(rows, tags, routing.rows, combine)
        return _Combine.apply(y.float(), token, place, k, combine), beside

    def _weighted(self, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """The weighted expert outputs for rows [R, d] sorted by this rank's experts; weights fp32 [R]: the routing
        weight of each row; counts: the number of rows of each expert.
        """
        ends = counts.cumsum(0).to(torch.int32)
        hidden = clamped_swiglu(self.linear("w1", rows, ends), self.linear("w3", rows, ends), self.limit, weights)
        return self.linear("w2", hidden, ends)

    def _weighted_for_others(self, rows: Tensor, tags: Tensor, moved: RowCounts, combine: bool) -> Tensor:
        """Like `_weighted`, for the rows that the experts of this rank have received from all ranks. The tags [R, 2] of
        the rows hold the routing weight and the expert id of each row. Every result is sent back to the rank that
        the row came from. No token is dropped, whatever the counts are.
        """
        ranks, local = self.shard.ranks, len(self.shard)
        counts, send, receive = moved
        announced = torch.arange(local, device=rows.device).repeat(ranks.size)
        announced = announced.repeat_interleave(counts.flatten(), output_size=len(rows))
        order = announced.argsort(stable=True)  # from sorted by rank to sorted by expert
        place = _inverse(order)
        y = self._weighted(_Dispatch.apply(rows, order, place, 1), tags[:, 0].index_select(0, order), counts.sum(0))
        y = _Combine.apply(y, order, place, 1, combine)
        sender = torch.arange(ranks.size, device=rows.device).repeat_interleave(counts.sum(1), output_size=len(rows))
        came, announced = tags[:, 1].detach().long(), announced + self.shard.start
        self.note(came != announced, sender, came, announced)
        return exchange((y,), receive, send, ranks)[0] if combine else y

    def complain(self, wrong: int, rows: int, evidence: list[int]) -> str:
        ranks, (sender, came, announced) = self.shard.ranks, evidence
        return (
            f"layer {self.layer}: {ranks.name(ranks.rank)} received from {ranks.name(sender)} a token for expert "
            f"{came} where it had announced one for expert {announced} ({wrong} of {rows} tokens differ); the ranks "
            "are out of step"
        )


class SharedExpert(nn.Module):
    """The shared expert, which every token uses: a clamped SwiGLU without routing weight."""

    def __init__(self, config: TextConfig):
        super().__init__()
        d, f = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.w1 = Linear(d, f, bias=False)
        self.w2 = Linear(f, d, bias=False)
        self.w3 = Linear(d, f, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(clamped_swiglu(self.w1(x), self.w3(x), self.limit))


class MoE(nn.Module):
    """The MoE sublayer: the routed experts and the shared expert. It also returns the routing, which load balancing
    needs.
    """

    def __init__(self, config: TextConfig, layer: int, ranks: RankGroup):
        super().__init__()
        self.gate, self.ranks = Gate(config), ranks
        self.experts = Experts(config, layer, ranks)
        self.shared_experts = SharedExpert(config)

    def forward(
        self,
        x: Tensor,
        layout: SequenceLayout,
        replayed_experts: Tensor | None = None,
        first: MoEFirstPass | None = None,
        fp8: bool = False,
    ) -> tuple[Tensor, Routing]:
        """Returns the output [T, d] for x [T, d], and the routing. replayed_experts: see `Gate`; first: the results of
        the first pass, passed only in recomputation; fp8: see `Experts`. The routing is returned and not stored, so
        that recomputation does not count tokens twice.
        """
        routing = self.gate(x, layout.image, replayed_experts, first)
        if first is None and self.ranks.size > 1:
            load = routing.load.sum(0).view(self.ranks.size, -1)
            routing = routing._replace(rows=exchange_counts(load, self.ranks))
        kept = None if first is None else first.output
        routed, shared = self.experts(x, routing, lambda: self.shared_experts(x), kept is None, fp8)
        if kept is not None:  # the backward pass needs tensors saved inside both, but not their results
            return kept, routing
        return (routed + shared.float()).to(x.dtype), routing

    def first_pass(self, routing: Routing, output: Tensor, keep_combined: bool) -> MoEFirstPass:
        """The results that a recomputation of this layer reuses. The output [T, d] is included if `keep_combined` is
        set and the experts are split over ranks.
        """
        keep = keep_combined and self.ranks.size > 1
        return MoEFirstPass(routing.indices, routing.load, routing.rows, output.detach() if keep else None)


def check_routing(config: TextConfig, routing: Tensor, rows: int, row_length: int) -> None:
    """Raise ValueError if `routing` [B, S, layers, k] does not contain, for every token and layer, either k different
    experts or only -1 (not recorded).
    """
    k, experts = config.num_experts_per_tok, config.n_routed_experts
    shape = (rows, row_length, config.num_hidden_layers, k)
    if tuple(routing.shape) != shape or routing.is_floating_point():
        raise ValueError(f"routing must be an integer tensor {list(shape)}, got {routing.dtype} {list(routing.shape)}")
    ordered = routing.sort(-1).values
    recorded = ordered[..., -1] >= 0
    wrong = recorded & ((ordered[..., 0] < 0) | (ordered[..., 1:] == ordered[..., :-1]).any(-1))
    if bool(wrong.any()) or bool(((routing < -1) | (routing >= experts)).any()):
        raise ValueError(
            f"routing must contain {k} different experts of 0..{experts - 1} for each token, or {k} times -1"
        )


def count_load(indices: Tensor, image: Tensor | None, experts: int) -> Tensor:
    """Compute `Routing.load` for the chosen experts indices [T, k]; image is bool [T] or None."""
    cell = indices if image is None else indices + experts * image[:, None]
    return count_ids(cell, 2 * experts).view(2, experts)


def sequence_balance(routings: Sequence[Routing], layout: SequenceLayout) -> Tensor:
    """The sequence-level balance loss, summed over layers and tokens: for each layer, the sum over documents of length
    * sum_e f_e P_e (as in DeepSeek-V3).

    f_e is E/(k*T) * count_e and P_e is the mean over the document of score_e / sum_e score_e. The balance loss of a
    document is weighted by the document's length, so that packing documents into rows does not change the loss; the
    V4.1 report does not specify this weight. The result is 0-d fp32, and only P has a gradient. Under context
    parallelism, counts are summed over the ranks that share a document, and the result covers only this rank's tokens.
    """
    experts, k = routings[0].scores.shape[1], routings[0].indices.shape[1]
    documents = layout.document_lengths.shape[0]
    cell = layout.document[:, None] * experts
    counts = torch.stack([count_ids(cell + one.indices, documents * experts) for one in routings])
    if layout.chunk is not None:
        counts = sum_over(counts, layout.chunk.ranks)
    total = torch.zeros((), dtype=torch.float32, device=counts.device)
    for routing, count in zip(routings, counts, strict=True):
        frequency = count.view(documents, experts) * (experts / k) / layout.document_lengths[:, None]
        share = routing.scores / routing.scores.sum(-1, keepdim=True)
        total = total + (share * frequency.index_select(0, layout.document)).sum()
    return total


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows [R, in], sorted by group, by the weight [E, out, in] of their group; ends int32 [E]: the index
    after the last row of each group. Returns [R, out], in the autocast dtype if autocast is on.
    """
    if torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight = rows.to(dtype), weight.to(dtype)
    if isinstance(weight, PackedWeight):
        return packed_grouped_linear(rows, weight, ends)
    if not len(rows):  # the grouped product has no backward pass for zero rows; this product gives zero gradients
        return F.linear(rows, weight[0])
    return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    """Compute silu(min(gate, limit)) * clamp(up, -limit, limit) [* weights[:, None]] in fp32; the result has the dtype
    of gate.
    """
    if in_triton(gate):
        from model.kernels import moe as kernels

        return kernels.clamped_swiglu(gate, up, limit, weights)
    return _ClampedSwiGLU.apply(gate, up, limit, weights)


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, limit: float, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weights)
        ctx.limit = limit
        out = F.silu(gate.float().clamp(max=limit)).mul_(up.float().clamp(-limit, limit))
        if weights is not None:
            out.mul_(weights[:, None])
        return out.to(gate.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        gate, up, weights = ctx.saved_tensors
        limit, grad = ctx.limit, grad.float()
        g, u = gate.float(), up.float()
        g_clamped, u_clamped = g.clamp(max=limit), u.clamp(-limit, limit)
        by_silu = grad * F.silu(g_clamped)
        d_weights = None
        if weights is not None:
            d_weights = (by_silu * u_clamped).sum(-1)
            by_silu.mul_(weights[:, None])
            grad = grad * weights[:, None]
        d_gate = torch.ops.aten.silu_backward(u_clamped.mul_(grad), g_clamped).mul_(g <= limit)
        d_up = by_silu.mul_(u.abs() <= limit)
        return d_gate.to(gate.dtype), d_up.to(up.dtype), None, d_weights


class _Dispatch(torch.autograd.Function):
    """Copies tokens [T, d] to rows [T*k, d] sorted by expert; the gradient is summed over the k copies of a token in a
    fixed order. token int64 [T*k]: the index of each row's token; place int64 [T*k]: the row indices of the first
    token's k copies, then of the second token's, and so on.
    """

    @staticmethod
    def forward(ctx, x: Tensor, token: Tensor, place: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.k = k
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _sum_copies(grad, ctx.saved_tensors[0], ctx.k), None, None, None


class _Combine(torch.autograd.Function):
    """The transpose of `_Dispatch`: sums the rows [T*k, d], sorted by expert, to tokens [T, d]. With `combine=False`,
    which a recomputation uses if it already has the sums, the function returns an empty tensor [0, d] and only saves
    the tensors for the backward pass.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, token: Tensor, place: Tensor, k: int, combine: bool) -> Tensor:
        ctx.save_for_backward(token)
        return _sum_copies(rows, place, k) if combine else rows[:0]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.index_select(0, ctx.saved_tensors[0]), *(None,) * 4


def _sum_copies(rows: Tensor, place: Tensor, k: int) -> Tensor:
    return rows.index_select(0, place).unflatten(0, (-1, k)).sum(1)


def _inverse(order: Tensor) -> Tensor:
    """The permutation that undoes `order`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
