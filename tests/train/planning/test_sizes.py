"""The ladder of sizes in conf/model: their parameters and mechanisms, and a training step of the smallest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from omegaconf import OmegaConf

from model import ModelConfig, build_drafter, build_model, count
from train.build import build
from train.config.schema import Config
from train.loop import train_step

SIZES = {"v41_100m": 0.1e9, "v41_1b": 1e9, "v41_8b": 8e9, "v41_40b": 40e9}
RELEASED_ENGRAM = 196.61 / 748.98


@pytest.mark.parametrize("name", SIZES)
def test_sizes_have_the_reports_shape(compose_raw: Callable, name: str) -> None:
    config = ModelConfig.from_dict(OmegaConf.to_container(compose_raw(f"model={name}").model, resolve=True))
    text = config.text
    model = build_model(config, device="meta")
    counts = count.parameters(model)
    total = sum(counts.values())
    assert total == pytest.approx(SIZES[name], rel=0.1)
    assert counts["Engram tables"] / total == pytest.approx(RELEASED_ENGRAM, abs=0.015)
    assert all(counts.values()), "a part of the released model is missing"
    layers, half = text.num_hidden_layers, text.num_hidden_layers // 2
    assert text.compress_ratios == (0, 0, *[2] * (half - 2), *[1] * half, 0, 0, 0)
    full, reindex = max(2, round(3 * layers / 20)), max(2, round(layers / 10))
    assert text.kv_source_layer_ids == (*range(2, half, full), half)
    assert text.index_source_layer_ids == (*range(2, half, full), *range(half, layers, reindex))
    assert text.candidate_source_layer_id == half and text.engram_layer_ids == (1, round(0.35 * layers))
    assert text.max_position_embeddings == 1_048_576 and text.num_experts_per_tok == 6
    assert sum(p.numel() for p in build_drafter(model).parameters()) < 0.1 * total


@pytest.mark.slow
def test_the_smallest_runs_a_step(make_config: Callable[..., Config]) -> None:
    rows = ("task.micro_batch=1", "task.global_batch_rows=1")
    config = make_config("model=v41_100m", "optim=report", "data.vocab_size=5000", *rows)
    run = build(config)
    assert sum(p.numel() for p in run.model.parameters()) == pytest.approx(0.1e9, rel=0.1)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters() if "layers.5." in name}
    batch = run.to_device(next(iter(run.train_batches)))
    numbers = train_step(run, [batch], step=0, tokens=0)
    assert 0 < numbers["lm_sum"] / numbers["num_tokens"] < 20
    moved = [name for name, p in run.model.named_parameters() if name in before and not p.equal(before[name])]
    assert len(moved) > len(before) / 2
