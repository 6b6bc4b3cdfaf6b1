"""Ten training steps on made batches, in any layout: run by every rank of a test, and by the test alone to compare.

python tests/distributed/steps.py FOLDER CASE...   (a case: name of CASES @ EP, then dG if the dense matrices are
divided over G ranks, and cC if rows are)
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from torch.distributed.tensor import DTensor

from model import LossDenominators, Losses
from model.loss import cross_entropy_sum
from model.parallel.ranks import Parallel, RankGroup, rows_here
from model.parallel.tables import Head
from train.build import Run, build
from train.config.compose import CONF_DIR, open_overrides
from train.config.parse import parse
from train.config.schema import Config
from train.distributed.engine import make_groups
from train.distributed.launch import launch
from train.distributed.launchers import find_process, run_to_the_end
from train.distributed.world import World, axis_group, rank_mesh
from train.errors import NonFiniteError
from train.loop import train_step
from train.lora.inject import save_adapter

STEPS, ROWS, LENGTH = 10, 16, 32
LAYOUT = re.compile(r"(\d+)(?:d(\d+))?(?:c(\d+))?")
TINY = ("model=tiny", "runtime.kv_quant=false", "task.seq_len=32", "parallel.device=cpu", "checkpoint.every=1000",
        "optim=report", "optim.schedule.warmup_steps=0", "logger.progress=false",
        # Without it AdamW makes whole steps of gradients that are zero but for rounding.
        "optim.settings.adamw.eps=1.0e-8", "optim.clip=0.3",
        "optim.schedule.peak=1.0e-4", "optim.schedule.floor=1.0e-5")  # fmt: skip
# What a run has without these, but for the long warm-up, in which ten steps would hardly move anything.
DEFAULTS = ("runtime.kv_quant=true", "optim.settings.adamw.eps=1.0e-20", "optim.clip=1.0",
            "optim.schedule.peak=2.6e-4", "optim.schedule.floor=2.6e-5")  # fmt: skip
VISION = ("model=study_vision", "model.text_config.vocab_size=512", "model.text_config.n_routed_experts=4",
          "optim.schedule.constant_until_tokens=0")  # fmt: skip
RECOMPUTE = "runtime.recompute=true"
# The same rows a step each time: passes of each process, and settings.
CASES = {
    "plain": (1, ()),
    "passes": (4, ()),
    "recompute": (1, (RECOMPUTE,)),
    "both": (4, (RECOMPUTE,)),
    "defaults": (1, DEFAULTS),
    "images": (1, VISION),
    "bf16": (1, (RECOMPUTE, "parallel.precision=bf16", "runtime.stream_dtype=bf16", "runtime.offload=inputs")),
    "long": (4, (RECOMPUTE,)),
    "lora": (2, ("optim=adamw", "lora=all", "lora.rank=4", "lora.targets=[attention,experts,head]",
                 "optim.settings.adamw.eps=1.0e-4", "optim.schedule.peak=2.0e-4")),
}  # fmt: skip


def rows_of_step(step: int) -> dict[str, torch.Tensor]:
    """Rows of unequal documents. A quarter of them, in turn, has no target: all those of one of four ranks that make a
    single pass, and those of one pass of all ranks that make four.
    """
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(8, 500, (ROWS, LENGTH), generator=draw)
    lengths = torch.randint(2, 11, (ROWS, 3), generator=draw)
    real = torch.arange(LENGTH) < lengths.sum(1, keepdim=True)
    labels = ids.masked_fill(~real | (torch.rand(ROWS, LENGTH, generator=draw) < 0.3), -100)
    labels.view(4, ROWS // 4, LENGTH)[step % 4] = -100
    return {"input_ids": ids.masked_fill(~real, 2), "labels": labels, "seq_lens": lengths}


def long_rows_of_step(step: int) -> dict[str, torch.Tensor]:
    """The same with one document in each row, so that rows split over processes are cut inside of it."""
    batch = rows_of_step(step)
    lengths = torch.randint(20, LENGTH + 1, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    real = torch.arange(LENGTH) < lengths
    labels = batch["input_ids"].masked_fill(~real, -100)
    labels[step % ROWS] = -100
    return {"input_ids": batch["input_ids"].masked_fill(~real, 2), "labels": labels, "seq_lens": lengths}


def images_of_step(step: int) -> dict[str, torch.Tensor]:
    """The same with an image of 2 x 3 patches in each row of the first step, in three rows of the third and nowhere in
    the others: the vision tower then has a gradient on all ranks, on some, or on none.
    """
    batch = rows_of_step(step)
    span = torch.tensor([0, 1, 1, 1, 2, 1, 1, 1, 2, 3])  # START, two rows of IMAGE and NEWLINE, END
    types = torch.full((ROWS, LENGTH), -1)
    first = (0, ROWS, ROWS - 3, ROWS)[step]
    types[first:, 2 : 2 + len(span)] = span
    batch["seq_lens"] = torch.full((ROWS, 1), LENGTH) if step % 2 else torch.full((ROWS, 1), LENGTH - 4)
    images = ROWS - first
    pixels = torch.randn(images * 6, 3, 2, 2, generator=torch.Generator().manual_seed(step))
    grids = torch.tensor([[2, 3]]).repeat(images, 1)
    labels = batch["labels"].masked_fill(types >= 0, -100)
    ids = batch["input_ids"].masked_fill(types >= 0, 3)
    return {**batch, "input_ids": ids, "labels": labels, "vision_token_types": types, "pixel_values": pixels,
            "image_grid_hws": grids}  # fmt: skip


def share(batch: dict[str, torch.Tensor], run: Run) -> list[dict[str, torch.Tensor]]:
    """This rank's micro-batches of a step, dealt out as the loader does."""
    rows, passes = run.config.task.division_of_step(run.world.row_groups)
    first = [(number * run.world.row_groups + run.world.row_group) * rows for number in range(passes)]
    return [_rows(batch, at, at + rows) for at in first]


def _rows(batch: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    part = {name: tensor[start:stop] for name, tensor in batch.items() if len(tensor) == ROWS}
    if "pixel_values" in batch:
        before, here = ((batch["vision_token_types"][at] == 0).sum() for at in (slice(start), slice(start, stop)))
        part["image_grid_hws"] = batch["image_grid_hws"][before : before + here]
        part["pixel_values"] = batch["pixel_values"][6 * before : 6 * (before + here)]
    return part


def whole(run: Run) -> dict[str, torch.Tensor]:
    """Every parameter and buffer as one process would hold it; ranks that hold the same must agree to the bit."""
    copies: dict[str, dict[tuple, torch.Tensor]] = {}
    mine = {n: ((s.start, s.stop) if (s := getattr(t, "shard", None)) else (0, 0), rows_here(t))
            for n, t in run.model.state_dict(keep_vars=True).items()}  # fmt: skip
    for held in run.world.gather(mine):
        for name, (span, tensor) in held.items():
            seen = copies.setdefault(name, {}).setdefault(span, tensor)
            assert torch.equal(seen, tensor), f"{name} differs between ranks that hold the same"
    return {name: torch.cat([spans[span] for span in sorted(spans)]) if len(spans) > 1 else next(iter(spans.values()))
            for name, spans in copies.items()}  # fmt: skip


def ten_steps(case: str, world: World, corpus: Path) -> dict:
    """The numbers of every step (with images of four, one of each kind) and the model before the first and after the
    last. No token may choose expert 3 of the first layer.
    """
    parallel = world.parallel
    layout = (parallel.experts.size, parallel.dense.size, parallel.context.size)
    config = configure(case, world.size, layout[0], corpus, *layout[1:])
    run = build(config, world)
    for bias in run.model.router_biases()[0]:
        bias[3] = -1000.0
    before = {name: tensor.clone() for name, tensor in whole(run).items()}
    losses, norms = [], []
    batch_of = {"images": images_of_step, "long": long_rows_of_step}.get(case, rows_of_step)
    steps = 4 if case == "images" else STEPS
    for step in range(steps):
        numbers = train_step(run, share(batch_of(step), run), step, 0)
        assert numbers["expert_load"][0, :, 3].sum() == 0
        losses.append([float(numbers[name]) for name in ("total", "lm_sum", "balance_sum")])
        norms.append(float(numbers["grad_norm"]))
        counts = {name: numbers[name] for name in ("num_tokens", "supervised", "index_queries", "expert_load")}
    if case == "lora":
        save_adapter(run.model, corpus / f"adapter-{world.size}", config.init_from, biases=False)
    state = [t for held in run.optimizer.state.values() for t in held.values() if torch.is_tensor(t)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in state)
    assert size == run.optimizer.state_bytes()
    matrices = [p for p in run.model.parameters() if isinstance(p, DTensor)]
    kept = {"matrices": sum(p.numel() for p in matrices), "kept": sum(rows_here(p).numel() for p in matrices)}
    return {"losses": losses, "norms": norms, "counts": counts, "before": before, "tensors": whole(run), **kept,
            "state": world.gather(size)}  # fmt: skip


def stop_everywhere(world: World, corpus: Path) -> None:
    """A number that is none on the last rank alone: no rank takes the step."""
    run = build(configure("plain", world.size, world.parallel.experts.size, corpus), world)
    before = {name: parameter.clone() for name, parameter in run.model.named_parameters()}

    def losses_of(batch: dict[str, torch.Tensor], denominators: LossDenominators) -> Losses:
        losses = run.model.losses(**batch, denominators=denominators)
        return losses._replace(total=losses.total * float("nan")) if world.rank == world.size - 1 else losses

    try:
        train_step(run, share(rows_of_step(0), run), 0, 0, losses_of)
    except NonFiniteError:
        assert all(torch.equal(before[name], parameter) for name, parameter in run.model.named_parameters())
    else:
        raise AssertionError("the step was taken")


def split_head(ranks: RankGroup) -> None:
    """The loss through a head of 13 rows that is split over all ranks, of which the last has no target, is that through
    the whole head; so is its gradient, which is summed in fp32 whatever the precision of the products.
    """
    rows, width, tokens = 13, 8, 0 if ranks.rank == ranks.size - 1 else 5 + ranks.rank
    draw = torch.Generator().manual_seed(1)
    whole = torch.randn(rows, width, generator=draw).requires_grad_()
    draw.manual_seed(2 + ranks.rank)
    hidden = torch.randn(tokens, width, generator=draw)
    targets = torch.randint(rows, (tokens,), generator=draw)
    head = Head(width, rows, ranks)
    with torch.no_grad():
        head.weight.copy_(whole[head.shard.start : head.shard.stop])
    for dtype in (torch.float32, torch.bfloat16):
        whole.grad = head.weight.grad = None
        alone, split = (hidden.to(dtype, copy=True).requires_grad_() for _ in range(2))
        wanted = cross_entropy_sum(alone, whole, targets)
        found = cross_entropy_sum(split, head.weight, targets, head.shard)
        (wanted * 0.3).backward(), (found * 0.3).backward()
        assert torch.equal(found, wanted) and torch.equal(split.grad, alone.grad)
        dist.all_reduce(whole.grad)
        mine = whole.grad[head.shard.start : head.shard.stop]
        torch.testing.assert_close(head.weight.grad, mine, rtol=1e-6, atol=1e-6)


def configure(case: str, size: int, parts: int, corpus: Path, dense: int = 1, context: int = 1) -> Config:
    """The configuration of a case for so many processes, with experts and tables in so many parts, and the dense
    matrices and the rows over so many processes.
    """
    data = ("data.source=text", f"data.paths=[{corpus}/text]", f"data.validation_paths=[{corpus}/text/token.txt]",
            f"data.cache_dir={corpus}/cache", "data.vocab_size=512")  # fmt: skip
    layout = (f"parallel.world_size={size}", f"parallel.expert_parallel={parts}", f"parallel.table_shards={parts}",
              f"parallel.dense_shards={dense}", f"parallel.context_parallel={context}")  # fmt: skip
    passes, own = CASES[case]
    cut = passes * size if passes > 1 else 1  # a single pass is shared by rows
    settings = [*TINY, *data, *layout, f"task.global_batch_rows={ROWS}", f"task.micro_batch={ROWS // cut}", *own]
    if case == "lora":
        settings = [f"init_from={corpus}/base", *(text for text in settings if text != "optim=report")]
    return parsed(settings)


def parsed(settings: list[str]) -> Any:
    """The checked configuration of a command with these settings."""
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return parse(compose("train", overrides=open_overrides(settings)))


def at(world: World, parts: int, dense: int = 1, context: int = 1) -> World:
    """The same processes with experts and tables in so many parts, and the dense matrices and rows over so many
    ranks.
    """
    split, same = make_groups(parts, find_process())
    mesh = rank_mesh(dense, world.device) if dense > 1 else None
    parallel = Parallel(split, split, parts > 1) if parts > 1 else Parallel()
    parallel = replace(
        parallel,
        dense=axis_group(mesh, "parts") if mesh is not None else RankGroup(),
        context=axis_group(rank_mesh(context, world.device), "parts") if context > 1 else RankGroup(),
    )
    return replace(world, parallel=parallel, replica_groups={**world.replica_groups, parts: same}, dense_mesh=mesh)


def main(folder: Path, cases: list[str]) -> None:
    size = find_process().size
    world = launch(configure("passes", size, 1, folder).parallel)
    with world.collective_guard():
        stop_everywhere(at(world, size), folder)
        split_head(world.replica_groups[1])
        for case in cases:
            name, layout = case.split("@")
            parts, dense, context = (int(number or 1) for number in LAYOUT.fullmatch(layout).groups())
            found = ten_steps(name, at(world, parts, dense, context), folder)
            if world.first:
                torch.save(found, folder / f"{size}-{case}.pt")


if __name__ == "__main__":
    run_to_the_end(lambda: main(Path(sys.argv[1]), sys.argv[2:]))
