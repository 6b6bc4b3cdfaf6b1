"""The runs and layouts that conf/ describes fit the GPUs that they name, and the report's runs have its values."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from model import ModelConfig
from train.config.parse import parse
from train.config.resume import CHANGEABLE, differences
from train.config.schema import Config, to_dict
from train.planning.report import report
from train.planning.resources import GIB, ResourcePlan, plan
from train.planning.verdict import verdict

T = 10**12


@pytest.fixture(scope="module")
def planned(compose_raw: Callable) -> Callable[..., ResourcePlan]:
    return lambda *given: plan(parse(compose_raw("task=plan", *given)))


@pytest.mark.parametrize(
    ("given", "rows", "context"),
    [
        (("experiment=report_64k",), 65_536, 8),
        (("experiment=report_1m",), 1_048_576, 128),
        (("model=v41_flash", "parallel=cluster"), 65_536, 8),
        (("model=v41_flash", "parallel=cluster_1m", "task.seq_len=1048576", "task.global_batch_rows=96"), 2**20, 128),
    ],
    ids=["report_64k", "report_1m", "cluster", "cluster_1m"],
)
def test_the_reports_rows_fit_the_cluster(planned: Callable, given: tuple, rows: int, context: int) -> None:
    p = planned(*given)
    layout = p.config.parallel
    assert (layout.world_size, layout.gpu_memory_gib, layout.context_parallel) == (768, 139, context)
    assert p.config.task.seq_len == rows and p.step_tokens == 1536 * 65_536
    assert verdict(p).startswith("FITS: needs ") and p.total < 110 * GIB


@pytest.mark.parametrize(("name", "until"), [("report_64k", 34 * T), ("report_1m", 45 * T)])
def test_the_reports_runs_have_its_values(compose_raw: Callable, name: str, until: int) -> None:
    """SPEC.md section 6, which restates the report."""
    config = parse(compose_raw("task=plan", f"experiment={name}"))
    assert isinstance(config, Config)
    assert ModelConfig.from_dict(config.model).to_dict() == ModelConfig.from_dict(released(compose_raw)).to_dict()
    optim, schedule = config.optim, config.optim.schedule
    assert config.task.tokens == until and optim.rules == "report" and optim.per_head
    assert [schedule.lr(step, 0) for step in (1000, 2000)] == pytest.approx([1.3e-4, 2.6e-4], rel=1e-3)
    assert [schedule.lr(10**6, n * T) for n in (27, 28, 34, 40, 45)] == pytest.approx(
        [2.6e-4, 2.6e-4, (2.6e-4 + 2.6e-5) / 2, 2.6e-5, 2.6e-5]
    )
    assert schedule.factors(27 * T) == {"vision": 0.0} and 0 < schedule.factors(29 * T)["vision"] < 1
    assert (optim.router_bias_mode, optim.router_bias_rate, config.loss.router_balance) == ("separate", 1e-3, 1e-4)
    settings = optim.settings
    assert (settings.muon.momentum, settings.muon.update_rms, optim.engram_lr_factor) == (0.95, 0.18, 5.0)
    assert (settings.sinkhorn.momentum, settings.sinkhorn.iterations, settings.sinkhorn.tau) == (0.95, 11, 1e-3)
    assert (settings.adamw.beta1, settings.adamw.beta2, settings.adamw.eps) == (0.9, 0.95, 1e-20)
    assert config.runtime.kv_quant and config.runtime.candidate_pool and config.runtime.recompute


def test_the_reports_last_part_continues_its_first_in_longer_rows(compose_raw: Callable) -> None:
    first, last = (parse(compose_raw(f"experiment={name}", "data.tokenizer=x")) for name in ("report_64k", "report_1m"))
    assert first.run_dir == last.run_dir and first.task.length_schedule == last.task.length_schedule
    changed = {key for key, *_ in differences(to_dict(first), last)}
    assert all(key.startswith(CHANGEABLE) for key in changed), changed
    assert (first.task.at(34 * T - 1).seq_len, first.task.at(34 * T - 1).global_batch_rows) == (65_536, 1536)
    assert (last.task.at(34 * T).seq_len, last.task.at(34 * T).global_batch_rows) == (1_048_576, 96)


def released(compose_raw: Callable) -> dict:
    return parse(compose_raw("task=plan", "model=v41_flash")).model


@pytest.mark.slow
def test_an_adapter_of_the_released_model_fits_a_node(planned: Callable) -> None:
    given = ("model=v41_flash", "parallel=node", "lora=all", "task.seq_len=32768")
    p = planned(*given)
    four = planned(*given, "parallel.context_parallel=4")
    assert p.fits and four.fits and not planned(*given, "parallel.context_parallel=2").fits
    lines = verdict(p).splitlines()
    assert lines[0].startswith(
        f"FITS: needs {p.total / GIB:.2f} of 139 GiB on a GPU, {139 - p.total / GIB:.2f} GiB are"
    )
    assert lines[1] == f"It would also fit with parallel.context_parallel=4: {four.total / GIB:.2f} GiB."
    host = planned(*given, "runtime.tables=host")
    tables = 196.6e9 * 33 / 32 / 8  # one byte a value and a scale for 32 values, over 8 GPUs
    assert p.total - host.total == pytest.approx(tables, rel=1e-3) == host.job.host_table_bytes / 8
    assert f"Engram tables in host memory ({host.job.host_table_bytes / 8 / GIB:.2f} GiB a rank)" in report(host)
    full = planned(*given[:2], "optim=adamw", given[3])
    assert not full.fits and "Nothing fits on 8 GPUs" in verdict(full)
