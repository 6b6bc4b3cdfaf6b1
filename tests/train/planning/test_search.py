"""``plan.search``: every layout that it names fits and is allowed, and no smaller one fits."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from train.config.parse import parse
from train.config.schema import Config
from train.planning.job import Job, job_of
from train.planning.resources import GIB, ResourcePlan, plan
from train.planning.search import Layout, fitting, gpu_counts, layouts, search_report, speed

ROWS = ("task.seq_len=128", "task.micro_batch=1", "task.global_batch_rows=48", "plan.max_gpus=8")


@pytest.fixture(scope="module")
def tight(compose_raw: Callable, overrides: list[str]) -> tuple[Callable[..., Config], Config, Job]:
    """``configure``, a configuration with GPUs of half the memory that one GPU would need, and its job."""

    def configure(*changes: str) -> Config:
        return parse(compose_raw(*overrides, "task=plan", "optim=report", "plan.reserve_gib=0", *ROWS, *changes))

    need = plan(configure("runtime.recompute=true")).total / GIB
    config = configure(f"parallel.gpu_memory_gib={need * 0.5}")
    return configure, config, job_of(config)


@pytest.fixture(scope="module")
def found(tight: tuple) -> list[tuple[Layout, ResourcePlan]]:
    _, config, job = tight
    return list(fitting(config, job))


def test_layouts_found_fit_and_are_allowed(tight: tuple, found: list) -> None:
    configure, config, _ = tight
    assert len(found) >= 2
    for layout, p in found:
        room = config.parallel.gpu_memory_gib
        again = plan(configure(f"parallel.gpu_memory_gib={room}", *layout.command(config).split()))
        assert again.total == p.total <= room * GIB
        assert again.time == p.time


def test_nothing_smaller_or_faster_fits(tight: tuple, found: list) -> None:
    _, config, job = tight
    best = {layout.gpus: speed(p) for layout, p in found}
    assert min(best) > 1
    for gpus in gpu_counts(8):
        plans = [plan(layout.applied(config), job) for layout in layouts(config, job, gpus)]
        assert plans, f"no layout of {gpus} GPUs is tried"
        fit = [speed(p) for p in plans if p.fits]
        assert best.get(gpus) == max(fit, default=None)


def test_what_is_printed(tight: tuple, found: list) -> None:
    configure, config, job = tight
    lines = search_report(config, found).splitlines()
    layout, p = found[0]
    number = next(at for at, line in enumerate(lines) if line.startswith("FEWEST GPUS"))
    assert re.match(rf"FEWEST GPUS: {layout.gpus}, {p.total / GIB:.2f} GiB each", lines[number])
    assert lines[number + 1].split() == layout.command(config).split()
    fastest = max(found, key=lambda pair: speed(pair[1]) / pair[0].gpus)[0]
    assert f"MOST TOKENS/S A GPU: {fastest.gpus}," in "\n".join(lines)
    assert "NO LAYOUT of up to 8 GPUs" in search_report(config, [])
    assert "NO SEARCH: give parallel.gpu_memory_gib" in search_report(configure(), [])


def test_gpu_counts() -> None:
    assert gpu_counts(13) == [1, 2, 3, 4, 6, 8, 12]
