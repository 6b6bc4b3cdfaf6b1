"""``task=plan``: what a model costs on a layout of GPUs, computed before any machine is rented.

Nothing is allocated: the model is built on the meta device and gets the optimizer of the configuration; every number
follows from the sizes of its tensors and from ``model/count.py``. The layout is that of ``model/parallel`` in a ZeRO
stage 0 engine. Every rank takes part in data parallelism. The routed experts are split over ``expert_parallel`` ranks;
the rows of the Engram tables, and with ``shard_embeddings`` those of embedding and head, over ``table_shards``;
everything else is whole on every rank. A parameter's optimizer state is held by one owner among the ranks with the same
parameter (see ``owned``). ``tests/bench/bench_plan.py`` compares this with what two processes hold and send.

Not counted: memory of libraries, allocator and communication buffers, images, and uneven routing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import cast

from model import DeepseekV41, ModelConfig, build_drafter, build_model, count
from model.config import drafter_problems
from optim import Optimizer
from optim.muon import BATCH_ELEMENTS, COEFFICIENTS
from optim.optimizer import STATE_KEYS
from optim.ownership import assign_owners
from train.build import build_optimizer, freeze
from train.config.schema import Config
from train.errors import user_errors

GIB = 2**30
FP32 = 4
KINDS = (
    "dense",
    "experts",
    "Engram tables",
    "embedding and head",
)  # groups of parameters that are split in the same way


@dataclass(frozen=True)
class Item:
    """One parameter as a rank of the layout sees it: `units` equal matrices of `numel` elements, held alike by `copies`
    ranks.

    `spans` are the logical matrices (count, rows, columns) of one unit, for Muon.
    """

    kind: str
    method: str | None  # None: not trained
    units: int
    numel: int
    copies: int
    spans: tuple[tuple[int, int, int], ...]

    @property
    def state_bytes(self) -> int:
        """Optimizer state of one unit, fp32."""
        return FP32 * self.numel * len(STATE_KEYS[self.method]) if self.method else 0


@dataclass(frozen=True)
class ResourcePlan:
    """The numbers of a layout. Bytes and FLOPs are those of the fullest rank; a `step` is an optimizer step."""

    config: Config
    model: DeepseekV41
    weights: dict[str, int]
    gradients: dict[str, int]
    state: dict[str, int]  # by method
    working: dict[str, float]  # needed in the backward pass, but not during the update
    optimizer_working: float  # needed during the update only
    traffic: dict[str, float]  # bytes that a rank sends in a step
    step_flops: float
    optimizer_flops: dict[str, float]  # by method

    @property
    def held(self) -> int:
        """Bytes of weights, gradients and optimizer state on the fullest rank, needed at all times."""
        return sum(map(sum, (part.values() for part in (self.weights, self.gradients, self.state))))

    @property
    def terms(self) -> dict[str, float]:
        """Memory of the fullest rank by term, at the moment of the peak."""
        fixed = {f"weights: {k}": v for k, v in self.weights.items()}
        fixed |= {f"gradients: {k}": v for k, v in self.gradients.items()}
        fixed |= {f"optimizer state: {k}": v for k, v in self.state.items()}
        if sum(self.working.values()) >= self.optimizer_working:
            return fixed | self.working
        return fixed | {"optimizer's working copies": self.optimizer_working}

    @property
    def total(self) -> float:
        return sum(self.terms.values())


def run(config: Config) -> None:
    """Print the plan."""
    print(report(plan(config)))


def plan(config: Config) -> ResourcePlan:
    """Compute the plan of ``config``: its model, optimizer, task sizes and ``parallel``."""
    with user_errors():
        model = build_model(ModelConfig.from_dict(config.model), runtime=config.runtime, device="meta")
        freeze(config, model)
        optimizer = build_optimizer(config, model.config, model)
    items = list(rank_items(config, model, optimizer))
    weights = dict.fromkeys(KINDS, 0)
    gradients = dict.fromkeys(KINDS, 0)
    for item in items:
        weights[item.kind] += FP32 * item.units * item.numel
        gradients[item.kind] += FP32 * item.units * item.numel * (item.method is not None)
    state = dict.fromkeys(STATE_KEYS, 0)
    optimizer_flops = dict.fromkeys(STATE_KEYS, 0.0)
    for item in owned(items):
        assert item.method is not None, "what is owned is trained"
        state[item.method] += item.units * item.state_bytes
        optimizer_flops[item.method] += item.units * update_flops(item, config.optim.settings.sinkhorn.iterations)
    task = config.task
    local = task.seq_len * cast(int, task.global_batch_rows) // config.parallel.world_size
    costs = count.flops(model, config.task.seq_len, config.runtime.candidate_pool)
    per_token = sum(cost.step + cost.recomputed * config.runtime.recompute for cost in costs.values())
    return ResourcePlan(
        config=config,
        model=model,
        weights=weights,
        gradients=gradients,
        state=state,
        working=working_bytes(config, model),
        optimizer_working=optimizer_working_bytes(items),
        traffic=traffic_bytes(config, model, gradients, local),
        step_flops=local * per_token,
        optimizer_flops=optimizer_flops,
    )


def rows_in_pass(config: Config) -> int:
    """Rows of a forward pass of a rank."""
    return config.task.per_rank_batch(config.parallel.world_size)[0]


def rank_items(config: Config, model: DeepseekV41, optimizer: Optimizer) -> Iterator[Item]:
    """Every parameter as one rank holds it, the trained ones in the optimizer's order, which breaks ties."""
    layout, parameters = config.parallel, dict(model.named_parameters())
    ways = {
        name: (group["method"], blocks)
        for group in optimizer.param_groups
        for name, blocks in zip(group["names"], group["blocks"], strict=True)
    }
    for name in [*ways, *(name for name in parameters if name not in ways)]:
        parameter, (method, blocks) = parameters[name], ways.get(name, (None, None))
        *stack, rows, columns = (1, *parameter.shape) if parameter.dim() == 1 else parameter.shape
        part = count.part_of(name)
        if part == "routed experts":
            units, copies = stack[0] // layout.expert_parallel, layout.world_size // layout.expert_parallel
            yield Item("experts", method, units, rows * columns, copies, ((1, rows, columns),))
        elif part == "Engram tables" or (layout.shard_embeddings and part in ("embedding", "head")):
            rows = ceil(rows / layout.table_shards)
            copies = layout.world_size // layout.table_shards
            kind = "Engram tables" if part == "Engram tables" else "embedding and head"
            yield Item(kind, method, 1, rows * columns, copies, ((1, rows, columns),))
        else:
            spans = tuple((n, height, columns) for n, height in blocks or ((1, rows),))
            yield Item("dense", method, 1, rows * columns, layout.world_size, spans)


def owned(items: Sequence[Item]) -> list[Item]:
    """What the fullest rank updates and keeps the state of: each part of a parameter is owned by one of the ranks that
    hold it, chosen by ``optim.ownership.assign_owners``.

    Ranks that hold the same part of a parameter with c copies are strided: rank r has copy r * c // (number of ranks).
    """
    trained = [item for item in items if item.method]
    ranks = max((item.copies for item in trained), default=1)
    holds: dict[tuple[int, int], list[Item]] = {}
    for copies in {item.copies for item in trained}:
        held = [item for item in trained if item.copies == copies]
        for item, owner in zip(
            held, assign_owners([item.units * item.state_bytes for item in held], copies), strict=True
        ):
            holds.setdefault((copies, owner), []).append(item)

    def of(rank: int) -> list[Item]:
        return [item for (copies, owner), held in holds.items() if owner == rank * copies // ranks for item in held]

    loads = {key: sum(item.units * item.state_bytes for item in held) for key, held in holds.items()}
    kinds = {copies for copies, _ in holds}
    return of(max(range(ranks), key=lambda rank: sum(loads.get((c, rank * c // ranks), 0) for c in kinds)))


def update_flops(item: Item, iterations: int) -> float:
    """FLOPs of one update of one unit. Muon: three products per Newton-Schulz step and logical matrix. Sinkhorn, per
    element: momentum 7, norms and squares 3, update 4, and 2 for each of its `iterations`. AdamW: 15 per element.
    """
    if item.method == "muon":
        sides = [(n, min(rows, columns), max(rows, columns)) for n, rows, columns in item.spans]
        return sum(len(COEFFICIENTS) * n * (4 * small**2 * large + 2 * small**3) for n, small, large in sides)
    return (14.0 + 2 * iterations if item.method == "sinkhorn" else 15.0) * item.numel


def working_bytes(config: Config, model: DeepseekV41) -> dict[str, float]:
    """Peak bytes that a micro-batch needs.

    bf16 copies of the dense weights live until the forward ends (and through the backward unless blocks are
    recomputed), copies of expert weights as long as their block's activations. With recomputation the peak is either at
    the end of the forward or in the backward of a block.
    """
    bf16, recompute = config.parallel.precision == "bf16", config.runtime.recompute
    tokens = config.task.seq_len * rows_in_pass(config)
    saved = count.activation_bytes(model.config, bf16, recompute)
    held = {f"activations: {part}": tokens * size for part, size in saved.items()}
    held["the head's gradient in the loss"] = count.head_gradient_bytes(model.config)
    held |= looked_up_bytes(config, model, tokens)
    if not bf16:
        return held
    dense, experts = copy_bytes(config, model)
    if not recompute:
        return held | {"bf16 copies of dense weights": sum(dense), "bf16 copies of experts": sum(experts)}
    again = f"activations: {count.RECOMPUTED}"
    block = max(map(sum, zip(dense, experts, strict=True)))
    if sum(dense) > held[again] + block:
        del held[again]
        return held | {"bf16 copies of dense weights": sum(dense)}
    return held | {"bf16 copies of a block's weights": block}


def looked_up_bytes(config: Config, model: DeepseekV41, tokens: int) -> dict[str, float]:
    """Upper bound of the bytes that a micro-batch of `tokens` fetches from split tables and keeps for its backward; and
    the bytes of the gathered head.
    """
    layout, text = config.parallel, model.config.text
    if layout.table_shards == 1:
        return {}
    held = {"fetched table rows": float(FP32 * sum(engram_rows(model, tokens)) * text.engram_head_dim)}
    if layout.shard_embeddings:
        held["fetched table rows"] += FP32 * min(tokens, text.vocab_size) * text.hidden_size
        held["the gathered head"] = float(FP32 * text.vocab_size * text.hidden_size)
    return held


def engram_rows(model: DeepseekV41, tokens: int) -> list[int]:
    """Upper bound of the distinct rows of every Engram table that `tokens` tokens look up."""
    text = model.config.text
    tables = (model.layers[layer].engram.embed for layer in text.engram_layer_ids)
    return [min(tokens * text.engram_hash_heads, table.num_embeddings) for table in tables]


def copy_bytes(config: Config, model: DeepseekV41) -> tuple[list[int], list[int]]:
    """Bytes of the bf16 copies that autocast makes of each block's dense and expert weights."""
    dense, experts = ([0] * model.config.text.num_hidden_layers for _ in range(2))
    for name, parameter in count.autocast_copies(model):
        layer = int(count.layer_of(name))
        if count.part_of(name) == "routed experts":
            experts[layer] += 2 * parameter.numel() // config.parallel.expert_parallel
        else:
            dense[layer] += 2 * parameter.numel()
    return dense, experts


def optimizer_working_bytes(items: Sequence[Item]) -> float:
    """Temporary copies during the update: of Muon's batch of matrices, or of the largest table's live rows (up to all
    of them).
    """
    mine = owned(items)
    muon = [item for item in mine if item.method == "muon"]
    largest = max((rows * columns for item in muon for _, rows, columns in item.spans), default=0)
    batch = min(sum(item.numel * item.units for item in muon), max(largest, BATCH_ELEMENTS["cuda"]))
    table = max((item.numel for item in mine if item.method == "sinkhorn"), default=0)
    return FP32 * max(6.0 * batch, 3.0 * table)


def traffic_bytes(config: Config, model: DeepseekV41, gradients: dict[str, int], tokens: int) -> dict[str, float]:
    """Bytes that one rank sends in an optimizer step over `tokens` tokens of its own.

    Experts: a token's row goes to each of its k experts with its weight and its expert's id, and a row comes back, in
    forward, backward and recomputation, in the compute precision; with even routing 1/EP stays local. Tables: ids, fp32
    rows and their gradients, as if every lookup of a micro-batch were a different row. A split head is gathered, and
    its gradient returned, in every micro-batch. Gradients: a ring all-reduce in fp32 over the ranks that hold the same
    parameters. Updated weights go once around the same ring. Not included: the token counts.
    """
    layout, text = config.parallel, model.config.text
    width = 2 if layout.precision == "bf16" else FP32
    away, shard = 1 - 1 / layout.expert_parallel, 1 - 1 / layout.table_shards
    passes = 3 if config.runtime.recompute else 2
    row = text.num_experts_per_tok * (2 * text.hidden_size * width + 2 * FP32)
    ranks = layout.world_size
    batches = config.task.per_rank_batch(ranks)[1]
    looked_up = batches * sum(engram_rows(model, tokens // batches))
    copies = dict.fromkeys(KINDS, ranks // layout.table_shards)
    copies |= {"dense": ranks, "experts": ranks // layout.expert_parallel}
    ring = {kind: size * (1 - 1 / copies[kind]) for kind, size in gradients.items()}
    sent = {
        "all-to-all, experts": tokens * text.num_hidden_layers * passes * row * away,
        "all-to-all, Engram tables": looked_up * (8 + 2 * FP32 * text.engram_head_dim) * shard,
    }
    if layout.shard_embeddings:
        words = batches * min(tokens // batches, text.vocab_size)
        sent["all-to-all, embedding"] = words * (8 + 2 * FP32 * text.hidden_size) * shard
        sent["head gathered, its gradient"] = batches * 2 * FP32 * text.vocab_size * text.hidden_size * shard
    return sent | {"all-reduce of gradients": 2 * sum(ring.values()), "updated weights": float(sum(ring.values()))}


def report(p: ResourcePlan) -> str:
    """The plan as readable tables."""
    config, layout, task = p.config, p.config.parallel, p.config.task
    text, (rows, passes) = p.model.config.text, task.per_rank_batch(layout.world_size)
    recompute = "on" if config.runtime.recompute else "off"
    costs = count.flops(p.model, task.seq_len, config.runtime.candidate_pool)
    forward = sum(cost.forward for cost in costs.values())
    kv = count.kv_bytes(text)
    return "\n".join([
        *_table(("parameters", "", ""), _parameter_rows(p.model)),
        *_drafter_table(p.model),
        *_table(("active parameters of a text token", "", ""), _active_rows(p.model)),
        *_table(
            ("KV cache", "bytes/token"),
            [*((part, f"{size:g}") for part, size in kv.items()), ("all", f"{sum(kv.values()):g}")],
        ),
        f"  and the sliding windows, {count.window_kv_bytes(text):,} bytes a sequence",
        "",
        f"LAYOUT: {layout.world_size} GPUs, experts over {layout.expert_parallel}, Engram tables"
        f"{', embedding and head' * layout.shard_embeddings} over {layout.table_shards}; {passes} micro-batches of "
        f"{rows} x {task.seq_len} tokens, {layout.precision}, recompute {recompute}, optim.rules {config.optim.rules}",
        *_table(("memory of the fullest GPU", "GiB", ""), _memory_rows(p)),
        *_table(("activations of a micro-batch", "GiB"), [
            (f"recompute {name}", f"{_activations(config, p.model, on) / GIB:.2f}")
            for name, on in (("off", False), ("on", True))
        ]),
        *_table(
            (f"sent by a GPU in a step of {task.seq_len * cast(int, task.global_batch_rows):,} tokens", "GiB"),
            [(kind, f"{size / GIB:.2f}") for kind, size in p.traffic.items()],
        ),
        *_table(
            ("GFLOPs per token", "forward", "with backward", "recomputed", "of forward"),
            [
                *((part, *_giga(cost), _share(cost.forward, forward)) for part, cost in costs.items()),
                ("all", *_giga(map(sum, zip(*costs.values(), strict=True))), "100.0 %"),
            ],
        ),
        *_table(("FLOPs of a GPU in a step", "", ""), _step_rows(p)),
        "",
        verdict(p),
    ])  # fmt: skip


def verdict(p: ResourcePlan) -> str:
    """Whether the layout fits, what needs the most memory, and what to change if it does not fit."""
    groups: dict[str, float] = {}
    for term, size in p.terms.items():
        groups[term.split(":")[0]] = groups.get(term.split(":")[0], 0.0) + size
    largest = max(groups, key=lambda group: groups[group])
    need, room = p.total / GIB, p.config.parallel.gpu_memory_gib
    takes = f"Largest: {largest}, {groups[largest] / GIB:.2f} GiB."
    if room is None:
        return f"NEEDS {need:.2f} GiB on a GPU; give parallel.gpu_memory_gib to have it compared. {takes}"
    if need <= room:
        return f"FITS: needs {need:.2f} of {room:g} GiB on a GPU. {takes}"
    return f"DOES NOT FIT: needs {need:.2f} of {room:g} GiB on a GPU. {takes}\n{remedy(p)}"


def remedy(p: ResourcePlan) -> str:
    """What to change in a layout that does not fit."""
    fits = {choice: longest_rows(p, choice) for choice in (False, True)}
    if not fits[True]:
        return (
            f"No length of rows fits: weights, gradients and optimizer state take {p.held / GIB:.2f} GiB. Split more: "
            "more parallel.expert_parallel and table_shards, shard_embeddings=true"
        )
    found = [
        f"task.seq_len={length} with runtime.recompute={str(choice).lower()}"
        for choice, length in fits.items()
        if length
    ]
    rows = rows_in_pass(p.config)
    fewer = f" Fewer than {rows} rows in a pass (task.micro_batch) let them be longer." if rows > 1 else ""
    return f"What fits, all else as it is: {', '.join(found)}. A row is not split over GPUs.{fewer}"


def longest_rows(p: ResourcePlan, recompute: bool) -> int:
    """The longest rows that fit, by halving those of the plan; 0 if none do."""
    config = replace(p.config, runtime=replace(p.config.runtime, recompute=recompute))
    length = config.task.seq_len
    while length >= 2:
        config = replace(config, task=replace(config.task, seq_len=length))
        working = max(sum(working_bytes(config, p.model).values()), p.optimizer_working)
        if (p.held + working) / GIB <= (config.parallel.gpu_memory_gib or math.inf):
            return length
        length //= 2
    return 0


def _parameter_rows(model: DeepseekV41) -> list[tuple[str, ...]]:
    counts = count.parameters(model)
    total = sum(counts.values())
    backbone = total - sum(counts[part] for part in count.OUTSIDE_BACKBONE)
    sums = [("backbone: all but Engram tables, vision", backbone), ("all", total)]
    return [(part, f"{n:,}", _share(n, total)) for part, n in [*counts.items(), *sums] if n]


def _drafter_table(model: DeepseekV41) -> list[str]:
    """The drafter's parameters, if the configuration has one; no layout holds it beside the model."""
    if drafter_problems(model.config.text):
        return []
    counts = count.parameters(build_drafter(model))
    total = sum(counts.values())
    rows = [(part, f"{n:,}", _share(n, total)) for part, n in [*counts.items(), ("all", total)] if n]
    return _table(("drafter (mtp.*), not counted above or below", "", ""), rows)


def _active_rows(model: DeepseekV41) -> list[tuple[str, ...]]:
    active, encoder = count.active_parameters(model), count.prefill_layers(model.config.text)
    return [
        ("prefill", f"{active.prefill:,.0f}", f"  {encoder} blocks, and what makes the KV of block {encoder}"),
        ("decode", f"{active.decode:,.0f}", "  all blocks, final norm, head"),
    ]


def _memory_rows(p: ResourcePlan) -> list[tuple[str, ...]]:
    terms = [*p.terms.items(), ("all", p.total)]
    return [(term, f"{size / GIB:.2f}", _share(size, p.total)) for term, size in terms if size]


def _activations(config: Config, model: DeepseekV41, recompute: bool) -> float:
    per_token = count.activation_bytes(model.config, config.parallel.precision == "bf16", recompute)
    return config.task.seq_len * rows_in_pass(config) * sum(per_token.values())


def _step_rows(p: ResourcePlan) -> list[tuple[str, ...]]:
    optimizer = {f"optimizer, {method}": n for method, n in p.optimizer_flops.items() if n}
    rows = [*optimizer.items(), ("optimizer, all", sum(optimizer.values())), ("model", p.step_flops)]
    return [(name, f"{n:.3e}", f"{n / p.step_flops:.3%}".replace("%", " %")) for name, n in rows]


def _giga(values: Iterable[float]) -> list[str]:
    return [f"{value / 1e9:.2f}" for value in values]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}".replace("%", " %")


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Aligned lines under a header, after a blank line."""
    lines = [(f"  {name}", *cells) for name, *cells in rows]
    return ["", *(_line(*line) for line in (header, *lines))]


def _line(name: str, first: str, *cells: str) -> str:
    return (f"{name:<46}{first:>18}" + "".join(f"{cell:>14}" for cell in cells)).rstrip()
