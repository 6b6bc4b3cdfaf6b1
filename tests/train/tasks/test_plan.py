"""The plan: its bytes against a real run's tensors, its shares against a count by hand, its verdicts and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model import ModelConfig, build_drafter, build_model
from model.build import allocate_model
from model.checkpoint.load import parameter_packing
from model.packed import held_bytes
from optim.muon import orthogonalize
from train.build import build
from train.config.compose import CONF_DIR
from train.config.parse import parse
from train.config.problems import ConfigError
from train.config.schema import Config
from train.loop import train_step
from train.lora.inject import add_adapter
from train.planning.items import Item, owned, update_flops
from train.planning.memory import at_the_loss, exchange_bytes
from train.planning.report import report
from train.planning.resources import GIB, ResourcePlan, plan
from train.planning.verdict import verdict

DRAFTER = {
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 3,
    "dspark_noise_token_id": 60,
    "dspark_target_layer_ids": [2, 4, 5],
    "dspark_markov_rank": 6,
    "dspark_n_routed_experts": 6,
    "dspark_num_experts_per_tok": 3,
}


@pytest.fixture
def make_config(make_config) -> Callable[..., Config]:
    """The tiny run as task=plan sees it, without reserve."""
    return lambda *changes: make_config("task=plan", "optim=adamw", "plan.reserve_gib=0", *changes)


@pytest.mark.parametrize("rules", ["report", "adamw"])
def test_bytes_are_those_of_a_real_run(make_config, rules: str) -> None:
    config = make_config(f"optim={rules}")
    planned = plan(config)
    run = build(config)
    batch = run.to_device(next(iter(run.train_batches)))
    run.model.losses(**batch, denominators=run.model.loss_denominators(**batch)).total.backward()
    assert sum(planned.weights.values()) == _bytes(run.model.parameters())
    assert sum(planned.gradients.values()) == _bytes(p.grad for p in run.model.parameters())
    run.optimizer.zero_grad()
    train_step(run, [batch], step=0, tokens=0)
    state = dict.fromkeys(planned.state, 0)
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            tensors = (v for v in run.optimizer.state[parameter].values() if isinstance(v, torch.Tensor))
            state[group["method"]] += _bytes(tensors)
    assert planned.state == pytest.approx(state, rel=0.02)


def test_a_frozen_indexer_has_neither_gradient_nor_state(make_config) -> None:
    trained, frozen = plan(make_config()), plan(make_config("runtime.train_indexer=false"))
    indexers = _bytes(p for name, p in trained.model.named_parameters() if ".indexer." in name)
    assert frozen.weights == trained.weights
    assert trained.gradients["dense"] - frozen.gradients["dense"] == indexers
    assert trained.state["adamw"] - frozen.state["adamw"] == 2 * indexers


def test_experts_and_tables_are_split(make_config) -> None:
    one, four = plan(make_config()), plan(_layout(make_config(), 4, 2, 4))
    assert four.weights["dense"] == one.weights["dense"]
    assert four.weights["experts"] == one.weights["experts"] // 2
    assert one.weights["Engram tables"] / 4 <= four.weights["Engram tables"] < one.weights["Engram tables"] / 4 + 1000
    assert sum(four.state.values()) < 0.4 * sum(one.state.values())
    split = plan(_layout(make_config(), 4, 2, 4, shard_embeddings=True))
    moved = split.weights["embedding and head"]
    assert four.weights["embedding and head"] == 0
    assert split.weights == {**four.weights, "dense": four.weights["dense"] - 4 * moved, "embedding and head": moved}
    assert moved == 2 * 512 * 32 * 4 / 4
    head = "a split head, gathered or its gradient sent"
    assert split.working[head] == 4 * moved / 2
    assert head not in four.working and "fetched table rows" not in one.working


def test_owners_share_whole_matrices() -> None:
    """The fullest of four ranks, against a distribution by hand: the largest first, to the one that has least."""
    dense = [Item("dense", "muon", 1, size, 4, ()) for size in (70, 10, 30, 20, 60)]  # 70 | 60 | 30 | 20 + 10
    experts = [Item("experts", "muon", 5, 7, 2, ()), Item("experts", "adamw", 4, 9, 2, ())]  # 2 * 36 | 35
    assert sorted(item.numel for item in owned([*dense, *experts])) == [9, 70]
    twice = [Item("Engram tables", "sinkhorn", 1, 50, 2, ()), *experts]  # 2 * 36 | 50 + 35
    assert sorted(item.numel for item in owned([*dense, *twice])) == [9, 70]
    bare = [Item("dense", "muon", 1, 1, 4, ())]  # ranks 2 and 3 hold the table's second copy
    assert sorted(item.numel for item in owned([*bare, *twice])) == [7, 50]


def test_muon_flops_are_those_of_the_products_run() -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(3, 20, 12))
    assert update_flops(Item("dense", "muon", 1, 720, 1, ((3, 20, 12),)), 11) == counter.get_total_flops()


def test_an_adapter_beside_packed_weights(make_config) -> None:
    """The factors are those that are really added, and frozen weights take the bytes of a packed model."""
    config = make_config("lora=all", "lora.targets=[attention,shared_experts,experts,compressor,engram,embed,head]")
    planned = plan(config)
    model_config = ModelConfig.from_dict(config.model)
    packed = allocate_model(model_config, None, None, "meta", torch.float32, packing_of=parameter_packing)
    dense = sum(held_bytes(p) for p in packed.parameters())
    assert sum(planned.weights.values()) - planned.weights["adapter"] == dense
    assert dense < sum(4 * p.numel() for p in packed.parameters()) / 2
    model = build_model(model_config, token_map=torch.arange(512))
    add_adapter(model, config.lora, 0)
    factors = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert planned.weights["adapter"] == planned.gradients["adapter"] == _bytes(factors.values())
    assert sum(planned.gradients.values()) == planned.gradients["adapter"]
    assert planned.state["adamw"] == 2 * planned.weights["adapter"]
    thin = plan(make_config("lora=attention", "lora.rank=1"))
    assert 0.6 < thin.useful_flops / plan(make_config()).useful_flops < 0.85  # no gradients of frozen weights
    assert "the head's gradient in the loss" in planned.working
    assert "the head's gradient in the loss" not in thin.working


def test_a_drafter_beside_a_frozen_model(make_config) -> None:
    shape = {**DRAFTER, "compress_ratios": [0, 2, 2, 1, 1, 1, 0]}
    changes = [f"++model.text_config.{key}={value}".replace(" ", "") for key, value in shape.items()]
    config = make_config("plan.job=dspark", *changes)
    planned, model_config = plan(config), ModelConfig.from_dict(config.model)
    packed = allocate_model(model_config, None, None, "meta", torch.float32, packing_of=parameter_packing)
    drafter = build_drafter(packed, 0)
    assert sum(planned.gradients.values()) == _bytes(drafter.parameters())
    assert sum(planned.weights.values()) == _bytes(drafter.parameters()) + sum(map(held_bytes, packed.parameters()))
    assert planned.useful_flops < plan(make_config()).useful_flops


def test_uneven_routing_and_the_reserve_are_counted(make_config) -> None:
    """Tiny model: 6 layers, d 32, f 32, k 2; a pass has 64 tokens on a rank of 4."""
    even, uneven = (_layout(make_config(f"plan.load_factor={factor}"), 4, 2, 4) for factor in ("1.0", "3.0"))
    row = 64 * 2 * 4
    assert plan(uneven).working["activations: uneven routing"] == 2 * 6 * row * (32 + 3 * 32)
    text = plan(even).model.config.text
    (few,), (more,) = (exchange_bytes(config, text, 64).values() for config in (even, uneven))
    assert few == row * 32 * (1 + 1 + 1) and more - few == 2 * row * 32
    assert plan(make_config("plan.load_factor=3.0")).working == plan(make_config()).working  # one process: no exchange
    assert plan(make_config("plan.reserve_gib=6")).total == plan(make_config()).total + 6 * GIB


def test_seconds_for_stated_rates(make_config) -> None:
    """Two nodes of two GPUs: experts stay in a node, tables and gradients cross."""
    rates = ("tflops=2e-3", "peak_tflops=4e-3", "network_gb_s=1e-3", "node_gb_s=1e-2", "gpus_per_node=2")
    p = plan(_layout(make_config(*(f"parallel.hardware.{rate}" for rate in rates)), 4, 2, 4))
    assert p.sent["all-to-all, experts"].inside == 1 and p.sent["all-to-all, Engram tables"].inside == 1 / 3
    # Held four times, and twice, by rank 0, 2
    dense, experts = (p.gradients["dense"] * 3 / 4, p.gradients["experts"] / 2)
    assert p.traffic["all-reduce of gradients"] == 2 * (dense + experts)
    assert p.sent["all-reduce of gradients"].inside == pytest.approx(dense / 2 / (dense + experts))
    assert p.time.arithmetic == pytest.approx((p.step_flops + sum(p.optimizer_flops.values())) / 2e9)
    away = p.traffic["all-to-all, Engram tables"] * 2 / 3 + 3 * (dense / 2 + experts)
    assert p.time.network == pytest.approx(away / 1e6)
    assert p.time.node == pytest.approx((sum(p.traffic.values()) - away) / 1e7)
    assert p.tokens_per_second(2.0) == 4 * 64 / 2 and p.mfu(2.0) == p.useful_flops / 8e9


def test_traffic_of_the_all_to_alls(make_config) -> None:
    """Tiny model: 6 layers, k 2, d 32; 2 Engram layers of 3 x 2 rows of 8; 2 x 2 x 64 tokens
    in a step of 4 ranks."""
    assert set(plan(make_config()).traffic.values()) == {0.0}
    sent = plan(_layout(make_config(), 4, 2, 4)).traffic
    assert sent["all-to-all, experts"] == 64 * 6 * 2 * (2 * 32 * 4 + 8) * 2 / 2
    assert sent["all-to-all, Engram tables"] == 64 * 2 * 6 * (8 + 2 * 4 * 8) * 3 / 4
    split = plan(_layout(make_config(), 4, 2, 4, shard_embeddings=True)).traffic
    assert split["all-to-all, embedding"] == 64 * (8 + 2 * 4 * 32) * 3 / 4
    assert split["head gathered, its gradient"] == 2 * 4 * 512 * 32 * 3 / 4
    recomputed = ("runtime.recompute=true", "runtime.keep_combined=false")
    again = plan(_layout(make_config(*recomputed), 4, 2, 4)).traffic
    assert again["all-to-all, experts"] == 1.5 * sent["all-to-all, experts"]
    kept = plan(_layout(make_config(recomputed[0]), 4, 2, 4)).traffic
    assert again["all-to-all, experts"] - kept["all-to-all, experts"] == 64 * 6 * 2 * 32 * 4 / 2
    fp8 = plan(_layout(make_config("runtime.dispatch=fp8"), 4, 2, 4)).traffic
    assert sent["all-to-all, experts"] - fp8["all-to-all, experts"] == 64 * 6 * 2 * (32 * 4 - 32 - 1) / 2


def test_streams_in_bf16_take_half_and_offloaded_ones_lie_on_the_host(make_config) -> None:
    """Tiny model: 6 layers, 2 streams of 32; a micro-batch of 2 x 64 tokens."""

    def planned(*changes: str) -> tuple[float, float]:
        found = plan(make_config("runtime.recompute=true", "parallel.precision=bf16", *changes))
        inputs = at_the_loss(found.config, found.job, 128)["activations: block inputs"]
        assert ("of block inputs in each rank's host memory" in report(found)) == (found.host > 0)
        return inputs, found.host

    streams = 2 * 64 * 6 * 2 * 32 * 4.0
    (whole, none), (half, _) = planned(), planned("runtime.stream_dtype=bf16")
    assert whole - half == streams / 2 and none == 0
    assert planned("runtime.offload=inputs") == (whole - streams, streams)
    assert planned("runtime.offload=inputs", "runtime.stream_dtype=bf16") == (half - streams / 2, streams / 2)


def test_an_automatic_precision_is_bf16_unless_the_device_is_the_cpu(make_config) -> None:
    found = plan(make_config("parallel.device=auto"))
    assert "tokens, bf16, recompute" in report(found)
    assert found.working == plan(make_config("parallel.device=cpu", "parallel.precision=bf16")).working
    assert "tokens, fp32, recompute" in report(plan(make_config("parallel.device=cpu")))
    assert "tokens, fp32, recompute" in report(plan(make_config("parallel.device=auto", "parallel.precision=fp32")))


def test_verdict_compares_and_names_the_largest_term(make_config) -> None:
    def said(*changes: str) -> tuple[ResourcePlan, str]:
        found = plan(make_config(*changes))
        assert report(found).endswith(f"\n\n{verdict(found)}")
        return found, verdict(found).splitlines()[0]

    need = plan(make_config()).total / GIB
    found, fits = said(f"parallel.gpu_memory_gib={need * 1.01}")
    assert fits.startswith(f"FITS: needs {need:.2f} of {need * 1.01:g} GiB on a GPU, {need * 0.01:.2f} GiB are left.")
    found, tight = said(f"parallel.gpu_memory_gib={need * 0.99}")
    activations = sum(size for name, size in found.terms.items() if name.startswith("activations"))
    largest = f"Largest: activations, {activations / GIB:.2f} GiB."
    assert tight == f"DOES NOT FIT: needs {need:.2f} of {need * 0.99:g} GiB on a GPU. {largest}"
    found, short = said("task.seq_len=2", "task.micro_batch=1", "task.global_batch_rows=2")
    state = f"Largest: optimizer state, {sum(found.state.values()) / GIB:.2f} GiB."
    compared = "set parallel.gpu_memory_gib to compare it with a GPU's memory"
    assert short == f"NEEDS {found.total / GIB:.2f} GiB on a GPU; {compared}. {state}"


def test_the_rows_named_are_the_longest_that_fit(make_config) -> None:
    def fits(length: int, recompute: bool) -> bool:
        settings = (f"task.seq_len={length}", f"runtime.recompute={str(recompute).lower()}")
        return plan(make_config(f"parallel.gpu_memory_gib={room}", *settings)).total / GIB <= room

    room = plan(make_config("task.seq_len=64")).total / GIB * 1.01
    said = verdict(plan(make_config("task.seq_len=1024", f"parallel.gpu_memory_gib={room}")))
    named = dict((choice, int(length)) for length, choice in re.findall(r"seq_len=(\d+) with \S+=(true|false)", said))
    assert named["false"] == 64 < named["true"]
    for choice, length in named.items():
        assert fits(length, choice == "true") and not fits(2 * length, choice == "true")
    assert "Fewer than 2 rows in a micro-batch" in said
    held = verdict(plan(make_config("parallel.gpu_memory_gib=0.001"))).splitlines()[1]
    assert held.startswith("Nothing fits on 1 GPU: weights, gradients and optimizer state take 0.00 GiB")


def test_the_released_model_on_a_cluster(compose_raw) -> None:
    config = parse(compose_raw("task=plan", "model=v41_flash", "parallel=cluster"))
    assert config.optim.rules == "report" and parse(compose_raw("task=plan", "optim=adamw")).optim.rules == "adamw"
    printed = report(plan(config))
    parameters = section(printed, "parameters")
    assert parameters["backbone: all but Engram tables, vision"] == 551_880_804_464
    assert parameters["Engram tables"] == 196_613_849_600
    assert parameters["routed experts"] == 40 * 384 * 3 * 5120 * 2304
    parts = sum(count for name, count in parameters.items() if name != "all" and not name.startswith("backbone"))
    assert parameters["all"] == parts == 748_979_922_544
    drafter = section(printed, "drafter (mtp.*)")
    assert drafter["routed experts"] == 13_589_544_960 and drafter["all"] == 14_225_361_762
    assert section(printed, "active parameters") == {"prefill": 7_895_552_824, "decode": 16_130_558_064}
    assert section(printed, "KV cache")["all"] == 640 + 80 + 160 + 10
    memory = section(printed, "memory of the fullest GPU")
    assert memory["all"] == pytest.approx(sum(size for name, size in memory.items() if name != "all"), abs=0.1)
    assert f"\nFITS: needs {memory['all']:.2f} of 139 GiB on a GPU" in printed


def section(printed: str, heading: str) -> dict[str, float]:
    """The first number of each line below a heading of the report."""
    lines = printed.split(f"\n{heading}", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    found = (re.match(r"  (\S.*?)  +([\d,.]+)(?: |$)", line) for line in lines)
    return {match[1]: float(match[2].replace(",", "")) for match in found if match}


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF_DIR / "parallel").glob("*.yaml")))
def test_every_shipped_layout_is_valid(compose_raw, name: str) -> None:
    parse(compose_raw("task=plan", "model=v41_flash", f"parallel={name}"))


def test_impossible_layouts_are_refused(compose_raw) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(compose_raw(
            "model=tiny", "data.vocab_size=512", "task.global_batch_rows=2",
            "parallel.world_size=4", "parallel.expert_parallel=3", "parallel.table_shards=8",
        ))  # fmt: skip
    text = str(caught.value)
    for expected in (
        "task.global_batch_rows = 2: must be a multiple of task.micro_batch = 1 and of parallel.world_size = 4",
        "parallel.expert_parallel = 3: must divide model.text_config.n_routed_experts = 4",
        "parallel.expert_parallel = 3: must divide parallel.world_size = 4",
        "parallel.table_shards = 8: must divide parallel.world_size = 4",
    ):
        assert expected in text
    assert len(caught.value.problems) == 4
    with pytest.raises(ConfigError, match=r"parallel.dense_shards = 2: task=dspark, which is planned \(plan.job\)"):
        parse(compose_raw("task=plan", "plan.job=dspark", "parallel.world_size=2", "parallel.dense_shards=2"))
    with pytest.raises(ConfigError, match="parallel.shard_embeddings = true: has no effect with parallel.table_shards"):
        parse(compose_raw("model=tiny", "data.vocab_size=512", "parallel.shard_embeddings=true"))


def _layout(config, ranks: int, experts: int, tables: int, shard_embeddings: bool = False):
    layout = {"world_size": ranks, "expert_parallel": experts, "table_shards": tables}
    parallel = replace(config.parallel, **layout, shard_embeddings=shard_embeddings)
    return replace(config, parallel=parallel)


def _bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
