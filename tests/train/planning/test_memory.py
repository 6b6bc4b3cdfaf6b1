"""Terms of the plan against the tensors that they count."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model import DeepseekV41, ForwardOptions, ModelConfig, build_model
from model.chunk import chunk_of
from model.indexer import IndexQuery, select, select_from_candidates
from model.kernels.switch import using
from model.layout import build_layout
from model.parallel.ranks import RankGroup
from tests.model.test_context_parallel import held_bytes
from train.config.schema import Config
from train.planning.job import job_of
from train.planning.memory import (
    candidate_bytes,
    entry_gradient_bytes,
    layout_bytes,
    selection_bytes,
    selection_moments,
    working_bytes,
)

LENGTH = 128


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Config:
    return make_config("task=plan", f"task.seq_len={LENGTH}", "task.micro_batch=1", "parallel.precision=bf16")


def built(config: Config) -> DeepseekV41:
    return build_model(ModelConfig.from_dict(config.model), ForwardOptions(), torch.zeros(512, dtype=torch.int64))


def batch(model: DeepseekV41, length: int = LENGTH) -> dict[str, Tensor]:
    ids = torch.randint(5, 61, (1, length), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids, "labels": ids}
    return {**given, "layout": model.lay_out(**given)}


@pytest.mark.parametrize("length", [8, LENGTH])
def test_candidates(config: Config, length: int) -> None:
    """A row with no more blocks than the pool has no candidates."""
    model = built(config)
    given = batch(model, length)
    with torch.no_grad():
        trace = model.run_backbone(given["input_ids"], given["layout"], None, None, None)
    found = {id(c): c.nbytes for block in trace.blocks if (c := block.shared.candidates) is not None}
    assert sum(found.values()) == length * candidate_bytes(model.config.text, 1, length)
    assert bool(found) == (length == LENGTH)


def test_positions_and_rotations(config: Config) -> None:
    text = ModelConfig.from_dict(config.model).text
    layout = build_layout(text, torch.zeros(1, 2**12, dtype=torch.int64))
    own = chunk_of(layout, text, RankGroup(None, 1, 4))
    hosts = sum(x.nbytes for entries in own.entries.values() for x in (entries.host_from, entries.host_to))
    assert sum(held_bytes(own, {}).values()) - hosts == pytest.approx(2**10 * layout_bytes(text), rel=0.01)


def test_gradients_of_entries_and_index_keys(config: Config) -> None:
    """In bf16: the fp32 sums of every Full layer, and what one reader adds, in fp32 and bf16."""
    model, sums = built(config), {"kv": [], "keys": []}
    for layer in model.config.text.kv_source_layer_ids:
        attention = model.layers[layer].attn

        def watched(*given, compress=attention.compress):
            shared = compress(*given)
            shared.kv_gradient.register_hook(lambda grad: sums["kv"].append(grad.nbytes))
            shared.keys_gradient.register_hook(lambda grad: sums["keys"].append(grad.nbytes))
            return shared

        attention.compress = watched
    given = batch(model)
    with torch.autocast("cpu", torch.bfloat16):
        losses = model.losses(**given, denominators=model.loss_denominators(**given))
    losses.total.backward()
    planned = entry_gradient_bytes(config, model.config.text, LENGTH)
    assert len(sums["kv"]) == len(sums["keys"]) == 2
    assert planned["gradients of entries"] == max(sums["kv"]) * (1 + (4 + 2) / 4)
    assert planned["gradients of index keys"] == sum(sums["keys"])


@pytest.mark.slow
def test_what_a_selection_needs(config: Config) -> None:
    """The kernels' path against the peak of what is allocated, within 15 %."""
    pytest.importorskip("triton", reason="the package triton is not installed: pip install 'narrows[kernels]'")
    model = built(config)
    text = replace(model.config.text, candidate_block_size=8, candidate_topk_blocks=8, index_topk=8)
    entries = build_layout(text, torch.zeros(1, LENGTH, dtype=torch.int64)).entries[1]
    g = torch.Generator().manual_seed(0)
    query = IndexQuery(torch.randn(LENGTH, 2, 16, generator=g), torch.randn(LENGTH, 2, generator=g))
    keys = torch.randn(entries.slots, 16, generator=g)
    given = (query, keys, entries)
    with using("triton"):
        _, pool = select(*given, 8, 8, 8)  # compiled once before it is measured
        select_from_candidates(*given, pool, 8, 8)
        first = peak(lambda: select(*given, 8, 8, 8)) - LENGTH * 4 * (8 + 8)  # without the results
        later = peak(lambda: select_from_candidates(*given, pool, 8, 8)) - LENGTH * 4 * 8
    source = text.candidate_source_layer_id
    assert first == pytest.approx(selection_bytes(config, text, source, LENGTH), rel=0.15)
    assert later == pytest.approx(selection_bytes(config, text, text.index_source_layer_ids[-1], LENGTH), rel=0.15)


def peak(call: Callable[[], object]) -> int:
    gc.collect()
    with torch.profiler.profile(profile_memory=True) as profiler:
        call()
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def test_a_selection_that_needs_most_sets_the_peak(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(config)
    moments = selection_moments(config, job, LENGTH)
    assert len(moments) == len(job.model.config.text.index_source_layer_ids)
    usual = working_bytes(config, job)
    assert "selection of entries" not in usual
    monkeypatch.setattr("train.planning.memory.selection_bytes", lambda *given: 1e9)
    assert working_bytes(config, job)["selection of entries"] == 1e9
