"""Computes the costs of a configuration for each part of the model: parameters, active parameters, FLOPs, KV cache
bytes and activation bytes.

All functions depend only on a `ModelConfig` or on a model on any device, including "meta". The numbers are computed,
not measured; tests compare them with the real tensors of small models. In formulas, n is the number of residual
streams, d the hidden size, E the number of experts, k the experts per token, f the intermediate size of an expert, W
the window size and r a compression ratio.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from model.config import ModelConfig, TextConfig

# Pairs (part, pattern). A parameter belongs to the first part whose pattern is found in the parameter's name.
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
# The other parameters of a drafter belong to the same parts as those of the backbone
DRAFTER_HEADS = ("drafter heads", r"^mtp\.\d+\.(main_proj|markov_head|confidence_head)\.")
OUTSIDE_BACKBONE = ("Engram tables", "vision")
ELEMENTWISE = (".engram.q_weight", ".engram.k_weight")  # 2-D parameters that are not used as matrices
RECOMPUTED = "one block computed again"


def part_of(name: str) -> str:
    """Returns the part of the model that the parameter called `name` belongs to."""
    for part, pattern in (*PARTS, DRAFTER_HEADS):
        if re.search(pattern, name):
            return part
    raise AssertionError(f"parameter {name} matches no pattern of PARTS; add one")


def least_parameters(config: ModelConfig, expert_parallel: int = 1, table_shards: int = 1) -> int:
    """Returns a lower bound for the number of parameters that a process holds; the bound counts only the large
    matrices. No model is built to compute this bound, so the configuration may describe a model of any size.

    expert_parallel: the number of processes over which the routed experts are split. table_shards: the number of
    processes over which the rows of the Engram tables, of the token embedding and of the head are split.
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
    """Returns the number of parameters of each part of a model or drafter. Parts that the model lacks are listed with 0
    parameters.
    """
    counts = dict.fromkeys((part for part, _ in PARTS), 0)
    for name, parameter in model.named_parameters():
        part = part_of(name)
        counts[part] = counts.get(part, 0) + parameter.numel()
    return counts


def prefill_layers(config: TextConfig) -> int:
    """Returns the number of blocks of the causal encoder, which every prompt token must pass through: all blocks before
    the last KV source (the last layer that computes compressed KV entries).

    The blocks from the last KV source on read only the entries of this KV source, which are computed from its input,
    and their own sliding window. If the model has no KV source, the number of all blocks is returned.
    """
    return max(config.kv_source_layer_ids, default=config.num_hidden_layers)


class Active(NamedTuple):
    """The numbers of active parameters in prefill and in decoding, as `active_parameters` defines them."""

    prefill: float
    decode: float


def _text_config(model: nn.Module) -> TextConfig:
    return model.config.text  # type: ignore[union-attr, return-value]


def active_parameters(model: nn.Module) -> Active:
    """Returns the number of parameters that one text token is multiplied with, in prefill and in decoding.

    In decoding, a token is multiplied with the parameters of all blocks (of the routed experts only k of E are
    counted), of the final norm and of the head. In prefill, a token is multiplied with the parameters of the first
    `prefill_layers` blocks, and with those parameters of the last KV source's block that compute entries and index
    keys. Looked-up rows (embedding, Engram tables) and the vision tower are not counted. With this definition the
    released configuration has 8B active parameters in prefill and 16B in decoding, as the V4.1 report says; if the
    embedding were counted, the numbers would be 9B and 17B.
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
    """Returns the layer number in the name of a parameter, or infinity for a parameter outside the blocks."""
    match = re.match(r"layers\.(\d+)\.", name)
    return int(match.group(1)) if match else float("inf")


def kv_bytes(config: TextConfig) -> dict[str, float]:
    """Returns the bytes per token of the part of the KV cache that grows with the context: each KV source with
    compression ratio r stores 1/r entry per token.

    Main KV is stored as FP4 values with one E4M3 scale per 16 values, index keys as MXFP4 values with one UE8M0 scale
    per 32 values.
    """
    entries = sum(1 / config.ratio(layer) for layer in config.kv_source_layer_ids)
    return {
        "main KV values": entries * config.head_dim / 2,
        "main KV scales": entries * -(-config.head_dim // 16),
        "index key values": entries * config.index_head_dim / 2,
        "index key scales": entries * -(-config.index_head_dim // 32),
    }


def window_kv_bytes(config: TextConfig) -> int:
    """Returns the bytes of sliding-window KV cache per sequence, for sequences longer than the window: W FP8 entries
    with one UE8M0 scale per 32 values, in every layer.
    """
    return config.num_hidden_layers * config.sliding_window * (config.head_dim + -(-config.head_dim // 32))


class Flops(NamedTuple):
    """The FLOPs per text token of one part of the model (a multiply-add counts as two).

    forward: FLOPs of the forward pass; step: FLOPs of forward and backward pass together; recomputed: additional FLOPs
    of activation checkpointing.
    """

    forward: float
    step: float
    recomputed: float


def flops(model: nn.Module, length: int, candidate_pool: bool = True) -> dict[str, Flops]:
    """Returns the FLOPs per token of training on documents of `length` tokens, for each part of the model.

    A matrix costs 2 FLOPs per parameter in the forward pass and 4 in the backward pass (only 2 in the indexer, whose
    inputs are detached). Sparse attention has two matrix products in the forward pass and five in the backward pass.
    Scoring all entries has no backward pass, but the indexer loss scores the selected entries again. Element-wise
    operations are not counted, except the mixing of residual streams.
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
    """Returns the forward FLOPs per token of the weight matrices and of the mixing of residual streams, for each part
    of the model.
    """
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
    """Returns the mean number of entries that attention reads per position of a document of `length` tokens: at each
    position, all visible entries (one per `ratio` tokens up to this position), but at most `most`.
    """
    return float(np.minimum(np.arange(1, length + 1) // ratio, most).mean())


class Widths(NamedTuple):
    """The number of bytes per value of activations.

    products: bytes per value of the results of matrix products: 2 with bf16 autocast over fp32 parameters, else 4.
    streams: bytes per value of the residual streams.
    """

    products: int
    streams: int

    @property
    def normed(self) -> int:
        """The bytes per value of a sublayer's normalised input. This input has the dtype of the residual streams,
        unless matrix products need fp32 inputs.
        """
        return self.streams if self.products == 2 else 4


def activation_bytes(
    config: ModelConfig, widths: Widths, recompute: bool, keep_combined: bool = False, offload: bool = False
) -> dict[str, float]:
    """Returns the activation bytes per token that a text micro-batch holds when its backward pass begins, for each part
    of the model.

    With `recompute`, the result counts only the inputs and the selections of each block, plus the activations that the
    largest block saves while it is recomputed. With `keep_combined`, the result also counts the outputs of the MoE
    layers, which are saved if experts are split over ranks. With `offload`, the residual streams that enter the blocks
    are not counted.

    The result counts the tensors that PyTorch saves on a CPU. It does not include bf16 copies of weights (see
    `autocast_copies`), gradients and the working memory of kernels.
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
    """Returns the bytes per token that the routed experts of a rank save for the rows (token vectors) that they
    received: the inputs, gate, up and hidden values of each row. The result of `block_saves` includes these bytes. On
    average, a rank receives k rows for each of its own tokens.
    """
    width = 2 if bf16 else 4
    return width * config.num_experts_per_tok * (config.hidden_size + 3 * config.moe_intermediate_size)


def head_gradient_bytes(config: ModelConfig) -> int:
    """Returns the bytes of the output head's fp32 gradient, which the chunked cross-entropy holds from the forward pass
    to the backward pass.
    """
    return 4 * config.text.vocab_size * config.text.hidden_size


def autocast_copies(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weight) for each weight of which bf16 autocast keeps a bf16 copy for the backward pass. Autocast
    copies the matrices of the blocks, except matrices that are applied in fp32 and matrices of the indexers, whose
    inputs are detached.
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
    """Returns the bytes per token that one block saves for its backward pass, for each part of the block in the order
    of the forward pass.
    """
    n, d, f, k = c.hc_mult, c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok
    heads, dim, ratio, width = c.num_attention_heads, c.head_dim, c.ratio(layer), widths.products
    full, source = layer in c.kv_source_layer_ids, layer in c.index_source_layer_ids

    copied = widths.products == 2 and widths.normed == 4

    def inputs(products: int, size: int) -> int:  # autocast makes a copy of an fp32 input for every matrix product
        return products * 2 * size if copied else widths.normed * size

    sinkhorn = n * (2 * c.hc_sinkhorn_iters - 1)  # the denominators of all Sinkhorn steps
    saved: dict[str, float] = {
        "streams": 2 * (widths.streams * n * d + 4 + 4 * (3 * n * n + 6 * n + sinkhorn) + _norm(d))
    }
    products = 2 + (0 if not full else 2 if ratio > 1 else 1) + source
    attention: float = inputs(products, d) + _norm(c.q_lora_rank) + width * c.q_lora_rank + _norm(dim)
    # Queries, output, inversely rotated output; window KV
    attention += 3 * width * heads * dim + width * dim + 8 + 4 * heads
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
    """Returns the bytes per token of the residual streams."""
    return widths.streams * c.hc_mult * c.hidden_size


def block_inputs(
    c: TextConfig, layer: int, widths: Widths, keep_combined: bool = False, offload: bool = False
) -> float:
    """Returns the bytes per token that a block keeps with activation checkpointing: the block's inputs, the indices of
    the experts that the block chose, and the outputs of the block that later layers read. With `keep_combined`, the
    output of the block's MoE layer is also counted. With `offload`, the residual streams are not counted, because they
    are kept on the host.
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
    """Returns the bytes per token that are saved after the last block by the final collapse and norm, the
    cross-entropy, the balance loss and the indexer losses.
    """
    width = widths.products
    size = float(widths.streams * c.hc_mult * c.hidden_size + 4 * c.hc_mult)
    size += _norm(c.hidden_size) + 8 + width * c.hidden_size
    size += c.num_hidden_layers * (4 * c.n_routed_experts + 4)
    for layer in c.index_source_layer_ids:
        queries = width * c.index_n_heads * c.index_head_dim + 4 * c.index_n_heads
        size += queries + width * c.index_head_dim / c.ratio(layer)
    return size


def _norm(width: int) -> int:
    """Returns the bytes that an RMSNorm saves per row of `width` values: the input and the normalised values, both in
    fp32, and the inverse root mean square.
    """
    return 8 * width + 4
