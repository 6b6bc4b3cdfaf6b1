"""The V4.1 transformer: token embedding, n residual streams through all blocks, collapse to one stream, norm and head.

Read this first; `model/__init__.py` says what to read next.
In shapes, B is the number of rows, S the number of positions, T the number of non-padding tokens of the flattened
batch, n the number of residual streams, d the hidden size and V the vocabulary size.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from model import recomputation
from model.attention import Attention, CrossLayerState
from model.cache.step import LayerCache, Step
from model.chunk import chunk_of
from model.config import ForwardOptions, LossWeights, ModelConfig, TextConfig
from model.engram import Engram, engram_rows
from model.hyper import HyperConnection, collapse_normed, expand
from model.indexer import IndexerLossInputs
from model.kernels.switch import using
from model.layout import SequenceLayout, bound_windows, build_layout, prompt_lengths
from model.loss import Objective, cross_entropy_sum
from model.moe import MoE, MoEFirstPass, Routing, check_routing
from model.norm import RMSNorm
from model.offload import HostCopies
from model.parallel.ranks import ONE_PROCESS, Parallel
from model.parallel.tables import Head, Lookup, Table
from model.rounding import set_rounding
from model.training_losses import LossDenominators, Losses, compute_losses, count_denominators
from model.vision import END, IMAGE, NEWLINE, START, Aligner, VisionTower


class BlockState(NamedTuple):
    """The state that a block passes to the next block: residual streams [T, n, d], the weights fp32 [T, n] with which
    the next sublayer collapses the streams, and the cross-layer attention state.
    """

    streams: Tensor
    pre_mix: Tensor
    shared: CrossLayerState

    def at(self, tokens: Tensor) -> BlockState:
        """The state of only the tokens with the given int64 indices; its cross-layer state is empty until a Full layer
        fills it.
        """
        return BlockState(self.streams.index_select(0, tokens), self.pre_mix.index_select(0, tokens), CrossLayerState())


class FirstPass(NamedTuple):
    """The results of a block's first forward pass that the recomputation of the block reuses, see `Attention` and
    `MoE`.
    """

    shared: CrossLayerState
    moe: MoEFirstPass


class BlockOutput(NamedTuple):
    """The output of a block: the state (None in a `BackboneOutput`), the cross-layer attention state, indexer loss
    inputs and attention masses (see `AttentionOutput`), the routing, and entering [T, d]. `entering` is the mean of the
    residual streams before the attention and after Engram, which a drafter reads (None unless requested). `first_pass`:
    the results that a recomputation of the block reuses (None in the output of `run_block`).
    """

    state: BlockState | None
    shared: CrossLayerState
    indexer_loss_inputs: IndexerLossInputs | None
    attention_mass: Tensor | None
    dense_attention_mass: Tensor | None
    routing: Routing
    entering: Tensor | None = None
    first_pass: FirstPass | None = None


class Block(nn.Module):
    """One transformer block: Engram (in some layers), attention and MoE. The attention and the MoE read and write the
    residual streams through their own mHC coefficients.
    """

    def __init__(self, config: TextConfig, layer: int, parallel: Parallel):
        super().__init__()
        self.engram = Engram(config, layer, parallel.tables) if layer in config.engram_layer_ids else None
        self.hc_attn = HyperConnection(config)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, layer)
        self.hc_ffn = HyperConnection(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn = MoE(config, layer, parallel.experts)

    def forward(
        self,
        state: BlockState,
        lookup: Lookup | None,
        layout: SequenceLayout,
        runtime: ForwardOptions,
        replayed_experts: Tensor | None = None,
        cache: LayerCache | None = None,
        for_drafter: bool = False,
        first: FirstPass | None = None,
    ) -> BlockOutput:
        """Run the block. In single-pass mHC, the residual streams are collapsed to a sublayer's input with coefficients
        that the previous sublayer computed. `lookup`: the looked-up rows of the Engram table, or None;
        `replayed_experts` int64 [T, k]: experts to use, see `Gate`; `cache`: see `Attention`; `for_drafter`: whether to
        return `BlockOutput.entering`; `first`: the results of the first pass, passed only in recomputation.
        """
        first_shared, first_moe = first or (None, None)
        with using(runtime.kernels):
            streams = self._apply_engram(state.streams, lookup, layout)
            entering = streams.mean(1) if for_drafter else None
            mix = self.hc_attn(streams)
            x = collapse_normed(streams, state.pre_mix, self.attn_norm)
            attended = self.attn(x, layout, state.shared, runtime, cache, first_shared)
            streams = expand(streams, attended.output, mix.post, mix.comb)
            pre_mix = mix.pre
            mix = self.hc_ffn(streams)
            y, routing = self.ffn(
                collapse_normed(streams, pre_mix, self.ffn_norm),
                layout,
                replayed_experts,
                first_moe,
                runtime.dispatch == "fp8",
            )
            state = BlockState(expand(streams, y, mix.post, mix.comb), mix.pre, attended.shared)
        reported = (
            attended.shared,
            attended.indexer_loss_inputs,
            attended.attention_mass,
            attended.dense_attention_mass,
            routing,
            entering,
            FirstPass(attended.shared.detached(), self.ffn.first_pass(routing, y, runtime.keep_combined)),
        )
        return BlockOutput(state, *reported)

    def prefill_kv(
        self,
        state: BlockState,
        lookup: Lookup | None,
        layout: SequenceLayout,
        runtime: ForwardOptions,
        cache: LayerCache,
    ) -> None:
        """Compute only the main KV and index keys of a Full layer and store them in the cache."""
        with using(runtime.kernels):
            streams = self._apply_engram(state.streams, lookup, layout)
            x = collapse_normed(streams, state.pre_mix, self.attn_norm)
            self.attn.compress(x, layout, state.shared, runtime, cache)

    def _apply_engram(self, streams: Tensor, lookup: Lookup | None, layout: SequenceLayout) -> Tensor:
        return streams if self.engram is None else self.engram(streams, lookup, layout)


class BackboneOutput(NamedTuple):
    """The result of a pass through all blocks: hidden states [T, d] after the final norm, and the outputs of every
    block.

    attention_mass: for each layer with an indexer, the attention mass summed over the layers that use its selection.
    streams: the residual streams that enter each block, only if requested.
    """

    hidden: Tensor
    blocks: list[BlockOutput]
    attention_mass: dict[int, Tensor]
    dense_attention_mass: dict[int, Tensor]
    streams: list[Tensor]


@dataclass
class Output:
    """The output of a model: logits fp32 [B, S, V]; the 0-d loss (mean over supervised targets) if labels were given;
    hidden_states, the residual streams [B, S, n, d] that enter each block, if requested.
    """

    logits: Tensor
    loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class Features(NamedTuple):
    """The inputs for training a drafter: the layout, the hidden states [T, d] after the final norm, and entering [T,
    layers * d], the concatenation over several layers of the mean of the residual streams before the attention.
    """

    layout: SequenceLayout
    hidden: Tensor
    entering: Tensor


class DeepseekV41(nn.Module):
    """A V4.1 language model with an optional vision tower, or this rank's part of such a model (see `Parallel`)."""

    token_map: Tensor | None  # maps token ids to Engram's compressed ids

    def __init__(
        self,
        config: ModelConfig,
        runtime: ForwardOptions | None = None,
        parallel: Parallel = ONE_PROCESS,
        loss_weights: LossWeights | None = None,
    ):
        super().__init__()
        text = config.text
        self.config, self.runtime, self.parallel = config, runtime or ForwardOptions(), parallel
        self.loss_weights = loss_weights or LossWeights()
        self.embed = Table(text.vocab_size, text.hidden_size, parallel.vocabulary)
        blocks = nn.ModuleList(Block(text, layer, parallel) for layer in range(text.num_hidden_layers))
        self.layers = cast(list[Block], blocks)  # type checkers do not know the element type of an nn.ModuleList
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps)
        self.head = Head(text.hidden_size, text.vocab_size, parallel.vocabulary)
        if config.vision is not None:
            self.vision = VisionTower(config.vision)
            self.aligner = Aligner(config.vision, text.hidden_size)
            self.image_start = nn.Parameter(torch.empty(text.hidden_size))
            self.image_end = nn.Parameter(torch.empty(text.hidden_size))
            self.image_newline = nn.Parameter(torch.empty(text.hidden_size))
        self.register_buffer("token_map", None, persistent=False)  # set by `build_model`
        set_rounding(self, self.runtime)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        seq_lens: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_hws: Tensor | None = None,
        vision_token_types: Tensor | None = None,
        routing: Tensor | None = None,
        replay_start: Tensor | None = None,
        output_hidden_states: bool = False,
        logits_to_keep: int = 0,
    ) -> Output:
        """Compute the logits of all positions, for inference and comparison with other implementations.

        input_ids, labels int64 [B, S] (labels not shifted, -100 ignored); attention_mask int64 [B, S] or seq_lens
        int64 [B, documents] (lengths of packed documents); pixel_values [patches, 3, p, p], image_grid_hws int64
        [images, 2], vision_token_types int64 [B, S] (-1 text, 0 START, 1 IMAGE, 2 NEWLINE, 3 END); routing
        int16 [B, S, layers, experts per token]: experts to use instead of the router's choice (-1: the router's
        choice); replay_start int64 [B, documents]: see `build_layout`; logits_to_keep: compute the logits only for this
        many last positions of each row (0: for all). Logits at padding are zero.
        """
        layout = self.lay_out(
            input_ids,
            labels,
            attention_mask=attention_mask,
            seq_lens=seq_lens,
            vision_token_types=vision_token_types,
            replay_start=replay_start,
            routing=routing,
        )
        inputs = (input_ids, layout, pixel_values, image_grid_hws, vision_token_types, routing)
        trace = self.run_backbone(*inputs, keep_streams=output_hidden_states)
        streams = tuple(layout.unflatten(s) for s in trace.streams) if output_hidden_states else None
        if logits_to_keep and labels is None:
            return Output(self.head(layout.unflatten(trace.hidden)[:, -logits_to_keep:]), None, streams)
        logits = self.head(trace.hidden)
        loss = None
        if labels is not None:
            targets = layout.targets(labels)
            loss = nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
            loss = loss / (targets >= 0).sum().clamp(min=1)  # without any target the loss is 0, not NaN
        return Output(layout.unflatten(logits)[:, -logits_to_keep:], loss, streams)

    @torch.no_grad()
    def features(
        self,
        layers: Sequence[int],
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        seq_lens: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_hws: Tensor | None = None,
        vision_token_types: Tensor | None = None,
        layout: SequenceLayout | None = None,
    ) -> Features:
        """Run one forward pass without gradients and return the inputs of a drafter that reads the given layers. The
        arguments other than the layers are as in `losses`; labels are used only to find the ends of prompts for
        `runtime.decoder_replay`.
        """
        layout = layout or self.lay_out(
            input_ids,
            labels,
            attention_mask=attention_mask,
            seq_lens=seq_lens,
            vision_token_types=vision_token_types,
        )
        inputs = (input_ids, layout, pixel_values, image_grid_hws, vision_token_types)
        trace = self.run_backbone(*inputs, for_drafter=layers)
        return Features(layout, trace.hidden, torch.cat([trace.blocks[layer].entering for layer in layers], dim=-1))

    def loss_denominators(
        self, input_ids: Tensor, labels: Tensor, layout: SequenceLayout | None = None, **batch: Tensor
    ) -> LossDenominators:
        """The contribution of one micro-batch to the loss denominators of the step, computed without a forward pass.
        The arguments are as in `losses`.
        """
        layout = layout or self.lay_out(input_ids, labels, **batch)
        targets = layout.targets(labels)
        return count_denominators(self.config.text, layout, targets >= 0)

    def losses(
        self,
        input_ids: Tensor,
        labels: Tensor,
        denominators: LossDenominators,
        attention_mask: Tensor | None = None,
        seq_lens: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_hws: Tensor | None = None,
        vision_token_types: Tensor | None = None,
        routing: Tensor | None = None,
        replay_start: Tensor | None = None,
        prompt_lens: Tensor | None = None,
        objective: Objective | None = None,
        layout: SequenceLayout | None = None,
    ) -> Losses:
        """Compute the training losses of one micro-batch, divided by the loss denominators of its step. Most arguments
        are as in `forward`.

        `prompt_lens`, of the shape of `seq_lens`: the number of prompt tokens of each document, used by
        `runtime.decoder_replay`; without it, a prompt ends at the first supervised token. `objective` replaces the
        cross-entropy, and `lm_sum` is then the sum of the objective. `layout`: the result of `lay_out` for this batch,
        if `lay_out` was already called.
        """
        layout = layout or self.lay_out(
            input_ids,
            labels,
            attention_mask=attention_mask,
            seq_lens=seq_lens,
            vision_token_types=vision_token_types,
            replay_start=replay_start,
            prompt_lens=prompt_lens,
            routing=routing,
        )
        trace = self.run_backbone(input_ids, layout, pixel_values, image_grid_hws, vision_token_types, routing)
        targets = layout.targets(labels)
        supervised = targets >= 0
        rows = layout.supervised
        if rows is None:  # the layout was computed without labels
            rows = supervised.nonzero().flatten()
        hidden = trace.hidden.index_select(0, rows)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        if objective is None:
            weight, shard = self.head.weight_and_shard()
            lm_sum = cross_entropy_sum(hidden, weight, targets.index_select(0, rows), shard)
        else:
            places = rows if layout.gather is None else layout.gather.index_select(0, rows)
            lm_sum = objective(hidden, self.head.full_weight(), targets.index_select(0, rows), places + 1)
        with using(self.runtime.kernels):
            return compute_losses(
                lm_sum,
                supervised,
                [block.routing for block in trace.blocks],
                [(trace.blocks[source].indexer_loss_inputs, mass) for source, mass in trace.attention_mass.items()],
                layout,
                self.loss_weights,
                denominators,
                self.runtime.train_indexer,
            )

    def router_biases(self) -> list[tuple[Tensor, Tensor]]:
        """The router biases of every layer as pairs (bias for text, bias for images), fp32 [E] each; the balancing rule
        updates them.
        """
        return [(layer.ffn.gate.bias, layer.ffn.gate.bias_vl) for layer in self.layers]

    def lay_out(self, input_ids: Tensor, labels: Tensor | None = None, **batch: Tensor | None) -> SequenceLayout:
        """Check a batch and compute its sequence layout. With `runtime.decoder_replay`, the sliding windows of decoder
        layers are bounded as in generation. Call this function once, while the batch is still on the CPU, because it is
        the only function that reads the values of the batch. Under context parallelism all ranks of a group get the
        same batch, and the layout is that of this rank's chunk. batch: as in `lay_out_whole`.
        """
        whole = self.lay_out_whole(input_ids, labels, **batch)
        layout = self.own_chunk(whole, batch.get("vision_token_types"))
        if labels is None:
            return layout
        return replace(layout, supervised=(layout.targets(labels) >= 0).nonzero().flatten())

    def lay_out_whole(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        seq_lens: Tensor | None = None,
        vision_token_types: Tensor | None = None,
        replay_start: Tensor | None = None,
        prompt_lens: Tensor | None = None,
        routing: Tensor | None = None,
        **_: Tensor | None,
    ) -> SequenceLayout:
        """As `lay_out`, but returns the layout of all tokens also under context parallelism."""
        layout = build_layout(self.config.text, input_ids, attention_mask, seq_lens, vision_token_types, replay_start)
        _check_ids(layout.flatten(input_ids), input_ids, self.config.text.vocab_size)
        if routing is not None:
            check_routing(self.config.text, routing, layout.rows, layout.row_length)
        if labels is not None:
            layout = self._with_labels(layout, input_ids, labels, seq_lens, prompt_lens)
        return layout

    def own_chunk(self, layout: SequenceLayout, vision_token_types: Tensor | None = None) -> SequenceLayout:
        """This rank's chunk of `layout`, the layout of all tokens; without context parallelism, `layout` itself."""
        if self.parallel.context.size == 1:
            return layout
        takes_feature = None if vision_token_types is None else vision_token_types == IMAGE
        return chunk_of(layout, self.config.text, self.parallel.context, takes_feature)

    def _with_labels(
        self,
        layout: SequenceLayout,
        input_ids: Tensor,
        labels: Tensor,
        seq_lens: Tensor | None,
        prompt_lens: Tensor | None,
    ) -> SequenceLayout:
        """Check the labels and, with `runtime.decoder_replay`, bound the sliding windows of decoder layers by the ends
        of prompts.
        """
        text = self.config.text
        if labels.shape != input_ids.shape:
            raise ValueError(f"labels must be [{layout.rows}, {layout.row_length}], got {list(labels.shape)}")
        flat = layout.flatten(labels)
        wrong = flat[((flat < 0) & (flat != -100)) | (flat >= text.vocab_size)]
        if wrong.numel():
            raise ValueError(f"labels contain {int(wrong[0])}; allowed are -100 (ignored) and 0..{text.vocab_size - 1}")
        if not self.runtime.decoder_replay:
            return layout
        lengths = prompt_lengths(layout, flat) if prompt_lens is None else prompt_lens[seq_lens > 0]
        start = (lengths - text.sliding_window).clamp(min=0)[layout.document]
        bounded = bound_windows(layout.window_start, layout.position, layout.document_start, start)
        return replace(layout, decoder_window_start=bounded)

    def run_backbone(
        self,
        input_ids: Tensor,
        layout: SequenceLayout,
        pixel_values: Tensor | None,
        image_grid_hws: Tensor | None,
        vision_token_types: Tensor | None,
        routing: Tensor | None = None,
        keep_streams: bool = False,
        for_drafter: Sequence[int] = (),
    ) -> BackboneOutput:
        """Run all layers and the final norm on the tokens of a layout.

        The inputs are as in `forward`. routing: the experts that process every token, in place of the routers' choice.
        keep_streams: whether to return the residual streams that enter each block. for_drafter: the layers for which
        `BlockOutput.entering` is returned, because a drafter reads it.
        """
        if routing is not None:
            routing = layout.flatten(routing).long()
        tokens = layout.flatten(input_ids)
        x = self.embed_batch(tokens, layout, pixel_values, image_grid_hws, vision_token_types)
        layers = range(self.config.text.num_hidden_layers)
        lookups = self.look_up(layers, layout.flatten_with_lookback(input_ids), layout)
        state, streams, blocks = self.init_streams(x), [], []
        mass: dict[int, Tensor] = {}
        dense_mass: dict[int, Tensor] = {}
        host = HostCopies() if self.runtime.offload == "inputs" else None
        for layer in layers:
            replayed_experts = None if routing is None else routing[:, layer]
            if keep_streams:
                streams.append(state.streams)
            result = self.run_block(layer, state, lookups, layout, replayed_experts, None, layer in for_drafter, host)
            state = result.state
            for sums, part in ((mass, result.attention_mass), (dense_mass, result.dense_attention_mass)):
                if part is not None:
                    source = self.config.text.index_source(layer)
                    sums[source] = sums[source] + part if source in sums else part
            blocks.append(result._replace(state=None, attention_mass=None, dense_attention_mass=None))
        return BackboneOutput(self.final_hidden(state), blocks, mass, dense_mass, streams)

    def look_up(
        self, layers: Container[int], tokens: Tensor, layout: SequenceLayout, step: Step | None = None
    ) -> dict[int, Lookup]:
        """Look up the Engram rows of some layers for `tokens`, int64 [b + T] (see `engram_rows`). The rows depend only
        on the tokens, so with sharded tables all rows of the batch are requested before the first block runs.
        """
        text, known, found = self.config.text, self.token_map, {}
        for layer in filter(layers.__contains__, text.engram_layer_ids):
            rows = step.engram_rows(layer, known) if step else engram_rows(text, layer, known, tokens, layout)
            found[layer] = self.layers[layer].engram.embed.look_up(rows)
        return found

    def init_streams(self, x: Tensor) -> BlockState:
        """The input of the first block: a copy of the embeddings [T, d] in every residual stream."""
        n = self.config.text.hc_mult
        if self.runtime.stream_dtype == "bf16":
            x = x.to(torch.bfloat16)
        streams = x.unsqueeze(1).repeat(1, n, 1)
        exchanging = self.parallel.experts.size > 1 or self.parallel.context.size > 1
        if exchanging and torch.is_grad_enabled() and not streams.requires_grad:
            # Every rank must take part in the backward pass of the expert exchange, even if no parameter of this batch
            # needs a gradient.
            streams.requires_grad_()
        pre_mix = torch.zeros(x.shape[0], n, dtype=torch.float32, device=x.device)
        pre_mix[:, 0] = 1.0
        return BlockState(streams, pre_mix, CrossLayerState())

    def run_block(
        self,
        layer: int,
        state: BlockState,
        lookups: dict[int, Lookup],
        layout: SequenceLayout,
        replayed_experts: Tensor | None = None,
        step: Step | None = None,
        for_drafter: bool = False,
        host: HostCopies | None = None,
    ) -> BlockOutput:
        """Run one block on the tokens of the layout, and remove the block's entry from `lookups`. `replayed_experts`
        int64 [T, k]: experts to use, see `Gate`; `step`: the generation step, if the tokens follow cached tokens;
        `host`: keeps the residual streams in host memory until the block is recomputed.
        """
        lookup = lookups.pop(layer).arrived() if layer in lookups else None
        arguments = (state, lookup, layout, self.runtime, replayed_experts, step and step.layer(layer), for_drafter)
        return recomputation.run(self.layers[layer], *arguments, recompute=self.runtime.recompute, host=host)

    def prefill_kv(self, layer: int, state: BlockState, step: Step) -> None:
        """Run only the part of Full layer `layer` that stores compressed entries in the cache."""
        lookup = self.look_up([layer], step.ids, step.layout, step).get(layer)
        lookup = lookup and lookup.arrived()
        self.layers[layer].prefill_kv(state, lookup, step.layout, self.runtime, step.layer(layer))

    def final_hidden(self, state: BlockState) -> Tensor:
        """The hidden states [T, d] that the head takes as input: the last block's streams, collapsed and normalised."""
        with using(self.runtime.kernels):
            return collapse_normed(state.streams, state.pre_mix, self.norm)

    def embed_batch(
        self,
        tokens: Tensor,
        layout: SequenceLayout,
        pixel_values: Tensor | None,
        image_grid_hws: Tensor | None,
        vision_token_types: Tensor | None,
    ) -> Tensor:
        """The input embeddings [T, d]: token embeddings for text, and in image spans the features of the vision tower
        and the learned START, NEWLINE and END vectors.
        """
        x = self.embed(tokens)
        if (pixel_values is None) != (image_grid_hws is None):
            raise ValueError("pixel_values and image_grid_hws must be given together; one of them is missing")
        if vision_token_types is None:
            if pixel_values is not None:
                raise ValueError("pixel_values need vision_token_types, which mark the positions of the images")
            return x
        types = layout.flatten(vision_token_types)
        if self.config.vision is None:
            if pixel_values is not None or bool((types >= 0).any()):
                raise ValueError("the batch has images, but this model's configuration has no vision_config")
            return x
        slots = (types == IMAGE).nonzero().flatten()
        features = None
        if pixel_values is not None and len(image_grid_hws):
            features = self._image_features(pixel_values, image_grid_hws, layout)
        found = 0 if features is None else len(features)
        _check_features(len(slots), found)
        for kind, vector in ((START, self.image_start), (NEWLINE, self.image_newline), (END, self.image_end)):
            x = torch.where((types == kind)[:, None], vector.to(x.dtype), x)
        return x.index_copy(0, slots, features.to(x.dtype)) if found else x

    def _image_features(self, pixel_values: Tensor, grids: Tensor, layout: SequenceLayout) -> Tensor | None:
        """The image features [F, d] of this rank's tokens, or None if these tokens take no image feature. If an image
        extends over two chunks, both ranks run the vision tower on it, and each uses and trains the features in its own
        chunk.
        """
        first, last = 0, None
        if layout.chunk is not None:
            before, own, everywhere = layout.chunk.feature_slots
            _check_features(everywhere, sum(self.vision.feature_counts(grids)))
            pixel_values, grids, first = self.vision.images_at(pixel_values, grids, before, own)
            last = first + own
            if not own:
                return None
        with using(self.runtime.kernels):
            return self.aligner(self.vision(pixel_values, grids))[first:last]


def _check_features(slots: int, features: int) -> None:
    if features != slots:
        raise ValueError(
            f"the batch has {slots} IMAGE tokens, but its images give {features} features; check image_grid_hws"
        )


def _check_ids(tokens: Tensor, input_ids: Tensor, vocabulary: int) -> None:
    """Raise ValueError for the first of `tokens` (the non-padding tokens of input_ids [B, S]) that is outside the
    vocabulary, because a kernel would read past the end of the embedding table.
    """
    wrong = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if wrong.numel():
        row, position = (input_ids == wrong[0]).nonzero()[0].tolist()
        raise ValueError(
            f"input_ids[{row}, {position}] = {int(wrong[0])} is outside the vocabulary; allowed are 0..{vocabulary - 1}"
        )
