"""Formats a plan as text: sizes of the model, memory for each term, bytes sent, time, and a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from model import DeepseekV41, build_drafter, count
from model.config import drafter_problems
from train.config.schema import counted
from train.planning.job import settings
from train.planning.resources import GIB, ResourcePlan
from train.planning.verdict import verdict


def report(p: ResourcePlan) -> str:
    """Format the plan as tables, followed by the verdict."""
    kv = count.kv_bytes(p.model.config.text)
    forward = sum(cost.forward for cost in p.job.costs.values())
    return "\n".join([
        *table(("parameters", "", ""), _parameter_rows(p.model)),
        *_drafter_table(p),
        *table(("active parameters of a text token", "", ""), _active_rows(p.model)),
        *table(
            ("KV cache", "bytes/token"),
            [*((part, f"{size:g}") for part, size in kv.items()), ("all", f"{sum(kv.values()):g}")],
        ),
        f"  and the sliding windows, {count.window_kv_bytes(p.model.config.text):,} bytes a sequence",
        *table(
            ("GFLOPs per token", "forward", "with backward", "recomputed", "of forward"),
            [
                *((part, *_giga(cost), _share(cost.forward, forward)) for part, cost in p.job.costs.items()),
                ("all", *_giga(map(sum, zip(*p.job.costs.values(), strict=True))), "100.0 %"),
            ],
        ),
        "",
        *_layout_lines(p),
        *table(("memory of the fullest GPU", "GiB", ""), _memory_rows(p)),
        *table(
            (f"sent by a GPU in a step of {p.step_tokens:,} tokens", "GiB", "in its node", "seconds"), _sent_rows(p)
        ),
        *table(("FLOPs of a GPU in a step", "", ""), _step_rows(p)),
        *_time_lines(p),
        "",
        verdict(p),
    ])  # fmt: skip


def _layout_lines(p: ResourcePlan) -> list[str]:
    """Describe in words the layout, the job and the assumptions of the plan."""
    config, layout, task = p.config, p.config.parallel, p.config.task
    rows, passes = task.division_of_step(layout.row_groups)
    assumed, recompute = settings(config), "on" if config.runtime.recompute else "off"
    trained = f"optim.rules {config.optim.rules}"
    if p.job.drafter is not None:
        trained = f"a drafter is trained ({trained}), the model is frozen"
    elif config.lora.on:
        trained = f"an adapter of rank {config.lora.rank} is trained on {', '.join(config.lora.targets)}"
    kept = f"; frozen weights are kept as {'stored' if config.runtime.frozen == 'packed' else 'fp32 values'}"
    if tables := p.job.host_table_bytes:
        kept += f", Engram tables in host memory ({tables / layout.table_shards / GIB:.2f} GiB a rank)"
    shared = f", each over {counted(layout.context_parallel, 'GPU')}" if layout.context_parallel > 1 else ""
    dense = f", dense matrices over {layout.dense_shards}" if layout.dense_shards > 1 else ""
    return [
        f"LAYOUT: {counted(layout.world_size, 'GPU')}, experts over {layout.expert_parallel}, Engram tables"
        f"{', embedding and head' * layout.shard_embeddings} over {layout.table_shards}{dense}; "
        f"{passes} micro-batches of {rows} x {task.seq_len} tokens{shared}, {layout.precision}, recompute {recompute}"
        + (f", {p.host / GIB:.2f} GiB of block inputs in each rank's host memory" if p.host else ""),
        f"JOB: {trained}{kept if p.job.frozen else ''}",
        f"ASSUMED: a rank's experts receive up to {assumed.load_factor:g} times the mean (plan.load_factor); "
        f"{assumed.reserve_gib:g} GiB stay free (plan.reserve_gib)",
    ]


def _time_lines(p: ResourcePlan) -> list[str]:
    """Format the estimated seconds of a step for the rates in ``parallel.hardware``, and the resulting speed."""
    hardware, time = p.config.parallel.hardware, p.time
    rows = [
        ("arithmetic", f"{time.arithmetic:.2f}", f"at {hardware.tflops:g} TFLOP/s"),
        ("bytes between nodes", f"{time.network:.2f}", f"at {hardware.network_gb_s:g} GB/s"),
        ("bytes inside a node", f"{time.node:.2f}", f"at {hardware.node_gb_s:g} GB/s"),
        ("bytes to host memory and back", f"{time.host:.2f}", f"at {hardware.host_gb_s:g} GB/s"),
    ]
    lines = table(("estimated seconds of a step", "", "parallel.hardware"), rows)
    for when, seconds in (("one after the other", time.sum), ("all at the same time", max(time))):
        speed = f"{p.tokens_per_second(seconds):,.0f} tokens/s"
        lines.append(f"  {when}: {seconds:.2f} s, {speed}, MFU {p.mfu(seconds):.1%}".replace("%", " %"))
    return lines


def _parameter_rows(model: DeepseekV41) -> list[tuple[str, ...]]:
    counts = count.parameters(model)
    total = sum(counts.values())
    backbone = total - sum(counts[part] for part in count.OUTSIDE_BACKBONE)
    sums = [("backbone: all but Engram tables, vision", backbone), ("all", total)]
    return [(part, f"{n:,}", _share(n, total)) for part, n in [*counts.items(), *sums] if n]


def _drafter_table(p: ResourcePlan) -> list[str]:
    """Format a table of the drafter's parameters, if the model has a drafter."""
    if drafter_problems(p.model.config.text):
        return []
    counts = count.parameters(p.job.drafter or build_drafter(p.model))
    total = sum(counts.values())
    rows = [(part, f"{n:,}", _share(n, total)) for part, n in [*counts.items(), ("all", total)] if n]
    counted_below = "" if p.job.drafter else " or below"
    return table((f"drafter (mtp.*), not counted above{counted_below}", "", ""), rows)


def _active_rows(model: DeepseekV41) -> list[tuple[str, ...]]:
    active, encoder = count.active_parameters(model), count.prefill_layers(model.config.text)
    return [
        ("prefill", f"{active.prefill:,.0f}", f"  {encoder} blocks, and what makes the KV of block {encoder}"),
        ("decode", f"{active.decode:,.0f}", "  all blocks, final norm, head"),
    ]


def _memory_rows(p: ResourcePlan) -> list[tuple[str, ...]]:
    terms = [*p.terms.items(), ("all", p.total)]
    return [(term, f"{size / GIB:.2f}", _share(size, p.total)) for term, size in terms if size]


def _sent_rows(p: ResourcePlan) -> list[tuple[str, ...]]:
    hardware = p.config.parallel.hardware
    rows: list[tuple[str, ...]] = []
    for kind, part in p.sent.items():
        inside = part.size * part.inside
        seconds = inside / (hardware.node_gb_s * 1e9) + (part.size - inside) / (hardware.network_gb_s * 1e9)
        rows.append((kind, f"{part.size / GIB:.2f}", f"{part.inside:.0%}".replace("%", " %"), f"{seconds:.2f}"))
    return rows


def _step_rows(p: ResourcePlan) -> list[tuple[str, ...]]:
    optimizer = {f"optimizer, {method}": n for method, n in p.optimizer_flops.items() if n}
    rows = [*optimizer.items(), ("optimizer, all", sum(optimizer.values())), ("model", p.step_flops)]
    return [(name, f"{n:.3e}", f"{n / p.step_flops:.3%}".replace("%", " %")) for name, n in rows]


def _giga(values: Iterable[float]) -> list[str]:
    return [f"{value / 1e9:.2f}" for value in values]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}".replace("%", " %")


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Format a table as aligned lines below a header, preceded by a blank line."""
    lines = [(f"  {name}", *cells) for name, *cells in rows]
    return ["", *(_line(*line) for line in (header, *lines))]


def _line(name: str, first: str, *cells: str) -> str:
    return (f"{name:<50}{first:>18}" + "".join(f"{cell:>15}" for cell in cells)).rstrip()
