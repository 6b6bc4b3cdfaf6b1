"""Searches other layouts for a job (``plan.search``): the fewest GPUs that the job fits on, and the layout with the
highest estimated speed.
"""

from __future__ import annotations

from collections.abc import Iterator

from train.config.schema import Config
from train.planning.job import Job, settings
from train.planning.layouts import Layout, gpu_counts, layouts
from train.planning.report import table
from train.planning.resources import GIB, ResourcePlan, plan


def fitting(config: Config, job: Job) -> Iterator[tuple[Layout, ResourcePlan]]:
    """For every number of GPUs on which the job fits, in ascending order, yield the fitting layout with the most tokens
    per second, and its plan.
    """
    for gpus in gpu_counts(settings(config).max_gpus):
        found = [(layout, plan(layout.applied(config), job)) for layout in layouts(config, job, gpus)]
        found = [(layout, p) for layout, p in found if p.fits]
        if found:
            yield max(found, key=lambda pair: speed(pair[1]))


def speed(p: ResourcePlan) -> float:
    """Return the estimated tokens per second of all GPUs together, if computation and traffic do not overlap."""
    return p.tokens_per_second(p.time.sum)


def search_report(config: Config, found: list[tuple[Layout, ResourcePlan]]) -> str:
    """Format the layouts that ``fitting`` has found, and their plans, as text."""
    room, most = config.parallel.gpu_memory_gib, settings(config).max_gpus
    if room is None:
        return "\nNO SEARCH: give parallel.gpu_memory_gib, the memory of a GPU that layouts are to fit"
    if not found:
        return f"\nNO LAYOUT of up to {most} GPUs (plan.max_gpus) fits {room:g} GiB"
    rows = [
        (
            f"{layout.gpus:>6}{layout.context:>6}{layout.experts:>9}{layout.dense:>7}"
            f"{'yes' if layout.recompute else 'no':>11}{'yes' if layout.offload else 'no':>9}",
            f"{p.total / GIB:.2f}",
            f"{speed(p):,.0f}",
            f"{speed(p) / layout.gpus:,.0f}",
            f"{p.mfu(p.time.sum):.1%}".replace("%", " %"),
        )
        for layout, p in found
    ]
    header = f"  {'GPUs':>6}{'rows':>6}{'experts':>9}{'dense':>7}{'recompute':>11}{'offload':>9}"
    lines = [
        f"\nLAYOUTS that fit {room:g} GiB; for each number of GPUs the one with most tokens/s, nothing overlapping"
    ]
    lines += table((header, "GiB", "tokens/s", "of a GPU", "MFU"), rows)[1:]
    lines.append("  (rows, experts, dense: the number of GPUs that share a row, a layer's experts, the dense matrices)")
    told = [("FEWEST GPUS", *found[0]), ("MOST TOKENS/S A GPU", *max(found, key=lambda f: speed(f[1]) / f[0].gpus))]
    told += [(f"ON {layout.gpus} GPUS", layout, p) for layout, p in found if layout.gpus == config.parallel.world_size]
    for title, layout, p in told:
        lines.append(
            f"{title}: {layout.gpus}, {p.total / GIB:.2f} GiB each, {speed(p):,.0f} tokens/s\n"
            f"  {layout.command(config) or 'as configured'}"
        )
    return "\n".join(lines)
