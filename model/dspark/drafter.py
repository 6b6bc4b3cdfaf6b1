"""The drafter: forward pass, greedy drafts, losses, and decoding with the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import recomputation
from model.backbone import DeepseekV41, Features
from model.cache.pages import Cache
from model.cache.step import Step
from model.config import DraftObjective, ForwardOptions
from model.dspark.layout import Anchors, DraftLayout, SplitLayout
from model.dspark.losses import BINS, DraftDenominators, DraftLoss, DraftLosses, Terms, slots_of
from model.dspark.stage import Stage
from model.hyper import collapse
from model.kernels.switch import using
from model.layout import SequenceLayout
from model.loss import draft_distances
from model.moe import Routing
from model.parallel.context import gather_chunks
from model.precision import for_products
from model.rope import inverse_frequencies, rotations


class Drafted(NamedTuple):
    """The output of the drafter when the token before each slot is known. The shapes below are for anchors [A] of one
    row; with anchors [rows, A], every tensor has an additional leading axis of rows.

    main_x: [S, d], zero at padding.
    hidden: [A, B, d], the hidden states before the last norm.
    base_logits: fp32 [A, B, V], the logits without the bias of the Markov head.
    logits: fp32 [A, B, V], the logits with the bias of the Markov head.
    confidence: fp32 [A, B], the confidence before the sigmoid.
    """

    main_x: Tensor
    hidden: Tensor
    base_logits: Tensor
    logits: Tensor
    confidence: Tensor


class Draft(NamedTuple):
    """The proposed tokens int64 [A, B], the logits fp32 [A, B, V] from which the tokens were chosen, and the confidence
    logits fp32 [A, B]. With anchors [rows, A], each of these tensors has a leading axis of rows.
    """

    tokens: Tensor
    logits: Tensor
    confidence: Tensor


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

        input_ids: int64 [B, S].
        anchors: int64 [A] if there is one row, or [B, A] padded with -1; positions in the row. An anchor belongs to the
        document of the token before it.
        anchor_tokens: the tokens at the anchors, in the shape of `anchors`.
        previous_tokens: int64 [..., block size], the token before each slot, starting with the anchor token.
        batch: the other inputs of `DeepseekV41.features`.
        Raises ValueError for an anchor whose preceding token is padding or missing.
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
        """Compute the training loss of a batch. `labels` (int64 [B, S]) are not shifted, and the label -100 is ignored;
        `anchors` are given as in `forward`. Slots after the end of a document, or after a token without a label, are
        not supervised.

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
        """Compute the layout of a batch, see `DeepseekV41.lay_out`. Under context parallelism, the result has the
        layout of all tokens and the layout of this rank's chunk, because the drafter needs both.
        """
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
        """The contribution of this micro-batch to the loss denominators of its step, computed without a forward pass.
        Under context parallelism, only the tokens of this rank's chunk and this rank's part of the anchors are counted.
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
    ) -> Terms:
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
        return Terms(
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
        """Find the anchors of rows [B, S] in the layout of all tokens. Under context parallelism, every rank processes
        a part of the anchors and treats the other anchors as padding. Raises ValueError if the anchors have a wrong
        shape, or if the position before an anchor is padding or outside the row.
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
        """The backbone's states for all tokens. Under context parallelism, every rank computes the states of its own
        chunk and receives the states of other chunks, which need no gradient.
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
        """Make the `DraftLayout` of the anchors `where`. The field `places` contains indices of tokens in the sequence
        layout.
        """
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
        """Add the context keys of the T tokens of a step to the cache. `entering` [T, target layers * d] contains the
        backbone's residual streams of these tokens at the target layers.
        """
        main_x, layers = self.main_x(entering), self.config.text.num_hidden_layers
        for number, stage in enumerate(self.mtp):
            step.layer(layers + number).keep(stage.attn.window_keys(main_x, step.layout.phasors))

    def recall(self, first: Tensor, cache: Cache, rows: Sequence[int]) -> Tensor:
        """Run the drafter on the context keys in the cache; returns hidden [N, B, d]. `first` (int64 [N]) contains the
        anchor token of each cache row, that is the token after the row's cached tokens.
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
