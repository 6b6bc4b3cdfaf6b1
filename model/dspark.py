"""DSpark, the drafter for speculative decoding: a few blocks that propose several next tokens in one pass, from the
hidden states of the backbone.

The architecture follows the released inference code and the V4.1 report (arXiv 2609.19969). The anchor a is the
position of the most recent token, so the backbone has processed positions 0..a-1. A block of B drafts starts at the
anchor: its inputs are the anchor token and B-1 noise tokens, each copied to n residual streams. Every draft attends to
the context keys of positions max(0, a-W)..a-1 and to all B keys of its own block, without a causal mask inside the
block. Each stage of the drafter computes its own context keys from `main_x`, a normalised projection of the backbone's
residual streams at the target layers. Slot i proposes the token at position a+1+i. The Markov head adds to the logits
of a slot a bias that depends on the token before it, and the confidence head predicts whether the proposal will be
accepted.

The drafter also uses the embedding and the head of the backbone; no parameter of the backbone gets a gradient.

The loss is 0.1 CE + 0.9 L1 + 1.0 BCE, as in DeepSpec (arXiv 2607.05147). The loss compares q, the drafter's
distribution given the true previous tokens, with p, the distribution of the backbone. Slot i is weighted by exp(-i/4),
and counts only if it and all slots before it are supervised.

In shapes, T is the number of tokens without padding, N the number of drafted blocks, B the block size, W the window
size, n the number of residual streams, d the hidden size, H the number of heads, D the head dimension, V the vocabulary
size, r the rank of the Markov head and A the number of anchors in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model import recomputation
from model.backbone import Block, BlockState, DeepseekV41, Features
from model.build import allocate_model, cast_model
from model.cache.pages import Cache
from model.cache.step import Step
from model.checkpoint.load import load_weights
from model.checkpoint.names import released_tensors
from model.checkpoint.released import read_headers
from model.config import DraftObjective, ForwardOptions, ModelConfig, TextConfig, drafter_problems
from model.hyper import collapse, collapse_normed, expand
from model.init import init_weights
from model.kernels.switch import using
from model.layout import SequenceLayout
from model.loss import draft_distances
from model.moe import MoEFirstPass, Routing
from model.norm import RMSNorm
from model.parallel.context import gather_chunks
from model.parallel.ranks import Parallel, mark_shards
from model.precision import for_products
from model.rope import inverse_frequencies, rotations
from model.sparse import chunk_elements, dense_attention, gathered_attention

DECAY = 4.0  # slot i has the weight exp(-i / DECAY) in the loss
BINS = 10  # number of bins of the predicted acceptance, to measure its calibration


class DraftLayout(NamedTuple):
    """Which context keys each of N blocks of B drafts attends to, and the RoPE factors of the drafts. places int64 [N,
    W], W the window: for each block, the rows of its context keys in the key tensor that a layer of the drafter is
    given; hidden bool [N, W]: true where there is no key (before the document or outside the window); phasors fp32
    [N*B, rope/2, 2]: the RoPE factors of the drafts.

    image: is None because routers read it and drafts are always routed as text, with the router's `bias`, even after an
    image.
    """

    places: Tensor
    hidden: Tensor
    phasors: Tensor
    image: None = None


class Anchors(NamedTuple):
    """The anchors of a batch. shape: the shape [A] or [B, A] of the given tensor; real int64 [N]: the indices of its
    elements that are anchors and not padding (-1); last int64 [N]: for each anchor, the index of the token before it
    among the layout's tokens.
    """

    shape: torch.Size
    real: Tensor
    last: Tensor

    def flatten(self, x: Tensor) -> Tensor:
        """[A, ...] or [B, A, ...] -> [N, ...], without the padding."""
        return x.flatten(0, len(self.shape) - 1).index_select(0, self.real)

    def unflatten(self, x: Tensor) -> Tensor:
        """[N, ...] -> [A, ...] or [B, A, ...], zero at the padding."""
        if len(self.real) != self.shape.numel():
            x = x.new_zeros(self.shape.numel(), *x.shape[1:]).index_copy(0, self.real, x)
        return x.view(*self.shape, *x.shape[1:])


class SplitLayout(NamedTuple):
    """A micro-batch under context parallelism: the layout of all its tokens, which the drafter reads, and that of this
    rank's chunk, which the backbone computes.
    """

    whole: SequenceLayout
    chunk: SequenceLayout

    def to(self, device: torch.device) -> SplitLayout:
        """The same on another device."""
        return SplitLayout(self.whole.to(device), self.chunk.to(device))


class Drafted(NamedTuple):
    """The output of the drafter when the token before each slot is given. The shapes are for anchors [A] of one row;
    with anchors [rows, A], every tensor has an additional leading axis of rows.

    main_x [S, d] is zero at padding; hidden [A, B, d] is taken before the last norm; base_logits fp32 [A, B, V] do not
    include the bias of the Markov head, logits fp32 [A, B, V] do; confidence fp32 [A, B] is taken before the sigmoid.
    """

    main_x: Tensor
    hidden: Tensor
    base_logits: Tensor
    logits: Tensor
    confidence: Tensor


class Draft(NamedTuple):
    """Proposed tokens int64 [A, B], the logits fp32 [A, B, V] that they were chosen from, and confidence logits fp32
    [A, B]. With anchors [rows, A], each of these tensors has a leading axis of rows.
    """

    tokens: Tensor
    logits: Tensor
    confidence: Tensor


class DraftLoss(NamedTuple):
    """The training loss of a batch and its terms.

    The field loss = 0.1 ce + 0.9 l1 + bce is differentiable; each term is a mean over all slots of the batch, weighted
    by `weights`. tau: the expected number of tokens accepted per block (the backbone's token and the accepted drafts),
    averaged over blocks with a supervised slot. The next fields are detached and have the shape of the anchors with a
    last axis of B slots: valid (bool, whether the slot is supervised), weights, alpha (the probability of acceptance, 0
    where not valid) and confidence (logits). expert_load int64 [stages, 2, E] counts tokens per expert.
    """

    loss: Tensor
    ce: Tensor
    l1: Tensor
    bce: Tensor
    tau: Tensor
    valid: Tensor
    weights: Tensor
    alpha: Tensor
    confidence: Tensor
    expert_load: Tensor


@dataclass(frozen=True)
class DraftDenominators:
    """Token and slot counts of a whole optimizer step (all micro-batches, all ranks), which divide the losses.
    num_tokens: the number of non-padding tokens; valid int64 [B]: for each slot, the number of blocks in which it and
    all slots before it are supervised.
    """

    num_tokens: Tensor
    valid: Tensor

    @property
    def weight(self) -> Tensor:
        """The divisor of the step's losses: the sum of the weights of all slots, fp32 (1 if no slot is supervised)."""
        total = (self.valid * slot_weights(len(self.valid), self.valid.device).double()).sum().float()
        return total.where(total > 0, 1.0)

    def to_tensor(self) -> Tensor:
        """The counts as one tensor int64 [1 + B], for an all-reduce."""
        return torch.cat([self.num_tokens.reshape(1), self.valid])

    @classmethod
    def from_tensor(cls, flat: Tensor) -> DraftDenominators:
        return cls(flat[0], flat[1:])


class DraftLosses(NamedTuple):
    """The losses of one micro-batch. `total` is differentiable and already divided by the denominators of the whole
    step, so the totals of all micro-batches add up to the loss of the step.

    The other fields are detached sums: ce_sum, l1_sum and bce_sum, the loss terms weighted over slots; slots int64 [B],
    the number of supervised slots at each position in a block; alpha_sum [B], the sum of their acceptance
    probabilities; accepted_sum, the expected number of accepted tokens of all blocks, including one token of the
    backbone per block; calibration fp64 [BINS, 3], for each bin of predicted acceptance the number of slots, the sum of
    predictions and the sum of true acceptance probabilities; expert_load int64 [stages, 2, E].
    """

    total: Tensor
    ce_sum: Tensor
    l1_sum: Tensor
    bce_sum: Tensor
    slots: Tensor
    alpha_sum: Tensor
    accepted_sum: Tensor
    calibration: Tensor
    expert_load: Tensor


class _Terms(NamedTuple):
    """The loss terms as weighted sums, and the values that they are computed from: valid, weights, alpha and confidence
    [N, B], and accepted [N].
    """

    ce_sum: Tensor
    l1_sum: Tensor
    bce_sum: Tensor
    where: Anchors
    valid: Tensor
    weights: Tensor
    alpha: Tensor
    accepted: Tensor
    confidence: Tensor
    expert_load: Tensor


class MarkovHead(nn.Module):
    """The Markov head: a low-rank bias on the logits that depends on the previous token, with the weights embed [V, r]
    and head [V, r].
    """

    def __init__(self, config: TextConfig):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.dspark_markov_rank)
        self.head = nn.Linear(config.dspark_markov_rank, config.vocab_size, bias=False)

    def bias(self, embedded: Tensor) -> Tensor:
        """The bias fp32 [..., V] from the embedding [..., r] of the previous token."""
        with torch.autocast(embedded.device.type, enabled=False):
            return F.linear(embedded.float(), self.head.weight.float())


class ConfidenceHead(nn.Module):
    """The confidence head: predicts, as a logit, the probability that a draft is accepted."""

    def __init__(self, config: TextConfig):
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.dspark_markov_rank, 1, bias=False)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """The confidence logits fp32 [...], from hidden [..., d] before the last norm and embedded [..., r], the Markov
        embedding of the previous token.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            both = torch.cat([hidden.float(), embedded.float()], dim=-1)
            return F.linear(both, self.proj.weight.float()).squeeze(-1)


class StageOutput(NamedTuple):
    """The output of a stage: the state after it, its routing, and the results that a recomputation of the stage reuses
    (None in the output of `recomputation.run`).
    """

    state: BlockState
    routing: Routing
    first_pass: MoEFirstPass | None


class Stage(Block):
    """A drafter stage: a block like those of the backbone that also attends to context keys. A stage has window
    attention only, and its own number of experts. The first stage also holds the projection and norm that compute
    `main_x`; the last stage holds the final norm, the Markov head and the confidence head.
    """

    def __init__(self, config: TextConfig, stage: int, parallel: Parallel):
        stages, layers = config.num_nextn_predict_layers, config.num_hidden_layers
        inner = replace(
            config,
            compress_ratios=(*config.compress_ratios[:layers], *[0] * stages),
            n_routed_experts=config.dspark_n_routed_experts,
            num_experts_per_tok=config.dspark_num_experts_per_tok,
        )
        super().__init__(inner, layers + stage, parallel)
        if stage == 0:
            width = len(config.dspark_target_layer_ids) * config.hidden_size
            self.main_proj = nn.Linear(width, config.hidden_size, bias=False)
            self.main_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if stage == stages - 1:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.markov_head = MarkovHead(config)
            self.confidence_head = ConfidenceHead(config)

    def forward(  # type: ignore[override]
        self,
        state: BlockState,
        context_keys: Tensor,
        layout: DraftLayout,
        runtime: ForwardOptions,
        first: MoEFirstPass | None = None,
    ) -> StageOutput:
        """Run the stage on the state of N*B drafts. `layout.places` indexes context_keys [M, D]. With
        `runtime.attention="dense"`, the reference attention is used, for one block of drafts at a time. `first`: the
        results of the first pass, given in recomputation.
        """
        with using(runtime.kernels):
            streams = state.streams
            mix = self.hc_attn(streams)
            x = collapse_normed(streams, state.pre_mix, self.attn_norm)
            q, _ = self.attn.queries(x, layout.phasors)
            attend = attend_plainly if runtime.attention == "dense" else attend_in_chunks
            keys = self.attn.window_keys(x, layout.phasors)
            out = attend(q, keys, context_keys, layout, self.attn.attn_sink, self.attn.scale)
            streams = expand(streams, self.attn.project(out, layout.phasors), mix.post, mix.comb)
            pre_mix = mix.pre
            mix = self.hc_ffn(streams)
            y, routing = self.ffn(
                collapse_normed(streams, pre_mix, self.ffn_norm), layout, None, first, runtime.dispatch == "fp8"
            )
            state = BlockState(expand(streams, y, mix.post, mix.comb), mix.pre, state.shared)
        return StageOutput(state, routing, self.ffn.first_pass(routing, y, runtime.keep_combined))


class Drafter(nn.Module):
    """The drafter: all `mtp.*` weights, or this rank's part of them (the experts are split as those of the backbone).

    The drafter uses the embedding, the head and the hidden states of `backbone`, but the backbone's weights are neither
    among the drafter's parameters nor in its state dict.
    """

    def __init__(self, backbone: DeepseekV41):
        super().__init__()
        self.config, self.parallel = backbone.config, backbone.parallel
        text = self.config.text
        stages = nn.ModuleList(Stage(text, stage, self.parallel) for stage in range(text.num_nextn_predict_layers))
        self.mtp = cast(list[Stage], stages)
        self.block_size, self.frequencies = text.dspark_block_size, inverse_frequencies(text, compressed=False)
        self._backbone = (backbone,)  # a tuple, so that the backbone is not registered as a submodule

    @property
    def backbone(self) -> DeepseekV41:
        return self._backbone[0]

    @property
    def runtime(self) -> ForwardOptions:
        """The forward options of the backbone. With `attention="dense"` the drafter also uses its reference
        attention.
        """
        return self.backbone.runtime

    def router_biases(self) -> list[tuple[Tensor, Tensor]]:
        """The router biases of every stage as pairs (bias, bias_vl), fp32 [E] each. Drafts are routed with `bias`, the
        bias for text.
        """
        return [(stage.ffn.gate.bias, stage.ffn.gate.bias_vl) for stage in self.mtp]

    def forward(
        self, input_ids: Tensor, anchors: Tensor, anchor_tokens: Tensor, previous_tokens: Tensor, **batch: Tensor
    ) -> Drafted:
        """Run the drafter when the token before each slot is known.

        input_ids int64 [B, S]. anchors int64 [A] if there is one row, or [B, A] padded with -1: positions in the row;
        an anchor belongs to the document of the token before it. anchor_tokens: the tokens at the anchors, same shape.
        previous_tokens int64 [..., block size]: the token before each slot, starting with the anchor token. batch: the
        other inputs of `DeepseekV41.features`. Raises ValueError for anchors without a real token before them.
        """
        features = self._features(input_ids, batch)
        where = self.locate(anchors, features.layout, input_ids.shape)
        main_x = self.main_x(features.entering)
        hidden, _ = self._blocks(main_x, where, features.layout, where.flatten(anchor_tokens))
        base_logits = self._base_logits(hidden)
        embedded = self._last.markov_head.embed(where.flatten(previous_tokens))
        logits = base_logits + self._last.markov_head.bias(embedded)
        confidence = self._last.confidence_head(hidden, embedded)
        whole = features.layout.unflatten(main_x)
        found = (where.unflatten(x) for x in (hidden, base_logits, logits, confidence))
        return Drafted(whole[0] if anchors.dim() == 1 else whole, *found)

    @torch.no_grad()
    def draft(self, input_ids: Tensor, anchors: Tensor, anchor_tokens: Tensor, **batch: Tensor) -> Draft:
        """Draft greedily: each slot takes the most likely token, on which the Markov bias of the next slot depends. The
        arguments are as in `forward`.
        """
        features = self._features(input_ids, batch)
        where = self.locate(anchors, features.layout, input_ids.shape)
        first = where.flatten(anchor_tokens)
        hidden, _ = self._blocks(self.main_x(features.entering), where, features.layout, first)
        found = self.propose(hidden, first, lambda slot, logits: logits.argmax(-1))
        return Draft(*(where.unflatten(x) for x in found))

    def propose(self, hidden: Tensor, first: Tensor, pick: Callable[[int, Tensor], Tensor]) -> Draft:
        """Choose the draft tokens slot by slot, from the hidden states [N, B, d] and the anchor tokens `first` int64
        [N]. The function `pick(slot, logits [N, V])` returns the tokens int64 [N] chosen for a slot.
        """
        logits, before, tokens, embedded = self._base_logits(hidden), first, [], []
        for slot in range(self.block_size):
            embedded.append(self._last.markov_head.embed(before))
            logits[:, slot] += self._last.markov_head.bias(embedded[-1])
            before = pick(slot, logits[:, slot])
            tokens.append(before)
        confidence = self._last.confidence_head(hidden, torch.stack(embedded, dim=1))
        return Draft(torch.stack(tokens, dim=1), logits, confidence)

    def loss(
        self, input_ids: Tensor, labels: Tensor, anchors: Tensor, detach_confidence: bool = True, **batch: Tensor
    ) -> DraftLoss:
        """Compute the training loss of a batch. labels int64 [B, S] are not shifted, and -100 is ignored; anchors as in
        `forward`. Slots after the end of a document, or after a token without a label, are not supervised.

        detach_confidence: whether the confidence loss trains only the confidence head. Published implementations
        differ: in DeepSpec this loss trains the whole drafter, but an ablation in `speculators` (pull request 848)
        found that harmful.
        """
        terms = self._terms(input_ids, labels, anchors, detach_confidence, batch)
        total, blocks = terms.weights.sum(), terms.valid[:, 0].sum()
        count = total.where(total > 0, 1.0)  # if no slot is supervised, the loss is 0 and not NaN
        ce, l1, bce = (term / count for term in (terms.ce_sum, terms.l1_sum, terms.bce_sum))
        tau = terms.accepted.sum() / blocks.clamp(min=1)
        shown = (terms.where.unflatten(x) for x in (terms.valid, terms.weights, terms.alpha, terms.confidence))
        weights = DraftObjective()
        loss = weights.ce * ce + weights.l1 * l1 + weights.confidence * bce
        found = (loss, *(x.detach() for x in (ce, l1, bce)), tau)
        return DraftLoss(*found, *shown, terms.expert_load)  # type: ignore[call-arg]

    def lay_out(self, input_ids: Tensor, labels: Tensor | None = None, **batch: Any) -> SequenceLayout | SplitLayout:
        """See `DeepseekV41.lay_out`. Under context parallelism the drafter needs all tokens besides its chunk."""
        whole = self.backbone.lay_out_whole(input_ids, labels, **batch)
        if self.parallel.context.size == 1:
            return whole
        return SplitLayout(whole, self.backbone.own_chunk(whole, batch.get("vision_token_types")))

    def loss_denominators(
        self,
        input_ids: Tensor,
        labels: Tensor,
        anchors: Tensor,
        layout: SequenceLayout | SplitLayout | None = None,
        **batch: Tensor,
    ) -> DraftDenominators:
        """The contribution of this micro-batch to the loss denominators of its step, computed without a forward pass:
        under context parallelism, that of the tokens of this rank's chunk and of this rank's share of the anchors.
        """
        layout = layout or self.lay_out(input_ids, labels, **batch)
        whole, chunk = layout if isinstance(layout, SplitLayout) else (layout, layout)
        where = self.locate(anchors, whole, input_ids.shape)
        slots = slots_of(where, whole, input_ids, labels, self.block_size)
        return DraftDenominators(labels.new_full((), chunk.tokens), slots.valid.sum(0))

    def losses(
        self,
        input_ids: Tensor,
        labels: Tensor,
        anchors: Tensor,
        denominators: DraftDenominators,
        objective: DraftObjective = DraftObjective(),  # noqa: B008
        **batch: Tensor,
    ) -> DraftLosses:
        """The training losses of one micro-batch, divided by the denominators of its step. The arguments are as in
        `loss`.
        """
        terms = self._terms(input_ids, labels, anchors, objective.detach_confidence, batch)
        total = objective.ce * terms.ce_sum + objective.l1 * terms.l1_sum + objective.confidence * terms.bce_sum
        sure = torch.sigmoid(terms.confidence[terms.valid])
        bins = (sure * BINS).long().clamp(max=BINS - 1)
        judged = torch.stack([torch.ones_like(sure), sure, terms.alpha[terms.valid]], dim=1).double()
        return DraftLosses(
            total=total / denominators.weight,
            ce_sum=terms.ce_sum.detach(),
            l1_sum=terms.l1_sum.detach(),
            bce_sum=terms.bce_sum.detach(),
            slots=terms.valid.sum(0),
            alpha_sum=terms.alpha.sum(0),
            accepted_sum=terms.accepted.sum(),
            calibration=judged.new_zeros(BINS, 3).index_add(0, bins, judged),
            expert_load=terms.expert_load,
        )

    def _terms(
        self, input_ids: Tensor, labels: Tensor, anchors: Tensor, detach_confidence: bool, batch: dict[str, Tensor]
    ) -> _Terms:
        features = self._features(input_ids, {**batch, "labels": labels})
        layout = features.layout
        where = self.locate(anchors, layout, input_ids.shape)
        slots = slots_of(where, layout, input_ids, labels, self.block_size)
        hidden, routings = self._blocks(self.main_x(features.entering), where, layout, slots.before[:, 0])
        embedded = self._last.markov_head.embed(slots.before)
        rows = slots.valid.flatten().nonzero().flatten()

        def supervised(x: Tensor) -> Tensor:
            return x.flatten(0, 1).index_select(0, rows)

        states = [supervised(self._last.norm(hidden)), features.hidden.index_select(0, supervised(slots.at))]
        if torch.is_autocast_enabled(hidden.device.type):
            states = [state.to(torch.get_autocast_dtype(hidden.device.type)) for state in states]
        head, markov = self.backbone.head.full_weight().detach(), self._last.markov_head.head.weight
        mine = (states[0], head, supervised(embedded), markov)
        nll, distance = draft_distances(*mine, states[1], supervised(slots.target))
        confidence = self._last.confidence_head(*(x.detach() if detach_confidence else x for x in (hidden, embedded)))
        accepted = (1 - distance.detach() / 2).clamp(0, 1).float()
        wrong = F.binary_cross_entropy_with_logits(supervised(confidence), accepted, reduction="none")
        weight = supervised(slots.weights)
        alpha = accepted.new_zeros(slots.valid.numel()).index_copy(0, rows, accepted).view_as(slots.weights)
        return _Terms(
            ce_sum=(weight * nll).sum(),
            l1_sum=(weight * distance).sum(),
            bce_sum=(weight * wrong).sum(),
            where=where,
            valid=slots.valid,
            weights=slots.weights,
            alpha=alpha,
            accepted=slots.valid[:, 0] + alpha.cumprod(1).sum(1),
            confidence=confidence.detach(),
            expert_load=torch.stack([routing.load for routing in routings]),
        )

    def main_x(self, entering: Tensor) -> Tensor:
        """Project the backbone's streams at the target layers [T, target layers * d] to main_x [T, d], from which every
        stage computes its context keys.
        """
        first = self.mtp[0]
        return first.main_norm(first.main_proj(for_products(entering, first.main_proj.weight)))

    def locate(self, anchors: Tensor, layout: SequenceLayout, shape: Sequence[int]) -> Anchors:
        """Find the anchors of rows [B, S] in the layout of all tokens. Under context parallelism every rank gets a
        share of the anchors, and the others count as padding. Raises ValueError if the anchors have a wrong shape, or
        if the position before an anchor is padding or outside the row.
        """
        rows, length = shape
        wanted = "[anchors] of one row" if rows == 1 else f"[{rows}, anchors]"
        if not (anchors.dim() == 2 and len(anchors) == rows or anchors.dim() == 1 and rows == 1):
            raise ValueError(f"anchors must be {wanted}, got {list(anchors.shape)}")
        flat = anchors.flatten()
        real = (flat != -1).nonzero().flatten()
        flat = flat.index_select(0, real)
        place = real.div(anchors.shape[-1], rounding_mode="floor") * length + flat - 1
        wrong = (flat < 1) | (flat > length)
        last = place if layout.gather is None else torch.searchsorted(layout.gather, place).clamp(max=layout.tokens - 1)
        if layout.gather is not None:
            wrong |= layout.gather.index_select(0, last) != place
        if bool(wrong.any()):
            at = int(flat[wrong][0])
            raise ValueError(
                f"anchors: {at} has no token before it; allowed are 1..{length} if a non-padding token precedes, or -1"
            )
        share = slice(self.parallel.context.rank, None, self.parallel.context.size)
        return Anchors(anchors.shape, real[share], last[share])

    def _features(self, input_ids: Tensor, batch: dict[str, Any]) -> Features:
        """The backbone's states for all tokens. Under context parallelism every rank computes those of its chunk and
        receives the others, which need no gradient.
        """
        layout = batch.get("layout") or self.lay_out(input_ids, **batch)
        whole, chunk = layout if isinstance(layout, SplitLayout) else (layout, layout)
        found = self.backbone.features(
            self.config.text.dspark_target_layer_ids, input_ids, **{**batch, "layout": chunk}
        )
        states = (gather_chunks(x, whole.tokens, self.parallel.context) for x in (found.hidden, found.entering))
        return Features(whole, *states)

    def _blocks(
        self, main_x: Tensor, where: Anchors, layout: SequenceLayout, first: Tensor
    ) -> tuple[Tensor, list[Routing]]:
        """Run all stages with the context main_x [T, d] and the anchor tokens `first` int64 [N]; returns hidden [N, B,
        d] and the routing of each stage. For a batch without anchors, one block is run and its result is discarded,
        because every rank must take part in the exchange of expert inputs, forward and backward.
        """
        context_keys = [stage.attn.window_keys(main_x, layout.phasors) for stage in self.mtp]
        if len(first):
            return self.run(first, self.draft_layout(where, layout), context_keys)
        nowhere = first.new_zeros(1)
        hidden, routings = self.run(nowhere, self.draft_layout(where._replace(last=nowhere), layout), context_keys)
        return hidden[:0], [routing.none() for routing in routings]

    def draft_layout(self, where: Anchors, layout: SequenceLayout) -> DraftLayout:
        """Make the `DraftLayout` of the anchors `where`; its places are indices of tokens in the sequence layout."""
        window = self.config.text.sliding_window
        index = where.last[:, None] - torch.arange(window - 1, -1, -1, device=where.last.device)
        hidden = index < layout.document_start.index_select(0, where.last)[:, None]
        position = layout.position.index_select(0, where.last) + 1
        return DraftLayout(index.clamp(min=0), hidden, self.phasors(position))

    def phasors(self, anchors: Tensor) -> Tensor:
        """The RoPE factors fp32 [N*B, rope/2, 2] of all drafts in blocks that begin at the positions `anchors` int64
        [N].
        """
        positions = anchors[:, None] + torch.arange(self.block_size, device=anchors.device)
        return rotations(positions.flatten(), self.frequencies)

    def run(self, first: Tensor, layout: DraftLayout, context_keys: Sequence[Tensor]) -> tuple[Tensor, list[Routing]]:
        """Run all stages, each with its own context keys [M, D]. Returns hidden [N, B, d] and the routing of each
        stage.
        """
        noise = torch.full((len(first), self.block_size), self.config.text.dspark_noise_token_id, device=first.device)
        noise[:, 0] = first
        with torch.no_grad():
            x = self.backbone.embed(noise.flatten())
        state, routings = self.backbone.init_streams(x), []
        for stage, keys in zip(self.mtp, context_keys, strict=True):
            result = recomputation.run(stage, state, keys, layout, self.runtime, recompute=self.runtime.recompute)
            state = result.state
            routings.append(result.routing)
        with using(self.runtime.kernels):
            hidden = for_products(collapse(state.streams, state.pre_mix), self._last.norm.weight)
            return hidden.unflatten(0, noise.shape), routings

    def remember(self, entering: Tensor, step: Step) -> None:
        """Add the context keys of the T tokens of a step to the cache. entering [T, target layers * d]: the backbone's
        streams of these tokens at the target layers.
        """
        main_x, layers = self.main_x(entering), self.config.text.num_hidden_layers
        for number, stage in enumerate(self.mtp):
            step.layer(layers + number).keep(stage.attn.window_keys(main_x, step.layout.phasors))

    def recall(self, first: Tensor, cache: Cache, rows: Sequence[int]) -> Tensor:
        """Run the drafter on the context keys in the cache; returns hidden [N, B, d]. first int64 [N]: the anchor token
        of each cache row, which follows the row's cached tokens.
        """
        window, layers = self.config.text.sliding_window, self.config.text.num_hidden_layers
        device, kind = first.device, first.device.type
        anchors = torch.tensor([cache.sequence(row).length for row in rows])
        begin = torch.tensor([cache.sequence(row).decoder_from for row in rows])
        position = anchors[:, None] - torch.arange(window, 0, -1)
        ring = (torch.tensor(rows)[:, None] * window + torch.arange(window)).flatten().to(device)
        places = torch.arange(len(rows))[:, None] * window + position % window
        layout = DraftLayout(
            places.to(device), (position < begin[:, None]).to(device), self.phasors(anchors.to(device))
        )
        dtype = self._last.attn.wkv.weight.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        keys = [cache.window[layers + number].read(ring, dtype) for number in range(len(self.mtp))]
        return self.run(first, layout, keys)[0]

    def _base_logits(self, hidden: Tensor) -> Tensor:
        return self.backbone.head(self._last.norm(hidden))

    @property
    def _last(self) -> Stage:
        return self.mtp[-1]


class Slots(NamedTuple):
    """The slots of N blocks; every field is [N, B]. at int64: the index of the token before the slot, where the
    backbone predicts the same token (the last token of the document if the slot is after its end); before int64: the id
    of that token; target int64: the token to predict, or -100; valid bool: whether this slot and all slots before it
    have a target; weights fp32: the weight of the slot in the loss.
    """

    before: Tensor
    at: Tensor
    target: Tensor
    valid: Tensor
    weights: Tensor


def slots_of(where: Anchors, layout: SequenceLayout, input_ids: Tensor, labels: Tensor, block_size: int) -> Slots:
    """The targets and weights of all slots of a batch, computed without a forward pass. labels int64 [B, S] are not
    shifted.
    """
    ids, wanted = layout.flatten(input_ids), layout.flatten(labels)
    at = where.last[:, None] + 1 + torch.arange(block_size + 1, device=ids.device)
    document = layout.document.index_select(0, where.last)
    end = layout.document_start.index_select(0, where.last) + layout.document_lengths.index_select(0, document) - 1
    inside, at = at <= end[:, None], at.minimum(end[:, None])
    target = torch.where(inside, wanted[at], -100)[:, 1:]
    valid = (target >= 0).cumprod(1).bool()
    return Slots(ids[at[:, :-1]], at[:, :-1], target, valid, valid * slot_weights(block_size, ids.device))


def slot_weights(block_size: int, device: torch.device) -> Tensor:
    """The weight of each slot of a block in the loss, fp32 [B]."""
    return torch.exp(-torch.arange(block_size, device=device, dtype=torch.float32) / DECAY)


def attend_in_chunks(
    q: Tensor, keys: Tensor, context: Tensor, layout: DraftLayout, sink: Tensor, scale: float
) -> Tensor:
    """Attention of drafts q [N*B, H, D] over their context keys and the keys [N*B, D] of their own block; returns [N*B,
    H, D].

    Context keys are gathered for a few blocks at a time, to bound memory, and gathered again in the backward pass.
    """
    blocks, window = layout.places.shape
    size, heads, dim = len(keys) // blocks, *q.shape[1:]
    step = max(1, chunk_elements(q.device) // (size * heads * (window + size) + (window + size) * dim))
    q, keys = q.view(blocks, size * heads, dim), keys.view(blocks, size, dim)
    sink, found = sink.repeat(size), []

    def attend(q: Tensor, keys: Tensor, places: Tensor, hidden: Tensor) -> Tensor:
        near = context.index_select(0, places.flatten()).view(*places.shape, dim)
        hidden = F.pad(hidden, (0, size))  # every draft sees all keys of its own block
        return gathered_attention(q, torch.cat([near, keys], dim=1), hidden, sink, scale)

    for at in range(0, blocks, step):
        part = slice(at, at + step)
        inputs = (q[part], keys[part], layout.places[part], layout.hidden[part])
        again = torch.is_grad_enabled() and step < blocks
        found.append(checkpoint(attend, *inputs, use_reentrant=False) if again else attend(*inputs))
    return torch.cat(found).view(-1, heads, dim)


def attend_plainly(q: Tensor, keys: Tensor, context: Tensor, layout: DraftLayout, sink: Tensor, scale: float) -> Tensor:
    """The reference for `attend_in_chunks`: it calls `dense_attention` for one block at a time, passing all keys that
    the block sees as `entries`.
    """
    found = []
    for places, hidden, own_q, own in zip(
        layout.places, layout.hidden, *(x.chunk(len(layout.places)) for x in (q, keys)), strict=True
    ):
        seen = torch.cat([context[places[~hidden]], own])
        every = torch.arange(len(seen), device=q.device).expand(len(own), -1)
        nothing = torch.full((len(own),), len(own), device=q.device)  # an empty window, which starts after the last key
        found.append(dense_attention(own_q, own, nothing, seen, every, sink, scale)[0])
    return torch.cat(found)


def build_drafter(backbone: DeepseekV41, seed: int = 0) -> Drafter:
    """Build a newly initialised drafter on the device and in the dtype of the backbone. Raises ValueError that lists
    the missing or invalid drafter settings in the configuration.
    """
    drafter, text = allocate_drafter(backbone), backbone.config.text
    if backbone.embed.weight.device.type != "meta":
        init_weights(drafter, text.initializer_range, text.hc_mult, seed)
    return drafter


def allocate_drafter(backbone: DeepseekV41) -> Drafter:
    """Build a drafter with uninitialised parameters on the device of the backbone."""
    problems = [f"text_config.{problem}" for problem in drafter_problems(backbone.config.text)]
    if problems:
        raise ValueError("this configuration does not describe a drafter:\n  " + "\n  ".join(problems))
    with torch.device("meta"):
        drafter = Drafter(backbone)
    drafter.frequencies = inverse_frequencies(backbone.config.text, compressed=False)
    weight = backbone.embed.weight
    drafter = cast_model(drafter, weight.dtype).to_empty(device=weight.device)
    mark_shards(drafter)
    return drafter


def load_drafter(folder: str | Path, backbone: DeepseekV41) -> Drafter:
    """Load the drafter of a checkpoint folder (tensors `mtp.*`, quantised, bf16 or fp32). `backbone` must have been
    loaded from the same folder.

    Raises FileNotFoundError for a missing file, ValueError for a folder without a drafter or with another backbone, and
    ValueError that lists every tensor that is missing, unexpected or of the wrong shape or dtype.
    """
    folder = Path(folder)
    config = ModelConfig.load(folder)
    if not any(name.startswith("mtp.") for name in read_headers(folder)):
        raise ValueError(f"{folder} contains no drafter: it has no tensor with a name mtp.*")
    # the number of Engram rows, which an export also writes, is not compared because it follows from other keys
    if len({replace(text, engram_num_embeddings=()) for text in (config.text, backbone.config.text)}) > 1:
        raise ValueError(
            f"{folder / 'config.json'}: text_config differs from that of the backbone given for the drafter"
        )
    drafter = allocate_drafter(backbone)
    skeleton = allocate_model(config, None, None, "meta", torch.float32)
    load_weights(drafter, folder, beside=list(released_tensors(skeleton)))
    return drafter
