"""Computes the bytes that a rank sends in an optimizer step, and the seconds of a step for given hardware rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from model.quantize import KV_INDEX, KV_MAIN
from train.config.schema import Config, HardwareConfig
from train.planning.items import FP32, Item
from train.planning.job import Job, settings
from train.planning.memory import engram_rows, keeps_combined, micro_batches, tokens_per_pass

GRADIENTS, UPDATES = "all-reduce of gradients", "updated weights"
ENTRIES, HALO = "entries and keys of rows", "window keys of rows"
GATHERED, SUMMED = "dense matrices gathered", "gradients of dense matrices summed"
OWNED = "dense matrices to their owners and back"


class Sent(NamedTuple):
    """The bytes that a rank sends (``size``), and the share of these bytes that is sent to ranks on the same node
    (``inside``).
    """

    size: float
    inside: float


class StepTime(NamedTuple):
    """The seconds of a step: for computation, for traffic between nodes, for traffic inside a node, and for traffic to
    host memory.
    """

    arithmetic: float
    network: float
    node: float
    host: float

    @property
    def sum(self) -> float:
        """Seconds of a step if computation and the three kinds of traffic do not overlap."""
        return self.arithmetic + self.network + self.node + self.host


def sent_in_step(config: Config, job: Job, items: Sequence[Item]) -> dict[str, Sent]:
    """Compute the bytes that one rank sends in an optimizer step, by kind of data.

    - Experts: each token's row is sent to the token's k experts, with a routing weight and an expert id, and each
      expert sends a row back; the same exchange happens in the backward pass, in the compute precision. Recomputation
      sends the rows to the experts again, and with `runtime.keep_combined=false` the experts send their results again
      too. With even routing, a share of 1/EP of the rows stays on the rank (EP = `parallel.expert_parallel`).
    - Tables: row ids, fp32 rows and the gradients of the rows are sent, as if every lookup of a micro-batch were a
      different row.
    - Output head: if the head is split over ranks, the head is gathered, and its gradient is sent back, in every
      micro-batch.
    - Gradients: the gradient of each parameter is summed by a ring all-reduce in fp32 over the ranks that hold the
      parameter.
    - Updated weights: each updated parameter is sent once around the ring of ranks that hold the parameter.
    - Dense matrices: if their rows are split (`parallel.dense_shards`), `rows_sent` computes the bytes.

    Before the rows, ranks tell each other how many tokens they will send; the bytes of these counts are not included.
    """
    layout, text = config.parallel, job.model.config.text
    tokens, batches = tokens_per_pass(config), micro_batches(config)
    width = 2 if layout.precision == "bf16" else FP32
    back = text.hidden_size * width
    out = back + 2 * FP32
    if config.runtime.dispatch == "fp8":  # one byte per value, and a one-byte scale per 32 values
        out = text.hidden_size + -(-text.hidden_size // 32) + 2 * FP32
    row = out + back
    if job.drafter is None:
        row += 2 * back + 2 * FP32
        if config.runtime.recompute:
            row += out + back * (not keeps_combined(config))
    row *= text.num_experts_per_tok
    away, shard = 1 - 1 / layout.expert_parallel, 1 - 1 / layout.table_shards
    near, table = pairs_inside(layout.expert_parallel, config), pairs_inside(layout.table_shards, config)
    looked_up = batches * sum(engram_rows(job.model, tokens))
    table_passes = 2 if _trains(items, "Engram tables") else 1
    sent = {
        "all-to-all, experts": Sent(batches * tokens * text.num_hidden_layers * row * away, near),
        "all-to-all, Engram tables": Sent(looked_up * (8 + table_passes * FP32 * text.engram_head_dim) * shard, table),
    }
    if layout.shard_embeddings:
        words, both = batches * min(tokens, text.vocab_size), 2 if _trains(items, "embedding and head") else 1
        sent["all-to-all, embedding"] = Sent(words * (8 + both * FP32 * text.hidden_size) * shard, table)
        gathered = FP32 if settings(config).job == "distill" else width  # see `memory.head_bytes`
        head = batches * (gathered + FP32 * (both - 1)) * text.vocab_size * text.hidden_size * shard
        sent["head gathered, its gradient"] = Sent(head, table)
    sent |= within_rows(config, job, batches * tokens) | rows_sent(config, items, batches, width)
    return sent | rings(config, items)


def within_rows(config: Config, job: Job, tokens: int) -> dict[str, Sent]:
    """Compute the bytes that ranks send to the other ranks of their context-parallel group, which share the same rows.

    A rank sends its compressed KV entries and index keys to all other ranks of the group (as codes and scales if
    `runtime.gather=packed`), and the gradients of these entries and keys are sent back in fp32. In every block, a rank
    sends the keys that the next rank needs for its sliding window, and the gradients of these keys are sent back;
    recomputation sends the keys again. Bytes for the sums of the balance loss over ranks are not included.
    """
    ranks, text = config.parallel.context_parallel, job.model.config.text
    if ranks == 1:
        return {}
    width, passes = 2 if config.parallel.precision == "bf16" else FP32, 3 if config.runtime.recompute else 2
    entries = tokens * sum(1 / text.ratio(layer) for layer in text.kv_source_layer_ids)
    values = text.head_dim + text.index_head_dim
    there = width * values
    if config.runtime.gather == "packed":
        there = sum(KV_MAIN.widths(text.head_dim) + KV_INDEX.widths(text.index_head_dim))
    halo = text.num_hidden_layers * (text.sliding_window - 1) * text.head_dim * width * passes
    halos = micro_batches(config) * halo * (1 - 1 / ranks)  # last rank: no keys; first rank: no gradients
    return {
        ENTRIES: Sent(entries * (there + FP32 * values) * (ranks - 1), ring_inside(ranks, 1, config)),
        HALO: Sent(float(halos), ring_inside(ranks, 1, config)),
    }


def rows_sent(config: Config, items: Sequence[Item], batches: int, width: int) -> dict[str, Sent]:
    """Compute the bytes that a rank sends for dense matrices whose rows are split over G ranks.

    In every micro-batch the matrices are gathered for the forward and for the backward pass of their block, and their
    gradients are summed over the G ranks in fp32. Once per step the gradient sums of all sets of G ranks are added in a
    ring. Gradients and weights are then sent to the ranks that own the optimizer state of the matrices, and the updated
    rows are sent back to the ranks of the owner's set, which pass them on to the other sets in a ring.
    """
    divided = [item for item in items if item.kept]
    if not divided:
        return {}
    ranks, parts = config.parallel.world_size, config.parallel.dense_shards
    sets, size = ranks // parts, sum(item.kept for item in divided)
    near, far = ring_inside(parts, 1, config), ring_inside(sets, parts, config)
    owned = 3 * FP32 * size / sets * (1 - 1 / parts)
    return {
        GATHERED: Sent(2 * batches * width * size * (parts - 1), near),
        SUMMED: Sent(batches * FP32 * size * (parts - 1), near),
        f"{SUMMED}, between sets": Sent(2 * FP32 * size * (1 - 1 / sets), far),
        OWNED: Sent(owned, pairs_inside(parts, config)),
        "updated dense matrices, between sets": Sent(FP32 * size * (1 - 1 / sets), far),
    }


def rings(config: Config, items: Sequence[Item]) -> dict[str, Sent]:
    """Compute the traffic of the gradient all-reduce and of the broadcast of updated weights.

    Gradient all-reduce and weight broadcast are modelled as rings over the ranks that hold the same parameters.
    """
    ranks, sums, inner = config.parallel.world_size, 0.0, 0.0
    for item in items:
        if item.kept:
            continue
        size = item.gradient_bytes * (1 - 1 / item.copies)
        sums += size
        inner += size * ring_inside(item.copies, ranks // item.copies, config)
    inside = inner / sums if sums else 1.0
    return {GRADIENTS: Sent(2 * sums, inside), UPDATES: Sent(sums, inside)}


def _trains(items: Sequence[Item], kind: str) -> bool:
    return any(item.method for item in items if item.kind == kind)


def pairs_inside(ranks: int, config: Config) -> float:
    """Return the fraction of bytes sent inside a node if a rank sends equally to all of ``ranks`` consecutive ranks."""
    near = min(ranks, config.parallel.hardware.gpus_per_node)
    return 1.0 if near == ranks else (near - 1) / (ranks - 1)


def ring_inside(ranks: int, stride: int, config: Config) -> float:
    """Return the fraction of bytes sent inside a node in a ring of ``ranks`` ranks whose numbers are ``stride`` apart.

    Ranks on the same node are neighbours in the ring, so the ring enters and leaves each node only once.
    """
    near = min(ranks, max(1, config.parallel.hardware.gpus_per_node // stride))
    return 1.0 if near == ranks else 1 - 1 / near


def step_time(flops: float, sent: dict[str, Sent], offloaded: float, hardware: HardwareConfig) -> StepTime:
    """Estimate the seconds of a step with the rates of ``parallel.hardware``; `offloaded` bytes go to host memory."""
    between = sum(part.size * (1 - part.inside) for part in sent.values())
    inside = sum(part.size * part.inside for part in sent.values())
    return StepTime(
        flops / (hardware.tflops * 1e12),
        between / (hardware.network_gb_s * 1e9),
        inside / (hardware.node_gb_s * 1e9),
        2 * offloaded / (hardware.host_gb_s * 1e9),
    )
