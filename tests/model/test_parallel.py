"""Models spread over processes against one process: forward, gradients, statistics; exchanges that go wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import model.init
import model.moe
from model import DeepseekV41, ForwardOptions, LossDenominators, LossWeights, build_model, count, load_pretrained
from model.moe import MoE
from model.no_wait import raise_faults
from model.parallel.ranks import Parallel, RankGroup
from model.parallel.tables import Head, Lookup, Table
from tests import processes
from tests.model.golden_files import INPUTS
from tests.model.tiny import (  # noqa: F401
    assert_same,
    image_batch,
    no_rounding,
    pack_of,
    switch_rounding_off,
    tiny_config,
    tiny_model,
    tokens,
)

pytestmark = pytest.mark.distributed

NOISE = {"atol": 1e-6, "rtol": 1e-5}


def ranks_of(size: int) -> RankGroup:
    """This process's group of `size` consecutive ones; every process makes all groups."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return RankGroup()
    groups = [dist.new_group(list(range(start, start + size))) for start in range(0, world, size)]
    return RankGroup(groups[rank // size], rank % size, size)


def part_of(whole: DeepseekV41, parallel: Parallel) -> DeepseekV41:
    """This rank's part of a whole model."""
    built = build_model(
        whole.config, whole.runtime, whole.token_map, parallel=parallel, loss_weights=whole.loss_weights
    )
    state = whole.state_dict()
    for name, parameter in built.named_parameters():
        shard = getattr(parameter, "shard", None)
        if shard is not None:
            state[name] = state[name][shard.start : shard.stop]
    built.load_state_dict(state)
    return built


def batches(rank: int, vision: bool) -> list[dict[str, Tensor]]:
    """Two micro-batches of a rank, of its own sizes. Rank 0's first is not supervised; images on odd ranks only."""
    made = []
    for micro in range(2):
        ids = tokens(1 + micro, 9 + 5 * rank + micro, seed=10 * rank + micro)
        labels = ids.clone()
        if (rank, micro) == (0, 0):
            labels[:] = -100
        length = ids.shape[1]
        seq_lens = torch.tensor([[length - 4, 4], [length - 2, 0]])[: 1 + micro]
        made.append({"input_ids": ids, "labels": labels, "seq_lens": seq_lens})
    if vision and rank % 2:
        made[1] = image_batch([(6, 3)], 20 + rank, seed=rank)
    return made


def step(built: DeepseekV41, data: list[dict[str, Tensor]], denominators: LossDenominators) -> dict:
    """Forward and backward of some micro-batches."""
    with torch.no_grad():
        logits = [built(**batch).logits for batch in data]
    losses = [built.losses(**batch, denominators=denominators) for batch in data]
    for one in losses:  # a backward after the next forward: exchanges of several graphs in flight
        one.total.backward()
    return {
        "logits": logits,
        "losses": [one.total.detach() for one in losses],
        "load": sum(one.expert_load for one in losses),
        "gradients": {name: parameter.grad for name, parameter in built.named_parameters()},
    }


def whole_model(vision: bool = False, favourites: tuple[int, ...] = (), **runtime) -> DeepseekV41:
    """`favourites`: experts that every token chooses."""
    built = tiny_model(
        ForwardOptions(**runtime), loss_weights=LossWeights(router_balance=0.1), engram=True, vision=vision
    )
    for layer in built.layers:
        for expert in favourites:
            layer.ffn.gate.bias[expert] = layer.ffn.gate.bias_vl[expert] = 100.0
    return built


def totals_of(size: int, vision: bool) -> LossDenominators:
    """Of all ranks' batches."""
    model = whole_model(vision)
    return LossDenominators.from_tensor(
        sum(model.loss_denominators(**batch).to_tensor() for rank in range(size) for batch in batches(rank, vision))
    )


def train(rank: int, layout: dict, how: dict, denominators: Tensor) -> dict:
    """One rank's step; gradients of shards come with where they lie."""
    switch_rounding_off(setattr)
    parallel = Parallel(ranks_of(layout["experts"]), ranks_of(layout["tables"]), layout.get("shard_embeddings", False))
    built = part_of(whole_model(**how), parallel)
    result = step(built, batches(rank, how.get("vision", False)), LossDenominators.from_tensor(denominators))
    result["places"] = {
        name: (parameter.shard.start, parameter.shard.stop)
        for name, parameter in built.named_parameters()
        if hasattr(parameter, "shard")
    }
    return result


def assembled(results: list[dict], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Gradients summed over ranks, shards at their places."""
    whole = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for result in results:
        for name, gradient in result["gradients"].items():
            start, stop = result.get("places", {}).get(name, (0, None))
            if gradient is not None:  # the tower's, where a rank has no image
                whole[name][start:stop] += gradient
    return whole


ROUNDED = {"expert_quant": True, "dense_quant": True, "engram_quant": True}  # of weights: the same on any layout
LAYOUTS = [
    pytest.param(2, {"experts": 2, "tables": 2}, {}, marks=pytest.mark.slow),
    (2, {"experts": 2, "tables": 2, "shard_embeddings": True}, {"recompute": True, "vision": True, **ROUNDED}),
    (4, {"experts": 2, "tables": 4, "shard_embeddings": True}, {"recompute": True}),
    pytest.param(4, {"experts": 4, "tables": 2}, {"favourites": (1,), "attention": "dense"}, marks=pytest.mark.slow),
    (4, {"experts": 4, "tables": 1}, {"recompute": True, "favourites": (1, 2)}),  # two ranks get no token at all
]


@pytest.mark.parametrize("size, layout, how", LAYOUTS)
def test_equals_one_process(size: int, layout: dict, how: dict, no_rounding) -> None:  # noqa: F811
    """Logits, losses and loads of every rank, and gradients summed over the ranks."""
    vision = how.get("vision", False)
    denominators = totals_of(size, vision)
    expected = [step(whole_model(**how), batches(rank, vision), denominators) for rank in range(size)]
    found = processes.run(size, train, layout, how, denominators.to_tensor())
    for ours, theirs in zip(found, expected, strict=True):
        forward = [dict(enumerate(result["logits"] + result["losses"])) for result in (ours, theirs)]
        assert_same(*forward, 1e-6)
        assert torch.equal(ours["load"], theirs["load"])
    shapes = {name: parameter.shape for name, parameter in whole_model(**how).named_parameters()}
    ours, theirs = (assembled(results, shapes) for results in (found, expected))
    split = {count.part_of(name) for result in found for name in result["places"]}
    assert split == {
        *["routed experts"],
        *["Engram tables"] * (layout["tables"] > 1),
        *["embedding", "head"] * ("shard_embeddings" in layout),
    }
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], **NOISE, msg=lambda text, name=name: f"{name}: {text}")
    if how.get("favourites") == (1, 2):
        assert not any(ours[f"layers.{layer}.ffn.experts.w1"][[0, 3]].any() for layer in range(6))


GOLDEN = Path(__file__).parents[1] / "golden" / "detail" / "c2_images_engram_pad"


def golden(rank: int) -> tuple[Tensor, Tensor]:
    """Logits of the real tokens and loss of a golden case, by a model that reads its own part of the folder."""
    split = ranks_of(2)
    built = load_pretrained(GOLDEN, parallel=Parallel(split, split, shard_embeddings=True))
    inputs = load_file(GOLDEN / "inputs.safetensors")
    inputs["pixel_values"] = inputs["pixel_values"].float()
    with torch.no_grad():
        out = built(**{key: inputs[key] for key in INPUTS if key in inputs})
    return out.logits[inputs["attention_mask"].bool()], out.loss


def test_golden_case() -> None:
    """Images, Engram and padding on two processes against another implementation (see test_golden.py)."""
    expected = load_file(GOLDEN / "expected.safetensors")
    real = load_file(GOLDEN / "inputs.safetensors")["attention_mask"].bool()
    for logits, loss in processes.run(2, golden):
        assert (logits - expected["logits"][real]).abs().max() <= 1e-4
        assert abs(loss - expected["loss"]) <= 1e-5


def order_of_events(rank: int) -> list[str]:
    """When a forward asks for table rows, waits for them, and runs its blocks."""
    built, seen = part_of(whole_model(), Parallel(tables=ranks_of(2))), []
    look_up, arrived = Table.look_up, Lookup.arrived

    def noted_look_up(table: Table, ids: Tensor) -> Lookup:
        found = look_up(table, ids)
        seen.append("ask" if found.work is not None else "own")
        return found

    Table.look_up = noted_look_up
    Lookup.arrived = lambda lookup: (seen.append("wait" if lookup.work is not None else "-"), arrived(lookup))[1]
    for number, block in enumerate(built.layers):
        block.register_forward_pre_hook(lambda *_, number=number: seen.append(f"block {number}"))
    built(**batches(rank, vision=False)[1])
    return seen


def test_table_rows_are_on_their_way_before_the_first_block() -> None:
    """Engram in blocks 1 and 4; the embedding ("own") is whole here."""
    blocks = [f"block {number}" for number in range(6)]
    expected = ["own", "-", "ask", "ask", blocks[0], "wait", *blocks[1:4], "wait", *blocks[4:]]
    assert processes.run(2, order_of_events) == [expected] * 2


def mixed(rank: int) -> float:
    """Only the last experts and the aligner learn, and only rank 1 has an image."""
    built = part_of(whole_model(vision=True), Parallel(experts=ranks_of(2)))
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(name.startswith(("aligner.", "layers.5.ffn.experts.")))
    step(built, batches(rank, vision=True), totals_of(2, vision=True))
    return built.layers[5].ffn.experts.w1.grad.abs().sum().item()


def test_ranks_may_have_different_things_to_learn() -> None:
    """All take part in every exchange of the backward, whatever their own batch needs a gradient of."""
    assert min(processes.run(2, mixed)) > 0


def broken(rank: int, what: str) -> None:
    """Rank 1 announces to rank 0 as many tokens as it sends, but for other experts; or asks it for rows it lacks."""
    built = part_of(whole_model(), Parallel(ranks_of(2), ranks_of(2)))
    if what == "experts":
        honest = model.moe.exchange_counts
        model.moe.exchange_counts = lambda counts, ranks: honest(counts.roll(rank, dims=1), ranks)
    elif rank == 1:
        table = built.layers[4].engram.embed
        table.shard = dataclasses.replace(table.shard, total=table.shard.total + 60)
    built(**batches(rank, vision=False)[1])
    raise_faults(built)


@pytest.mark.parametrize(
    "what, message",
    [
        ("experts", r"layer 0: rank 0 received from rank 1 a token for expert \d where it had announced one for "),
        ("tables", r"rank \d was asked for row \d+ of a table of \d+ rows, of which it holds \["),
    ],
)
def test_ranks_out_of_step_are_named(what: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        processes.run(2, broken, what)


def in_bf16(rank: int, experts: RankGroup) -> list[Tensor]:
    """One MoE layer's output and the gradient of its input, under autocast."""
    layer: MoE = part_of(whole_model(favourites=(0,)), Parallel(experts)).layers[0].ffn
    x = torch.randn(7 + rank, 32, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x, pack_of(tiny_config(), [len(x)]))
    y.sum().backward()
    return [y.detach(), x.grad]


def split_in_bf16(rank: int) -> list[Tensor]:
    return in_bf16(rank, ranks_of(2))


def test_bf16() -> None:
    """Rows and results travel in bf16, weights in fp32; the arithmetic is that of one process."""
    for rank, found in enumerate(processes.run(2, split_in_bf16)):
        for ours, theirs in zip(found, in_bf16(rank, RankGroup()), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-2)


class Noted:
    """A handle of a collective call that notes when it is waited for."""

    def __init__(self, work: dist.Work, seen: list[str]):
        self.work, self.seen = work, seen

    def wait(self) -> None:
        self.seen.append("wait")
        self.work.wait()


def in_fp8(rank: int, experts: RankGroup) -> tuple[list[Tensor], list[str]]:
    """One MoE layer's output and the gradients of its input and router, with what travels in FP8; and what happens."""
    layer: MoE = part_of(whole_model(), Parallel(experts)).layers[0].ffn
    x = torch.randn(7 + rank, 32, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    seen: list[str] = []
    honest = dist.all_to_all_single

    def noted(output: Tensor, rows: Tensor, *arguments, **options):
        work = honest(output, rows, *arguments, **options)
        seen.append(f"{str(rows.dtype).removeprefix('torch.')} {list(rows.shape[1:])}")
        return None if work is None else Noted(work, seen)

    layer.shared_experts.register_forward_pre_hook(lambda *_: seen.append("shared expert"))
    dist.all_to_all_single = noted
    try:
        y, _ = layer(x, pack_of(tiny_config(), [len(x)]), fp8=True)
        y.square().sum().backward()
    finally:
        dist.all_to_all_single = honest
    return [y.detach(), x.grad, layer.gate.weight.grad], seen


def split_in_fp8(rank: int) -> tuple[list[Tensor], list[str]]:
    return in_fp8(rank, ranks_of(2))


def test_fp8_travels_in_a_byte_a_value_while_the_shared_expert_runs() -> None:
    """32 codes and one scale a row, and weight and expert of a row in fp32. Gradients travel as they are. The numbers
    are those of one process, which rounds too.
    """
    forward = ["int64 [2]", "uint8 [32]", "uint8 [1]", "float32 [2]", "shared expert", *["wait"] * 3]
    forward += ["float32 [32]", "wait"]
    backward = ["float32 [32]", "wait", "float32 [32]", "float32 [2]", "wait", "wait"]
    for rank, (found, seen) in enumerate(processes.run(2, split_in_fp8)):
        expected, alone = in_fp8(rank, RankGroup())
        assert seen == forward + backward and alone == ["shared expert"]
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, **NOISE)
        layer = whole_model().layers[0].ffn
        x = torch.randn(7 + rank, 32, generator=torch.Generator().manual_seed(rank))
        plain, _ = layer(x, pack_of(tiny_config(), [len(x)]))
        assert 1e-3 < (plain - found[0]).norm() / plain.norm() < 0.05  # FP8 makes a difference, of 6 % a value at most


ROWS, DIM = 9, 5  # over 4 ranks: 3, 3, 3 and none


def asked(rank: int) -> Tensor:
    """What a rank looks up: rank 1 nothing, others rows of everyone, some twice."""
    ids = torch.randint(0, ROWS, (0 if rank == 1 else 7, 2), generator=torch.Generator().manual_seed(rank))
    return ids.to(torch.int64)


def tables(rank: int, ranks: RankGroup | None = None) -> list[Tensor]:
    """Rows and logits of a table and a head, and the gradients of both."""
    ranks = ranks or ranks_of(4)
    weight = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(9))
    table, head = Table(ROWS, DIM, ranks), Head(DIM, ROWS, ranks)
    for module in (table, head):
        module.weight.data = weight[module.shard.start : module.shard.stop].clone()
    rows = table(asked(rank))
    logits = head(rows)
    (logits.square().sum() * (1 + rank)).backward()
    return [rows.detach(), logits.detach(), table.weight.grad, head.weight.grad]


def test_tables_with_an_empty_shard() -> None:
    found, expected = processes.run(4, tables), [tables(rank, RankGroup()) for rank in range(4)]
    for (rows, logits, *_), (same_rows, same_logits, *_) in zip(found, expected, strict=True):
        assert torch.equal(rows, same_rows) and torch.equal(logits, same_logits)
    for place in (2, 3):
        assert [len(result[place]) for result in found] == [3, 3, 3, 0]
        whole = sum(result[place] for result in expected)
        torch.testing.assert_close(torch.cat([result[place] for result in found]), whole, atol=1e-5, rtol=1e-5)


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="4 routed experts cannot be split evenly over 3 ranks"):
        build_model(tiny_config(), device="meta", parallel=Parallel(experts=RankGroup(None, 0, 3)))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shards_start_as_the_whole_model_does(size: int, monkeypatch) -> None:
    """Drawn in parts of 64 numbers, which no shard's border respects."""
    monkeypatch.setattr(model.init, "DRAWN", 64)
    arguments = {"token_map": torch.arange(61) % 50, "seed": 3}
    config = tiny_config(engram=True)
    whole = build_model(config, **arguments)
    parts = []
    for rank in range(size):
        ranks = RankGroup(None, rank, size)
        experts = ranks if 4 % size == 0 else RankGroup()
        parts.append(build_model(config, **arguments, parallel=Parallel(experts, ranks, shard_embeddings=True)))
    for name, parameter in whole.named_parameters():
        held = [part.get_parameter(name) for part in parts]
        if hasattr(held[0], "shard"):
            assert [p.shard.start for p in held[1:]] == [p.shard.stop for p in held[:-1]]
            assert torch.equal(torch.cat([p.data for p in held]), parameter), name
        else:
            assert all(torch.equal(p, parameter) for p in held), name
