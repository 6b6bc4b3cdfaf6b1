"""What a configuration costs: parameters, active parameters, FLOPs, KV bytes and activations, by part.

Pure functions of a `ModelConfig` or of a model on any device, "meta" included. Nothing here is measured; tests compare
the numbers with real tensors of small models.
Shapes: T tokens, n streams, d hidden, H heads, D head dim, E experts, k experts per token, f expert intermediate size,
W window, K top-k, r compression ratio, Hi x Di index heads, G Engram rows per token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from model.config import ModelConfig, TextConfig

# Part of a parameter by the first pattern found in its name.
PARTS = (
    ("vision", r"^(vision|aligner|image_)"),
    ("Engram tables", r"\.engram\.embed\."),
    ("Engram projections", r"\.engram\."),
    ("routed experts", r"\.ffn\.experts\."),
    ("shared experts", r"\.shared_experts\."),
    ("routers", r"\.ffn\.gate\."),
    ("indexers", r"\.attn\.indexer\."),
    ("compressors", r"\.attn\.compressor\."),
    ("attention", r"\.attn\."),
    ("mHC", r"\.hc_(attn|ffn)\."),
    ("embedding", r"^embed\."),
    ("head", r"^head\."),
    ("norms", r"norm\.weight$"),
)
DRAFTER_HEADS = (
    "drafter heads",
    r"^mtp\.\d+\.(main_proj|markov_head|confidence_head)\.",
)  # else it has what others have
OUTSIDE_BACKBONE = ("Engram tables", "vision")
ELEMENTWISE = (".engram.q_weight", ".engram.k_weight")  # 2-D, but no matrices
RECOMPUTED = "one block computed again"


def part_of(name: str) -> str:
    """The part that a parameter belongs to, by its name."""
    for part, pattern in (*PARTS, DRAFTER_HEADS):
        if re.search(pattern, name):
            return part
    raise AssertionError(f"{name} belongs to no part; add it to PARTS")


def least_parameters(config: ModelConfig, expert_parallel: int = 1, table_shards: int = 1) -> int:
    """A lower bound of the parameters that a process holds, from the large matrices alone. Builds nothing, so that it
    has an answer for any size. With `table_shards` token embedding and head count as if they were split too.
    """
    text, vision = config.text, config.vision
    d, n, heads = text.hidden_size, text.hc_mult, text.num_attention_heads * text.head_dim
    outputs = heads // text.o_groups * text.o_groups * text.o_lora_rank + text.o_groups * text.o_lora_rank * d
    attention = d * text.q_lora_rank + text.q_lora_rank * heads + d * text.head_dim + outputs
    experts = 3 * d * text.moe_intermediate_size * (1 + text.n_routed_experts // expert_parallel)
    streams = 2 * n * d * (n * n + 2 * n)
    layers = text.num_hidden_layers * (attention + experts + d * text.n_routed_experts + streams)
    indexers = len(text.index_source_layer_ids) * text.q_lora_rank * text.index_n_heads * text.index_head_dim
    computed = len(text.engram_layer_ids) * text.engram_hash_heads * text.engram_vocab_size
    rows = sum(text.engram_num_embeddings) or computed
    tables = 2 * text.vocab_size * d + rows * text.engram_head_dim
    width = vision.hidden_size if vision else 0
    tower = vision.num_hidden_layers * (4 * width**2 + 2 * width * vision.intermediate_size) if vision else 0
    return layers + indexers + tables // table_shards + tower


def parameters(model: nn.Module) -> dict[str, int]:
    """Number of parameters of each part of a model or drafter; parts the model lacks are 0. Backbone: all but
    `OUTSIDE_BACKBONE`.
    """
    counts = dict.fromkeys((part for part, _ in PARTS), 0)
    for name, parameter in model.named_parameters():
        part = part_of(name)
        counts[part] = counts.get(part, 0) + parameter.numel()
    return counts


def prefill_layers(config: TextConfig) -> int:
    """Blocks that every prompt token must pass: those before the last kv source (the causal encoder).

    All later layers read that source's entries, made from its input, and otherwise only their window. Without a kv
    source every block counts.
    """
    return max(config.kv_source_layer_ids, default=config.num_hidden_layers)


class Active(NamedTuple):
    """Parameters used for one text token, see `active_parameters`."""

    prefill: float
    decode: float


def _text_config(model: nn.Module) -> TextConfig:
    return model.config.text  # type: ignore[union-attr, return-value]


def active_parameters(model: nn.Module) -> Active:
    """Parameters that one text token is multiplied with.

    Decode: all blocks with k of E routed experts and the shared one, the final norm and the head. Prefill: the blocks
    of `prefill_layers` and, of the last kv source's block, what makes its entries and index keys. Lookups (embedding,
    Engram tables) and the vision tower do not count. This is the reading under which the released configuration gives
    the report's 8B and 16B: counting the embedding too would make them 9B and 17B.
    """
    config = _text_config(model)
    encoder = prefill_layers(config)
    last = rf"layers\.{encoder}\.(engram|attn_norm|attn\.compressor|attn\.indexer\.(wk|k_norm))\."
    prefill = decode = 0.0
    for name, parameter in model.named_parameters():
        part = part_of(name)
        if part in (*OUTSIDE_BACKBONE, "embedding"):
            continue
        share = config.num_experts_per_tok / config.n_routed_experts if part == "routed experts" else 1.0
        decode += share * parameter.numel()
        if layer_of(name) < encoder or re.match(last, name):
            prefill += share * parameter.numel()
    return Active(prefill, decode)


def layer_of(name: str) -> float:
    """Layer number of a parameter; infinity outside the blocks."""
    match = re.match(r"layers\.(\d+)\.", name)
    return int(match.group(1)) if match else float("inf")


def kv_bytes(config: TextConfig) -> dict[str, float]:
    """Cache bytes per token that grow with the context: packed entries of every Full layer, 1/r of one a token.

    Main KV: FP4 values and an E4M3 scale for every 16; index keys: MXFP4 values and a UE8M0 scale for every 32.
    """
    entries = sum(1 / config.ratio(layer) for layer in config.kv_source_layer_ids)
    return {
        "main KV values": entries * config.head_dim / 2,
        "main KV scales": entries * -(-config.head_dim // 16),
        "index key values": entries * config.index_head_dim / 2,
        "index key scales": entries * -(-config.index_head_dim // 32),
    }


def window_kv_bytes(config: TextConfig) -> int:
    """Cache bytes per sequence of any length beyond the window: W FP8 entries with a UE8M0 scale for every 32, in every
    layer.
    """
    return config.num_hidden_layers * config.sliding_window * (config.head_dim + -(-config.head_dim // 32))


class Flops(NamedTuple):
    """FLOPs per text token (a multiply-add is two) of one part.

    forward: of one forward pass; step: of forward and backward; recomputed: what activation checkpointing adds.
    """

    forward: float
    step: float
    recomputed: float


def flops(model: nn.Module, length: int, candidate_pool: bool = True) -> dict[str, Flops]:
    """FLOPs per token of training on documents of `length` tokens, by part.

    A matrix costs 2 in the forward and 4 in the backward for each parameter applied (the indexer's 2: its inputs are
    detached). The sparse attention's backward takes five products for the forward's two. Scoring entries has no
    backward; the indexer's loss scores the selected ones anew. Element-wise work is left out, but for the mixing of
    streams.
    """
    config = _text_config(model)
    core, scan, indexer_loss = 0.0, 0.0, 0.0
    for layer in range(config.num_hidden_layers):
        ratio = config.ratio(layer)
        keys = _mean_seen(config.sliding_window, length)
        keys += _mean_seen(config.index_topk, length, ratio) if ratio else 0.0
        core += 4 * config.num_attention_heads * config.head_dim * keys
    for layer in config.index_source_layer_ids:
        ratio, source = config.ratio(layer), config.candidate_source_layer_id
        restricted = candidate_pool and source == config.kv_source(layer) and layer != source
        most = config.candidate_topk_blocks * config.candidate_block_size if restricted else length
        product = 2 * config.index_n_heads * (config.index_head_dim + 1)
        scan += product * _mean_seen(most, length, ratio)
        indexer_loss += product * _mean_seen(config.index_topk, length, ratio)
    table = {
        part: Flops(cost, (2 if part == "indexers" else 3) * cost, 0.0 if part == "head" else cost)
        for part, cost in _matrix_flops(model).items()
        if cost
    }
    table["attention over keys"] = Flops(core, 3.5 * core, core)
    if scan:
        table["index scores"] = Flops(scan, scan, 0.0)  # recomputation keeps the selection
        table["indexer loss"] = Flops(0.0, 3 * indexer_loss, 0.0)
    return table


def _matrix_flops(model: nn.Module) -> dict[str, float]:
    """Forward FLOPs per token of the matrices, and of the mixing of streams, by part."""
    config = _text_config(model)
    applied = dict.fromkeys((part for part, _ in PARTS), 0.0)
    for name, parameter in model.named_parameters():
        part = part_of(name)
        if part in (*OUTSIDE_BACKBONE, "embedding") or parameter.dim() < 2 or name.endswith(ELEMENTWISE):
            continue
        share = 1.0
        if part == "routed experts":
            share = config.num_experts_per_tok / config.n_routed_experts
        elif name.endswith("indexer.wk.weight"):
            share = 1 / config.ratio(int(layer_of(name)))
        applied[part] += 2 * share * parameter.numel()
    n, d = config.hc_mult, config.hidden_size
    applied["mHC"] += 2 * config.num_hidden_layers * 2 * (2 * n + n * n) * d
    return applied


def _mean_seen(most: int, length: int, ratio: int = 1) -> float:
    """Mean over the positions of a document of min(most, entries visible there)."""
    return float(np.minimum(np.arange(1, length + 1) // ratio, most).mean())


class Widths(NamedTuple):
    """Bytes of a number: products, what products with weights give (2 with bf16 autocast over fp32 parameters, else 4);
    streams, in a residual stream.
    """

    products: int
    streams: int

    @property
    def normed(self) -> int:
        """Of a sublayer's input behind its norm, which has the streams' dtype unless products cannot take that."""
        return self.streams if self.products == 2 else 4


def activation_bytes(
    config: ModelConfig, widths: Widths, recompute: bool, keep_combined: bool = False, offload: bool = False
) -> dict[str, float]:
    """Bytes per token that a text micro-batch holds when its backward begins, by part.

    With `recompute` only each block's inputs and what its first pass selected are held (with `keep_combined` the
    results of its MoE layer too, as where experts are split over ranks; with `offload` without its streams), beside
    what one block (the largest) saves while it is computed again. Counted as torch saves tensors on a CPU; bf16 copies
    of weights (`autocast_copies`), gradients and the working memory of kernels are not included.
    """
    text = config.text
    held: dict[str, float] = {}
    blocks = [block_saves(text, layer, widths) for layer in range(text.num_hidden_layers)]
    if recompute:
        inputs = (block_inputs(text, layer, widths, keep_combined, offload) for layer in range(text.num_hidden_layers))
        held["block inputs"] = sum(inputs)
        held[RECOMPUTED] = max(sum(block.values()) for block in blocks)
    else:
        for block in blocks:
            for part, size in block.items():
                held[part] = held.get(part, 0.0) + size
    held["losses"] = _loss_saves(text, widths)
    return held


def expert_row_bytes(config: TextConfig, bf16: bool) -> int:
    """Of the bytes per token that `block_saves` counts for the routed experts, those of the rows that the experts of a
    rank received: inputs, gate, up and hidden, k rows a token on average over ranks.
    """
    width = 2 if bf16 else 4
    return width * config.num_experts_per_tok * (config.hidden_size + 3 * config.moe_intermediate_size)


def head_gradient_bytes(config: ModelConfig) -> int:
    """The fp32 gradient of the head that the chunked cross-entropy holds from forward to backward."""
    return 4 * config.text.vocab_size * config.text.hidden_size


def autocast_copies(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights of which bf16 autocast keeps a copy for the backward: the blocks' matrices, but for those applied in fp32
    and the indexers', whose inputs are detached.
    """
    for name, parameter in model.named_parameters():
        if (
            part_of(name) in (*OUTSIDE_BACKBONE, "embedding", "head", "mHC", "routers", "indexers")
            or parameter.dim() < 2
        ):
            continue
        if not name.endswith(ELEMENTWISE):
            yield name, parameter


def block_saves(c: TextConfig, layer: int, widths: Widths) -> dict[str, float]:
    """Bytes per token that one block saves for its backward, by part, in the order of its forward."""
    n, d, f, k = c.hc_mult, c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok
    heads, dim, ratio, width = c.num_attention_heads, c.head_dim, c.ratio(layer), widths.products
    full, source = layer in c.kv_source_layer_ids, layer in c.index_source_layer_ids

    copied = widths.products == 2 and widths.normed == 4

    def inputs(products: int, size: int) -> int:  # autocast copies an fp32 input for every product
        return products * 2 * size if copied else widths.normed * size

    sinkhorn = n * (2 * c.hc_sinkhorn_iters - 1)  # the denominators of its steps
    saved: dict[str, float] = {
        "streams": 2 * (widths.streams * n * d + 4 + 4 * (3 * n * n + 6 * n + sinkhorn) + _norm(d))
    }
    products = 2 + (0 if not full else 2 if ratio > 1 else 1) + source
    attention: float = inputs(products, d) + _norm(c.q_lora_rank) + width * c.q_lora_rank + _norm(dim)
    attention += 3 * width * heads * dim + width * dim + 8 + 4 * heads  # q, output, output turned back; window KV
    attention += width * (c.o_groups * c.o_lora_rank + d)
    if full:
        attention += 8 * dim * (ratio > 1) + 8
        attention += (_norm(dim) + 4 * c.qk_rope_head_dim + 2 * width * dim + _norm(c.index_head_dim)) / ratio
    saved["attention"] = attention + 4 * c.index_topk * source
    saved["routed experts"] = 8 * c.n_routed_experts + 40 * k + 4 + width * k * d + 3 * width * k * f
    saved["shared expert"] = 4 * d + (inputs(2, d) if width == 2 else 0) + 3 * width * f + widths.normed * d
    if layer in c.engram_layer_ids:
        rows = c.engram_hash_heads
        saved["Engram"] = 8 * rows + width * rows * c.engram_head_dim + 12 * n * d + 4 * d + 36 * n
    return saved


def stream_bytes(c: TextConfig, widths: Widths) -> int:
    """Bytes per token of the residual streams."""
    return widths.streams * c.hc_mult * c.hidden_size


def block_inputs(
    c: TextConfig, layer: int, widths: Widths, keep_combined: bool = False, offload: bool = False
) -> float:
    """Bytes per token that a checkpointed block keeps: what enters it (the streams only if they are not on the host, by
    `offload`), the experts it chose, with `keep_combined` the result of its MoE layer, and what its outputs add for
    later layers.
    """
    width, ratio = widths.products, c.ratio(layer)
    size = 0.0 if offload else float(stream_bytes(c, widths))
    size += 4 * c.hc_mult + 4 * c.n_routed_experts + 8 * c.num_experts_per_tok
    size += widths.normed * c.hidden_size * keep_combined
    if layer in c.kv_source_layer_ids:
        size += width * (c.head_dim + c.index_head_dim) / ratio
    if layer in c.index_source_layer_ids:
        size += 4 * c.index_topk
    if layer in c.engram_layer_ids:
        size += 8 * c.engram_hash_heads
    return size


def _loss_saves(c: TextConfig, widths: Widths) -> float:
    """Bytes per token behind the last block: final collapse and norm, cross-entropy, balance loss, indexer losses."""
    width = widths.products
    size = float(widths.streams * c.hc_mult * c.hidden_size + 4 * c.hc_mult)
    size += _norm(c.hidden_size) + 8 + width * c.hidden_size
    size += c.num_hidden_layers * (4 * c.n_routed_experts + 4)
    for layer in c.index_source_layer_ids:
        queries = width * c.index_n_heads * c.index_head_dim + 4 * c.index_n_heads
        size += queries + width * c.index_head_dim / c.ratio(layer)
    return size


def _norm(width: int) -> int:
    """Bytes that an RMSNorm saves: its input and the normalised values in fp32, and the root."""
    return 8 * width + 4
