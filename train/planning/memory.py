"""Computes the memory that a micro-batch needs on a rank in addition to weights, gradients and optimizer state.

Each kind of memory (a term) has its own formula. The memory peaks when the loss is computed, in the backward pass of a
block, or while a layer selects entries; `working_bytes` returns the memory of the largest of these peaks. The docstring
of each function names the code whose tensors the function counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, prod

from model import DeepseekV41, ModelConfig, count
from model.checkpoint.load import parameter_packing
from model.config import TextConfig
from model.loss import CHUNK_LOGITS
from model.quantize import FP4_ROWS, FP8_TILES
from model.sparse import CHUNK_ELEMENTS
from optim.muon import BATCH_ELEMENTS
from train.config.schema import Config
from train.planning.items import FP32, Item
from train.planning.job import Job, settings

ROUNDING = 24  # bytes per value while model.quantize.round_weight rounds an fp32 matrix: at most six fp32 copies
UNPACKING = 10  # bytes per value while model.quantize.unpack unpacks a matrix: two fp32 copies and one in bf16


def micro_batches(config: Config) -> int:
    """Return the number of micro-batches that a rank computes in an optimizer step."""
    return config.task.division_of_step(config.parallel.row_groups)[1]


def micro_batch_rows(config: Config) -> int:
    """Return the number of rows in a micro-batch of one rank (under context parallelism: of one group of ranks)."""
    return config.task.division_of_step(config.parallel.row_groups)[0]


def tokens_per_pass(config: Config) -> int:
    """Return the number of tokens in a micro-batch of one rank."""
    return ceil(micro_batch_rows(config) * config.task.seq_len / config.parallel.context_parallel)


def working_bytes(config: Config, job: Job) -> dict[str, float]:
    """Compute the bytes of each kind of memory at the peak of a micro-batch, when their sum is largest."""
    if job.drafter is not None:
        return drafter_bytes(config, job)
    tokens = tokens_per_pass(config)
    text = job.model.config.text
    held = looked_up_bytes(config, job.model, tokens) | context_bytes(config, text, tokens)
    held |= entry_gradient_bytes(config, text, tokens)
    held["positions and rotations"] = float(tokens * layout_bytes(text))
    if config.runtime.candidate_pool:
        held["candidate blocks"] = tokens * candidate_bytes(text, micro_batch_rows(config), config.task.seq_len)
    moments = [at_the_loss(config, job, tokens), *block_moments(config, job, tokens)]
    moments += selection_moments(config, job, tokens)
    return max(moments, key=lambda moment: sum(moment.values())) | held


def keeps_combined(config: Config) -> bool:
    """Return whether recomputation reuses expert results that other ranks sent in the first forward pass."""
    return config.runtime.keep_combined and config.parallel.expert_parallel > 1


def offloads(config: Config) -> bool:
    """Return whether the residual streams that enter a block are kept in host memory until the block is recomputed."""
    return config.runtime.offload == "inputs"


def host_bytes(config: Config, job: Job) -> float:
    """Return the bytes of host memory that `runtime.offload` uses on a rank, for the residual streams that enter each
    block.
    """
    text = job.model.config.text
    return float(
        offloads(config) * tokens_per_pass(config) * text.num_hidden_layers * count.stream_bytes(text, _widths(config))
    )


def at_the_loss(config: Config, job: Job, tokens: int) -> dict[str, float]:
    """Compute the memory in use while the loss is computed, after the forward pass of all blocks.

    The result includes the activations that the blocks save, the losses, one chunk of logits (``model/loss.py``: fp32
    logits, their fp32 gradient, and a bf16 copy of this gradient), the gradient of the output head, and the copies of
    weights (see ``copy_bytes``), which autocast keeps until it ends.
    """
    bf16, text = _bf16(config), job.model.config.text
    kept = keeps_combined(config), offloads(config)
    parts = count.activation_bytes(job.model.config, _widths(config), config.runtime.recompute, *kept)
    parts.pop(count.RECOMPUTED, None)
    found = _activations(parts, tokens)
    if not config.runtime.recompute:
        found |= _uneven(config, job, tokens, text.num_hidden_layers)
    found["logits of a chunk"] = float((8 + 2 * bf16) * min(tokens * text.vocab_size, CHUNK_LOGITS["cuda"]))
    found |= head_bytes(config, job)
    dense, experts = copy_bytes(config, job)
    found["copies of dense weights"] = float(sum(dense))
    if not config.runtime.recompute:
        found["copies of experts"] = float(sum(experts))
    return found


def block_moments(config: Config, job: Job, tokens: int) -> list[dict[str, float]]:
    """Compute the memory in use during the backward pass of each block, from the last block to the first.

    The result for a block includes the activations that the block and all earlier blocks save, the activations that the
    block saves when it is recomputed, gradients of activations, the buffers of the expert exchange, and copies of the
    block's weights.
    """
    widths, text, recompute = _widths(config), job.model.config.text, config.runtime.recompute
    dense, experts = copy_bytes(config, job)
    kept = count.activation_bytes(job.model.config, widths, recompute, keeps_combined(config), offloads(config))
    kept.pop(count.RECOMPUTED, None)
    passing = {"losses": kept.pop("losses"), "gradients in a block": gradient_bytes(text, widths)}
    found, inputs = [], 0.0
    for layer in range(text.num_hidden_layers):
        inputs += count.block_inputs(text, layer, widths, keeps_combined(config), offloads(config))
        if not recompute and layer < text.num_hidden_layers - 1:
            continue  # without recomputation, memory peaks at the last block
        again = sum(count.block_saves(text, layer, widths).values())
        parts = {"block inputs": inputs, count.RECOMPUTED: again} if recompute else kept
        if offloads(config):  # streams on their way back from the host: this block's, and those of the block before
            parts["streams from the host"] = 2.0 * count.stream_bytes(text, widths)
        moment = _activations(parts | passing, tokens)
        moment |= _uneven(config, job, tokens, 1 if recompute else text.num_hidden_layers)
        moment |= exchange_bytes(config, text, tokens) | gathered_bytes(config, job)
        if recompute:
            moment["copies of a block's weights"] = float(dense[layer] + experts[layer])
        else:
            moment["copies of dense weights"] = float(sum(dense))
            moment["copies of experts"] = float(sum(experts))
        moment["one packed weight made plain"] = float(UNPACKING * job.largest_packed)
        if rounded := largest_rounded(config, job, tokens):
            moment["one weight while it is rounded"] = float(ROUNDING * rounded)
        found.append(moment)
    return found


def blocks_of_entries(text: TextConfig, layer: int, rows: int, length: int) -> int:
    """Return the number of blocks of compressed KV entries (``candidate_block_size`` entries each) in layer ``layer``,
    for a micro-batch of ``rows`` documents of ``length`` tokens.
    """
    return rows * ceil(length // text.ratio(layer) / text.candidate_block_size)


def candidate_bytes(text: TextConfig, rows: int, length: int) -> float:
    """Return the bytes per token of the indices of the candidate blocks (``model/indexer.py``: int32 [T,
    candidate_topk_blocks]), which every later indexer reads. There are no indices if a micro-batch has at most
    ``candidate_topk_blocks`` blocks. Each of the ``rows`` rows of a micro-batch is assumed to be one document of
    ``length`` tokens.
    """
    source, pool = text.candidate_source_layer_id, text.candidate_topk_blocks
    return 4.0 * pool if source >= 0 and blocks_of_entries(text, source, rows, length) > pool else 0.0


def selection_moments(config: Config, job: Job, tokens: int) -> list[dict[str, float]]:
    """Compute the memory in use while each layer with an indexer selects entries, in the first pass of its block.

    The result includes the activations that earlier blocks save, the tensors of the running block (as many bytes as
    `gradient_bytes` counts in the backward pass), the copies of weights, and the temporary tensors of the selection
    (`selection_bytes`). A block that is recomputed does not select entries again.
    """
    widths, text, recompute = _widths(config), job.model.config.text, config.runtime.recompute
    dense, experts = copy_bytes(config, job)
    found, kept = [], 0.0
    for layer in range(text.num_hidden_layers):
        kept += (
            count.block_inputs(text, layer, widths, keeps_combined(config), offloads(config))
            if recompute
            else sum(count.block_saves(text, layer, widths).values())
        )
        if layer not in text.index_source_layer_ids:
            continue
        parts = {
            "block inputs" if recompute else "saved by blocks": kept,
            "a running block": gradient_bytes(text, widths),
        }
        moment = _activations(parts, tokens) | gathered_bytes(config, job)
        copies = (dense[layer], experts[layer]) if recompute else (sum(dense[: layer + 1]), sum(experts[: layer + 1]))
        moment["copies of weights"] = float(sum(copies))
        moment["one packed weight made plain"] = float(UNPACKING * job.largest_packed)
        moment["selection of entries"] = selection_bytes(config, text, layer, tokens)
        found.append(moment)
    return found


def selection_bytes(config: Config, text: TextConfig, layer: int, tokens: int) -> float:
    """Compute the bytes of the temporary tensors with which the kernels of ``model/indexer.py`` select entries in layer
    ``layer``, for as many queries as the layer processes at a time.

    Each query has the highest score of every block of entries and, for each of the best ``index_topk`` blocks, the
    scores of the block's entries and the indices of the best entries. The layer that chooses the candidate blocks also
    sorts these blocks. A layer that selects only among candidate blocks has instead the scores of all entries in these
    blocks.
    """
    block, pool = text.candidate_block_size, text.candidate_topk_blocks
    rows, length = micro_batch_rows(config), config.task.seq_len
    blocks, budget = blocks_of_entries(text, layer, rows, length), CHUNK_ELEMENTS["cuda"]
    restricted = config.runtime.candidate_pool and candidate_bytes(text, rows, length) > 0
    if restricted and layer > text.candidate_source_layer_id and layer not in text.kv_source_layer_ids:
        queries = min(tokens, max(1, budget // (pool * block)))
        return float(queries * (4 * pool * block + 48 * text.index_topk))
    best = min(text.index_topk, blocks)
    queries = min(tokens, max(16, budget // max(1, blocks)))
    sorting = 24 * pool + 16 * best if restricted and layer == text.candidate_source_layer_id else 0
    return float(queries * (4 * blocks + max(best * (4 * block + 64), sorting)))


def layout_bytes(text: TextConfig) -> float:
    """Return the bytes per token of the tensors of a sequence layout on the device (``model/layout.py``): six int64
    numbers, two rotary factors, and, for each compression ratio, the tokens and rotary factors of the entries and the
    range of entries that a query sees.
    """
    ratios = {ratio for ratio in text.compress_ratios[: text.num_hidden_layers] if ratio}
    turn = 4 * text.qk_rope_head_dim
    return 48 + 2 * turn + sum(8 + turn / ratio + 16 for ratio in ratios)


def entry_gradient_bytes(config: Config, text: TextConfig, tokens: int) -> dict[str, float]:
    """Compute the memory for the gradients of the compressed KV entries and index keys of whole rows, including entries
    and keys of other ranks.

    The gradients of the entries of one Full layer at a time are summed in fp32 (``model/summed_gradients.py``); in
    memory beside this sum are the gradients, in fp32 and in bf16, from the layer whose backward pass runs. Before
    gradients are sent to other ranks, the gradients of the entries and of the index keys are copied. A backward pass
    begins with the losses of all indexers, so the summed gradients of the index keys of all Full layers are in memory
    at the same time. The indexer losses store gradients of index keys from the forward pass on: `model.count` counts
    the gradients for the tokens of a rank, and this function adds the gradients for the entries of other ranks.
    """
    ranks, bf16 = config.parallel.context_parallel, _bf16(config)
    entries = {layer: tokens * ranks / text.ratio(layer) for layer in text.kv_source_layer_ids}
    row = FP32 * text.head_dim + (FP32 + 2 * bf16) * text.head_dim
    if ranks > 1:
        row = max(row, 2 * FP32 * text.head_dim + FP32 * text.index_head_dim)
    found = {"gradients of entries": row * max(entries.values(), default=0.0)}
    if config.runtime.train_indexer:
        found["gradients of index keys"] = FP32 * text.index_head_dim * sum(entries.values())
        read = sum(tokens * (ranks - 1) / text.ratio(layer) for layer in text.index_source_layer_ids)
        found["gradients of index keys in the losses"] = (2 if bf16 else FP32) * text.index_head_dim * read
    return found


def context_bytes(config: Config, text: TextConfig, tokens: int) -> dict[str, float]:
    """Compute the memory that a rank needs because other ranks compute a part of the same rows
    (``model/parallel/context.py``).

    The result includes the entries and index keys gathered from other ranks in all Full layers, and the sliding-window
    keys of the tokens just before the rank's own chunk.
    """
    ranks, width = config.parallel.context_parallel, 2 if _bf16(config) else FP32
    if ranks == 1:
        return {}
    entries = [tokens * (text.head_dim + text.index_head_dim) / text.ratio(layer) for layer in text.kv_source_layer_ids]
    blocks = 1 if config.runtime.recompute else text.num_hidden_layers
    return {
        "entries and keys of other ranks": width * (ranks - 1) * sum(entries),
        "window keys before the chunk": float(width * blocks * (text.sliding_window - 1) * text.head_dim),
    }


def gradient_bytes(text: TextConfig, widths: count.Widths) -> float:
    """Compute the bytes per token of the gradients of activations during the backward pass of a block.

    The result is the gradients of the residual streams before and after a sublayer, plus the larger of two amounts: the
    gradients of queries and attention output, or the gradients of the inputs and hidden values of the experts.
    """
    width, k = widths.products, text.num_experts_per_tok
    streams = 2 * widths.streams * text.hc_mult * text.hidden_size
    attention = 2 * width * text.num_attention_heads * text.head_dim
    experts = width * k * (text.hidden_size + 2 * text.moe_intermediate_size)
    return float(streams + max(attention, experts))


def exchange_bytes(config: Config, text: TextConfig, tokens: int) -> dict[str, float]:
    """Compute the bytes of the send and receive buffers of one expert exchange (``model/moe.py``), and of the fp32
    combined rows.
    """
    layout = config.parallel
    if layout.expert_parallel == 1:
        return {}
    row = text.num_experts_per_tok * text.hidden_size
    width = 2 if _bf16(config) else FP32
    return {"expert exchange, its buffers": tokens * row * (width * (1 + settings(config).load_factor) + FP32)}


def _uneven(config: Config, job: Job, tokens: int, layers: int) -> dict[str, float]:
    """Compute the bytes of activations that a rank's experts save beyond the mean over ranks when routing is uneven."""
    if config.parallel.expert_parallel == 1:
        return {}
    more = settings(config).load_factor - 1
    size = count.expert_row_bytes(job.model.config.text, _bf16(config))
    return {"activations: uneven routing": more * layers * tokens * size}


def _activations(parts: dict[str, float], tokens: int) -> dict[str, float]:
    return {f"activations: {part}": tokens * size for part, size in parts.items()}


def head_bytes(config: Config, job: Job) -> dict[str, float]:
    """Compute the memory for the fp32 gradient of the output head in the loss, and the additional memory if the head is
    split over ranks.

    The cross-entropy gathers a split head in the precision of the matrix products and frees the gathered head before
    the backward pass. In this backward pass, the scaled gradient of the head is in memory beside the original gradient
    (``model/loss.py``). Other objectives than the cross-entropy keep the head gathered in fp32, and hold a second,
    padded copy of its gradient (``model/parallel/tables.py``).
    """
    size = float(count.head_gradient_bytes(job.model.config))
    found = {"the head's gradient in the loss": size} if job.head_gradient else {}
    if config.parallel.shard_embeddings:
        whole = settings(config).job == "distill"
        beside = (2 * size if whole else size) if job.head_gradient else size * (0.5 if _bf16(config) else 1.0)
        found["a split head, gathered or its gradient sent"] = beside
    return found


def looked_up_bytes(config: Config, model: DeepseekV41, tokens: int) -> dict[str, float]:
    """Return an upper bound of the bytes of table rows that a micro-batch fetches and keeps for the backward pass."""
    layout, text = config.parallel, model.config.text
    if layout.table_shards == 1:
        return {}
    rows = FP32 * sum(engram_rows(model, tokens)) * text.engram_head_dim
    if layout.shard_embeddings:
        rows += FP32 * min(tokens, text.vocab_size) * text.hidden_size
    return {"fetched table rows": float(rows)}


def engram_rows(model: DeepseekV41, tokens: int) -> list[int]:
    """Return, for every Engram table, an upper bound of the number of distinct rows that `tokens` tokens look up."""
    text = model.config.text
    tables = (model.layers[layer].engram.embed for layer in text.engram_layer_ids)
    return [min(tokens * text.engram_hash_heads, table.num_embeddings) for table in tables]


def copy_bytes(config: Config, job: Job) -> tuple[list[int], list[int]]:
    """Return the bytes of the copies of each block's dense and expert weights that are kept for the backward pass.

    Under bf16 autocast, the copies are the bf16 weights that autocast makes. In fp32 there are copies only of weights
    that are rounded in the forward pass (``runtime.expert_quant``, ``runtime.dense_quant``). Packed weights are not
    copied. Matrices whose rows are divided (``parallel.dense_shards``) are not copied either, because they are already
    gathered in bf16.
    """
    layout = config.parallel
    dense, experts = ([0] * job.model.config.text.num_hidden_layers for _ in range(2))
    for layer, of_experts, divided, numel in job.copied:
        rounded = config.runtime.expert_quant if of_experts else config.runtime.dense_quant
        width = 2 if _bf16(config) else FP32 * rounded
        if of_experts:
            experts[layer] += width * numel // layout.expert_parallel
        elif not divided or layout.dense_shards == 1:
            dense[layer] += width * numel
    return dense, experts


def largest_rounded(config: Config, job: Job, tokens: int) -> int:
    """Return the number of values of the largest tensor that a rank rounds at once in quantisation-aware training: the
    stacked weights of its routed experts, a dense matrix, or the Engram rows that its tokens read.
    """
    runtime, text = config.runtime, job.model.config.text
    sizes = [tokens * text.engram_hash_heads * text.engram_head_dim * bool(text.engram_layer_ids)]
    sizes[0] *= runtime.engram_quant
    for p in job.parameters:
        packing = parameter_packing(p.name)
        if packing == FP4_ROWS and runtime.expert_quant:
            sizes.append(prod(p.shape) // config.parallel.expert_parallel)
        elif packing == FP8_TILES and runtime.dense_quant:
            sizes.append(prod(p.shape))
    return max(sizes)


def gathered_bytes(config: Config, job: Job) -> dict[str, float]:
    """Compute the memory for gathered dense matrices in the backward pass (``train/distributed/dense.py``).

    The result includes the gathered matrices of the current block, the buffer for the matrices of the next block, the
    gradients of the current block, and the fp32 gradients of the previous block while they are sent.
    """
    if config.parallel.dense_shards == 1:
        return {}
    width = 2 if _bf16(config) else FP32
    return {"dense matrices gathered, and their gradients": float(max(job.block_matrices) * (3 * width + FP32))}


def drafter_bytes(config: Config, job: Job) -> dict[str, float]:
    """Compute the memory of task=dspark.

    The result is the hidden states and residual streams of the model that the drafter reads, plus the larger of two
    amounts: the activations of one block of the model in a forward pass without gradients, or the activations that the
    drafter saves.
    """
    widths, tokens, text = _widths(config), tokens_per_pass(config), job.model.config.text
    assert job.dspark is not None
    width, targets = widths.products, len(text.dspark_target_layer_ids)
    drafts = tokens // job.dspark.tokens_per_anchor * text.dspark_block_size
    held = {"what the drafter reads": float(tokens * width * text.hidden_size * (2 + targets))}
    held |= looked_up_bytes(config, job.model, tokens)
    held |= context_bytes(config, text, tokens)
    held["positions and rotations"] = float(tokens * layout_bytes(text))
    if config.parallel.shard_embeddings:
        held["the gathered head"] = float(count.head_gradient_bytes(job.model.config))
    blocks = [sum(count.block_saves(text, layer, widths).values()) for layer in range(text.num_hidden_layers)]
    running = _activations({"one block of the frozen model": max(blocks)}, tokens)
    running |= _uneven(config, job, tokens, 1) | exchange_bytes(config, text, tokens)
    running["one packed weight made plain"] = float(UNPACKING * job.largest_packed)
    inner = _stage_config(job.model.config)
    stage = sum(count.block_saves(inner, 0, widths).values())
    drafting = _activations({"drafts": stage * text.num_nextn_predict_layers + gradient_bytes(inner, widths)}, drafts)
    logits = min(drafts * text.vocab_size, CHUNK_LOGITS["cuda"])
    drafting["logits of a chunk"] = float(4 * FP32 * logits)  # logits of both models, their difference and the gradient
    return held | max(running, drafting, key=lambda moment: sum(moment.values()))


def _stage_config(config: ModelConfig) -> TextConfig:
    """Return a text configuration in which block 0 is a drafter layer: window attention and the drafter's experts."""
    text = config.text
    return replace(
        text,
        compress_ratios=(0,) * len(text.compress_ratios),
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        engram_layer_ids=(),
        n_routed_experts=text.dspark_n_routed_experts,
        num_experts_per_tok=text.dspark_num_experts_per_tok,
    )


def optimizer_working_bytes(mine: Sequence[Item]) -> float:
    """Compute the memory for temporary copies while a rank updates `mine`, the parameters that it owns.

    The result is the larger of two amounts, the memory for a batch of matrices in Muon or for the rows of the largest
    table (all its rows are counted as used), plus the memory for the divided matrices that this rank owns, gathered as
    a whole, and for the gradients of these matrices.
    """
    muon = [item for item in mine if item.method == "muon"]
    largest = max((rows * columns for item in muon for _, rows, columns in item.spans), default=0)
    batch = min(sum(item.numel * item.units for item in muon), max(largest, BATCH_ELEMENTS["cuda"]))
    table = max((item.numel for item in mine if item.method == "sinkhorn"), default=0)
    whole = sum(item.units * item.numel for item in mine if item.kept)
    return FP32 * (max(6.0 * batch, 3.0 * table) + 2 * whole)


def _widths(config: Config) -> count.Widths:
    return count.Widths(2 if _bf16(config) else FP32, 2 if config.runtime.stream_dtype == "bf16" else FP32)


def _bf16(config: Config) -> bool:
    return config.parallel.precision == "bf16"
