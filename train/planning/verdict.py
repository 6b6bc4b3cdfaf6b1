"""Says whether a job fits on a layout, and what to change if the job does not fit."""

from __future__ import annotations

import math
from dataclasses import replace

from train.config.schema import counted
from train.planning.layouts import Layout, contexts, layouts
from train.planning.memory import working_bytes
from train.planning.resources import GIB, RESERVE, ResourcePlan, plan


def verdict(p: ResourcePlan) -> str:
    """Return a text that says whether the layout fits, what needs the most memory, and what to change if the layout
    does not fit.
    """
    groups: dict[str, float] = {}
    for term, size in p.terms.items():
        groups[term.split(":")[0]] = groups.get(term.split(":")[0], 0.0) + size
    largest = max((group for group in groups if group != RESERVE), key=lambda group: groups[group])
    need, room = p.total / GIB, p.config.parallel.gpu_memory_gib
    takes = f"Largest: {largest}, {groups[largest] / GIB:.2f} GiB."
    if room is None:
        return f"NEEDS {need:.2f} GiB on a GPU; set parallel.gpu_memory_gib to compare it with a GPU's memory. {takes}"
    if p.fits:
        fewest = smallest_context(p)
        return f"FITS: needs {need:.2f} of {room:g} GiB on a GPU, {room - need:.2f} GiB are left. {takes}{fewest}"
    return f"DOES NOT FIT: needs {need:.2f} of {room:g} GiB on a GPU. {takes}\n{remedy(p)}"


def smallest_context(p: ResourcePlan) -> str:
    """Return a sentence that names the smallest ``parallel.context_parallel`` with which the job would also fit. The
    sentence is empty if rows are not split over GPUs.
    """
    own = Layout.of(p.config)
    choices = (replace(own, context=n) for n in contexts(p.config, own.gpus) if n < own.context)
    for layout in choices:
        other = plan(layout.applied(p.config), p.job)
        if other.fits:
            return f"\nIt would also fit with parallel.context_parallel={layout.context}: {other.total / GIB:.2f} GiB."
    return "\nNo smaller parallel.context_parallel fits." if own.context > 1 else ""


def remedy(p: ResourcePlan) -> str:
    """Return a text that says, for a layout that does not fit, which changes would make the job fit."""
    lengths = {choice: longest_rows(p, choice) for choice in (False, True)}
    shorter = [
        f"task.seq_len={length} with runtime.recompute={str(choice).lower()}"
        for choice, length in lengths.items()
        if length
    ]
    nearest = nearest_layout(p)
    found = []
    if nearest:
        layout, other = nearest
        found.append(f"What fits on as many GPUs: {layout.command(p.config)} ({other.total / GIB:.2f} GiB).")
    if shorter:
        found.append(f"What fits in this layout: {', '.join(shorter)}.")
    if not found:
        found.append(
            f"Nothing fits on {counted(p.config.parallel.world_size, 'GPU')}: weights, gradients and optimizer state "
            f"take {p.held / GIB:.2f} GiB in this layout. plan.search=true finds the number of GPUs that it takes."
        )
    rows = p.config.task.division_of_step(p.config.parallel.row_groups)[0]
    if rows > 1:
        found.append(f"Fewer than {rows} rows in a micro-batch (task.micro_batch) need less.")
    return "\n".join(found)


def nearest_layout(p: ResourcePlan) -> tuple[Layout, ResourcePlan] | None:
    """Return the layout that fits on as many GPUs as the configuration has and changes the fewest configuration keys,
    and its plan, or None if no layout fits. Of several such layouts, the one with the most tokens per second is
    returned.
    """
    own = Layout.of(p.config)
    plans = ((layout, plan(layout.applied(p.config), p.job)) for layout in layouts(p.config, p.job, own.gpus))
    fitting = [(layout, other) for layout, other in plans if other.fits]
    keys = {id(layout): len(layout.command(p.config).split()) for layout, _ in fitting}
    return min(fitting, key=lambda pair: (keys[id(pair[0])], pair[1].time.sum), default=None)


def longest_rows(p: ResourcePlan, recompute: bool) -> int:
    """Return the largest row length in tokens that fits, or 0 if none fits. The function tries the row length of the
    plan, then half of this length, a quarter, and so on. recompute: whether activations are recomputed.
    """
    config = replace(p.config, runtime=p.config.runtime.recomputing(recompute))
    length = config.task.seq_len
    while length >= 2:
        config = replace(config, task=replace(config.task, seq_len=length))
        working = max(sum(working_bytes(config, p.job).values()), p.optimizer_working)
        if (p.held + p.reserve + working) / GIB <= (config.parallel.gpu_memory_gib or math.inf):
            return length
        length //= 2
    return 0
