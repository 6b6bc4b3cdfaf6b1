"""What the plan counts where ranks share rows, by hand for the tiny model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from model import ModelConfig
from train.config.schema import Config
from train.planning.job import job_of
from train.planning.memory import copy_bytes, largest_rounded, tokens_per_pass
from train.planning.resources import plan

# tiny: 6 layers, d 32, D 16, Di 32, W 8; Full layers 1 (ratio 2) and 3 (ratio 1); pool of 4 blocks of 4
ENTRY = 16 + 32


@pytest.fixture
def pair(make_config: Callable[..., Config]) -> tuple[Config, Config]:
    """The same four ranks, with a row on each, and with rows on pairs of them."""
    whole = make_config("task=plan", "optim=report", "plan.reserve_gib=0", "runtime.recompute=true")
    layout = {"world_size": 4, "expert_parallel": 2, "table_shards": 4}
    return tuple(replace(whole, parallel=replace(whole.parallel, **layout, context_parallel=ranks)) for ranks in (1, 2))


def test_a_rank_has_its_share_of_the_tokens(pair: tuple[Config, Config]) -> None:
    one, two = pair
    assert (tokens_per_pass(one), tokens_per_pass(two)) == (64, 64)  # 4 rows a step: a row each, or two rows for two
    alone, shared = plan(one), plan(two)
    assert shared.weights == alone.weights and shared.state == alone.state
    assert shared.step_flops == alone.step_flops and shared.step_tokens == alone.step_tokens
    inputs = "activations: block inputs"
    assert shared.working[inputs] == alone.working[inputs]
    four = plan(replace(one, parallel=replace(one.parallel, context_parallel=4), task=replace(one.task, micro_batch=1)))
    assert four.working[inputs] == alone.working[inputs] / 4


def test_gathered_entries_and_their_gradients(pair: tuple[Config, Config]) -> None:
    _, two = pair
    working = plan(two).working
    entries = 64 * ENTRY * (1 / 2 + 1)  # of one rank
    assert working["entries and keys of other ranks"] == 4 * entries
    # Copied with those of keys
    assert working["gradients of entries"] == max(4 + 4, (4 + 4) + 4 * 32 / 16) * 2 * 64 * 16
    assert working["gradients of index keys"] == 4 * 2 * 64 * 32 * (1 / 2 + 1)
    assert working["gradients of index keys in the losses"] == 4 * 64 * 32 * (1 / 2 + 1 + 1)  # the other rank's half
    assert working["window keys before the chunk"] == 4 * 7 * 16
    assert working["candidate blocks"] == 64 * 4 * 4
    alone = plan(pair[0]).working
    assert "entries and keys of other ranks" not in alone and not alone["gradients of index keys in the losses"]
    assert alone["gradients of entries"] == (4 + 4) * 64 * 16


def test_bytes_between_ranks_that_share_rows(pair: tuple[Config, Config]) -> None:
    one, two = pair
    sent, alone = plan(two).traffic, plan(one).traffic
    assert sent["entries and keys of rows"] == 64 * ENTRY * 1.5 * (4 + 4)
    packed = plan(replace(two, runtime=replace(two.runtime, gather="packed"))).traffic
    assert packed["entries and keys of rows"] == 64 * 1.5 * (16 / 2 + 16 / 16 + 32 / 2 + 32 / 32 + 4 * ENTRY)
    assert sent["window keys of rows"] == 6 * 7 * 16 * 4 * 3 / 2
    assert {kind: sent[kind] for kind in alone} == alone


def test_weights_that_are_rounded_are_kept_a_second_time(pair: tuple[Config, Config]) -> None:
    """In fp32: rounded copies of the experts of every block; at once, the stack of one weight's experts is rounded."""
    one, _ = pair
    rounds = replace(one, runtime=replace(one.runtime, expert_quant=True, dense_quant=True))
    text = ModelConfig.from_dict(one.model).text
    stack = text.n_routed_experts // 2 * text.hidden_size * text.moe_intermediate_size  # of the experts of a rank
    dense, experts = copy_bytes(rounds, job_of(rounds))
    assert experts == [4 * 3 * stack] * text.num_hidden_layers and min(dense) > 0
    experts_alone = replace(one, runtime=replace(one.runtime, expert_quant=True))
    assert largest_rounded(experts_alone, job_of(experts_alone), 64) == stack
    assert copy_bytes(one, job_of(one)) == ([0] * text.num_hidden_layers,) * 2
    assert largest_rounded(one, job_of(one), 64) == 0
