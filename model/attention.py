"""CSA2, the attention of V4.1: low-rank queries attend to a sliding window and to compressed entries chosen by an
indexer.

The schedule in the configuration gives each layer one of four kinds:

  Window layers have compression ratio 0 and attend to the sliding window only.

  Full layers (KV sources) own a compressor, which makes the main KV, and an indexer with its own keys.

  Reindex layers own an indexer, which scores the index keys of the latest Full layer with new queries.

  Reuse layers take both the main KV and the selected entries from earlier layers.

Layers pass a `CrossLayerState` on to later layers. A `CrossLayerState` is immutable, and no attention state is stored
on modules, so that activation checkpointing and several micro-batches in flight work correctly. In shapes, T is the
number of tokens, d the hidden size, H the number of heads, D the head dimension, N the number of entry slots and K the
number of selected entries per query.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache.step import LayerCache
from model.config import ForwardOptions, TextConfig
from model.indexer import Indexer, IndexerLossInputs, select, select_from_candidates
from model.layout import Entries, SequenceLayout
from model.norm import RMSNorm
from model.packed import PackedWeight, packed_block_linear
from model.parallel.context import gather_entries, with_halo
from model.quantize import fake_quant_fp8, main_kv_format
from model.rope import rotate
from model.rounding import Linear, Rounds
from model.sparse import dense_attention, dense_attention_mass, gathered_attention, sparse_attention
from model.summed_gradients import collector, read


@dataclass(frozen=True)
class CrossLayerState:
    """The attention state that layers share. A layer that computes a part of the shared state returns a new state
    object; no state object is changed in place.

    Fields: compressed_kv [N, D], the main KV after rotation and quantisation; index_keys [N, Di], the indexer keys;
    topk_indices int32 [T, K], the slots of the selected entries (-1: none); candidates int32 [T, M], the blocks that
    later indexers may choose from (None: no restriction). In decoding only the selected entries are needed, so
    selected_kv [T, K, D] replaces compressed_kv. kv_gradient and keys_gradient: tensors that sum the gradients of the
    main KV and of the index keys in fp32 (see `model/summed_gradients.py`), None in fp32 and without gradients.
    """

    compressed_kv: Tensor | None = None
    index_keys: Tensor | None = None
    topk_indices: Tensor | None = None
    candidates: Tensor | None = None
    selected_kv: Tensor | None = None
    kv_gradient: Tensor | None = None
    keys_gradient: Tensor | None = None

    def detached(self) -> CrossLayerState:
        """A copy of the state that is detached from the autograd graph."""
        kv, keys = (x if x is None else x.detach() for x in (self.compressed_kv, self.index_keys))
        return replace(self, compressed_kv=kv, index_keys=keys, kv_gradient=None, keys_gradient=None)


class AttentionOutput(NamedTuple):
    """The result of one attention layer: the output [T, d]; the cross-layer state for later layers; the inputs of the
    indexer loss (only in layers with an indexer); the attention mass on the selected entries, fp32 [T, K], detached
    (not in window layers); and, with `runtime.probe`, the mass on each entry if attention saw all entries, fp32 [T, N].
    """

    output: Tensor
    shared: CrossLayerState
    indexer_loss_inputs: IndexerLossInputs | None
    attention_mass: Tensor | None
    dense_attention_mass: Tensor | None


class Compressor(nn.Module):
    """Compresses every group of r tokens to one latent entry: a sum with per-channel softmax weights, then
    normalised.
    """

    def __init__(self, config: TextConfig, ratio: int):
        super().__init__()
        self.ratio = ratio
        self.wkv = nn.Linear(config.hidden_size, config.head_dim, bias=False)
        if ratio > 1:
            self.wgate = nn.Linear(config.hidden_size, config.head_dim, bias=False)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Project x [T, d] to values [T, D] and, if r > 1, to gates [T, D] that weight the tokens of a group."""
        return self.wkv(x), self.wgate(x) if self.ratio > 1 else None

    def pool(self, values: Tensor, gates: Tensor | None, entries: Entries) -> Tensor:
        """Compress each group of tokens in `entries.members` to one latent; returns latents [N, D]. An incomplete last
        group gives no latent.
        """
        members = entries.members.flatten()
        picked = values.index_select(0, members)
        if gates is None:
            return self.norm(picked)
        picked = picked.unflatten(0, (-1, self.ratio)).float()
        weights = gates.index_select(0, members).unflatten(0, (-1, self.ratio)).float().softmax(dim=1)
        return self.norm((picked * weights).sum(1).to(values.dtype))


class GroupedLinear(nn.Module, Rounds):
    """A block-diagonal linear layer without bias. The weight [groups * out, in] has one [out, in] block for each
    group.
    """

    def __init__(self, in_features: int, out_features: int, groups: int):
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(groups * out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [T, groups, in] by each group's block; returns [T, groups, out]."""
        if isinstance(self.weight, PackedWeight):
            return packed_block_linear(x, self.weight, self.groups)
        weight = self.rounded(self.weight)
        return torch.einsum("tgi,goi->tgo", x, weight.unflatten(0, (self.groups, -1)).to(x.dtype))


class Attention(nn.Module):
    """One attention layer: a Window, Full, Reindex or Reuse layer."""

    def __init__(self, config: TextConfig, layer: int):
        super().__init__()
        heads, dim, groups = config.num_attention_heads, config.head_dim, config.o_groups
        self.config, self.heads, self.dim, self.groups = config, heads, dim, groups
        self.ratio = config.ratio(layer)
        self.scale = dim**-0.5
        self.in_decoder = layer >= config.decoder_start
        self.makes_candidates = layer == config.candidate_source_layer_id
        self.wq_a = Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.wq_b = Linear(config.q_lora_rank, heads * dim, bias=False)
        self.wkv = Linear(config.hidden_size, dim, bias=False)
        self.kv_norm = RMSNorm(dim, config.rms_norm_eps)
        self.wo_a = GroupedLinear(heads * dim // groups, config.o_lora_rank, groups)
        self.wo_b = Linear(groups * config.o_lora_rank, config.hidden_size, bias=False)
        self.attn_sink = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        full = layer in config.kv_source_layer_ids
        self.compressor = Compressor(config, self.ratio) if full else None
        self.indexer = Indexer(config, owns_keys=full) if layer in config.index_source_layer_ids else None

    def forward(
        self,
        x: Tensor,
        layout: SequenceLayout,
        shared: CrossLayerState,
        runtime: ForwardOptions,
        cache: LayerCache | None = None,
        first: CrossLayerState | None = None,
    ) -> AttentionOutput:
        """Attend from the normalised sublayer input x [T, d]. `cache` holds this layer's KV of earlier tokens; the
        tokens of the layout follow these tokens, and their KV is added to the cache. `first`: the state that the first
        pass returned, passed only in recomputation. The entries, index keys and selection in `first` are reused and not
        computed again, because the backward pass needs only the tensors from which they were computed.
        """
        phasors = layout.phasors_yarn if self.ratio else layout.phasors
        q, q_lat = self.queries(x, phasors)
        window_kv = self.window_keys(x, phasors)
        if layout.chunk is not None:
            (window_kv,) = with_halo([window_kv], layout.chunk.window, layout.chunk.ranks)
        if self.compressor is not None:
            shared = self.compress(x, layout, shared, runtime, cache, first)
        indexer_loss_inputs = None
        if self.indexer is not None:
            shared, indexer_loss_inputs = self._index(x, q_lat, layout, shared, runtime, first)
            if cache is not None and cache.decoding:
                shared = replace(shared, selected_kv=cache.selected(shared.topk_indices, q.dtype))
        window_start = layout.decoder_window_start if self.in_decoder else layout.window_start
        if cache is None:
            kv = read(shared.compressed_kv, shared.kv_gradient) if self.ratio else None
            entries = (kv, shared.topk_indices) if self.ratio else (None, None)
            out, mass = self._attend(q, window_kv, window_start, *entries, runtime)
        else:
            out, mass = self._attend_cached(q, window_kv, shared, runtime, cache), None
        truth = None
        if runtime.probe and self.ratio:
            seen = layout.entries[self.ratio]
            span = (seen.visible_from, seen.visible_to)
            truth = dense_attention_mass(
                q, window_kv, window_start, shared.compressed_kv, *span, self.attn_sink, self.scale
            )
        return AttentionOutput(self.project(out, phasors), shared, indexer_loss_inputs, mass, truth)

    def queries(self, x: Tensor, phasors: Tensor) -> tuple[Tensor, Tensor]:
        """Compute from x [T, d] the queries [T, H, D] and their low-rank latent [T, q_lora]."""
        q_lat = self.q_norm(self.wq_a(x))
        return rotate(self.wq_b(q_lat).unflatten(-1, (self.heads, self.dim)), phasors), q_lat

    def window_keys(self, x: Tensor, phasors: Tensor) -> Tensor:
        """Compute from x [T, d] the sliding-window KV [T, D], rotated and rounded to FP8."""
        return fake_quant_fp8(rotate(self.kv_norm(self.wkv(x)), phasors))

    def project(self, out: Tensor, phasors: Tensor) -> Tensor:
        """Map the attention output of all heads [T, H, D] to [T, d]: inverse RoPE, then block-diagonal wo_a, then
        wo_b.
        """
        out = rotate(out, phasors, inverse=True)
        return self.wo_b(self.wo_a(out.flatten(1).unflatten(1, (self.groups, -1))).flatten(1))

    def compress(
        self,
        x: Tensor,
        layout: SequenceLayout,
        shared: CrossLayerState,
        runtime: ForwardOptions,
        cache: LayerCache | None,
        first: CrossLayerState | None = None,
    ) -> CrossLayerState:
        """Compute the compressed entries and index keys of x [T, d], in Full layers only. `first`: see `forward`."""
        entries = layout.entries[self.ratio]
        projected, chunk = self.compressor.project(x), layout.chunk
        if cache is not None:
            projected = cache.open_groups(*projected)
        elif chunk is not None and self.ratio > 1:
            values, gates = with_halo(projected, entries.halo, chunk.ranks)
            projected = values, gates
        if chunk is not None and not len(projected[0]):  # its share of the gathered rows, none of them used, needs one
            values, gates = projected
            projected = F.pad(values, (0, 0, 0, 1)), None if gates is None else F.pad(gates, (0, 0, 0, 1))
        latent = self.compressor.pool(*projected, entries)
        kv, keys = rotate(latent, entries.phasors), self.indexer.keys(latent, entries)
        if cache is not None:
            kv, keys = cache.entries(kv, keys)
        elif rounding := main_kv_format(runtime.kv_quant):
            kv = rounding.fake_quant(kv)
        kv_sum, keys_sum = None, None
        if first is not None:
            kv, keys = first.compressed_kv, first.index_keys
        elif chunk is not None:
            form = main_kv_format(runtime.kv_quant) if runtime.gather == "packed" else None
            kv, keys, kv_sum, keys_sum = gather_entries(kv, keys, entries.gathered, chunk.ranks, form)
        elif cache is None:
            kv_sum, keys_sum = collector(kv), collector(keys)
        return replace(
            shared, compressed_kv=kv, index_keys=keys, candidates=None, kv_gradient=kv_sum, keys_gradient=keys_sum
        )

    def _index(
        self,
        x: Tensor,
        q_lat: Tensor,
        layout: SequenceLayout,
        shared: CrossLayerState,
        runtime: ForwardOptions,
        first: CrossLayerState | None,
    ) -> tuple[CrossLayerState, IndexerLossInputs]:
        config, entries = self.config, layout.entries[self.ratio]
        query = self.indexer.query(x, q_lat, layout)
        if first is not None:
            topk_indices = first.topk_indices
            shared = replace(shared, topk_indices=topk_indices, candidates=first.candidates)
        elif shared.candidates is not None:
            topk_indices = select_from_candidates(
                query, shared.index_keys, entries, shared.candidates, config.index_topk, config.candidate_block_size
            )
            shared = replace(shared, topk_indices=topk_indices)
        else:
            pool = config.candidate_topk_blocks if self.makes_candidates and runtime.candidate_pool else None
            topk_indices, candidates = select(
                query, shared.index_keys, entries, config.index_topk, config.candidate_block_size, pool
            )
            shared = replace(shared, topk_indices=topk_indices, candidates=candidates)
        return shared, IndexerLossInputs(query, read(shared.index_keys, shared.keys_gradient), topk_indices)

    def _attend(
        self,
        q: Tensor,
        window_kv: Tensor,
        window_start: Tensor,
        entries: Tensor | None,
        topk_indices: Tensor | None,
        runtime: ForwardOptions,
    ) -> tuple[Tensor, Tensor | None]:
        inputs = (q, window_kv, window_start, entries, topk_indices, self.attn_sink, self.scale)
        if runtime.attention == "dense":
            return dense_attention(*inputs)
        return sparse_attention(*inputs, self.config.sliding_window)

    def _attend_cached(
        self, q: Tensor, window_kv: Tensor, shared: CrossLayerState, runtime: ForwardOptions, cache: LayerCache
    ) -> Tensor:
        """Attention over new tokens whose sliding window can reach back to cached tokens."""
        topk_indices = shared.topk_indices if self.ratio else None
        if cache.decoding:
            keys, hidden = cache.window_of_each(window_kv)
            if self.ratio:
                keys = torch.cat([keys, shared.selected_kv], dim=1)
                hidden = torch.cat([hidden, topk_indices < 0], dim=1)
            return gathered_attention(q, keys, hidden, self.attn_sink, self.scale)
        keys, axis = cache.window_axis(window_kv)
        if topk_indices is not None:
            topk_indices = axis.spread(topk_indices, -1)
        entries = shared.compressed_kv if self.ratio else None
        out, _ = self._attend(axis.spread(q, 0), keys, axis.start, entries, topk_indices, runtime)
        return out.index_select(0, axis.place)
