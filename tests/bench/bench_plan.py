"""What task=plan says of two or four processes, against what they hold and send. Run `python
tests/bench/bench_plan.py`, for four with `--ranks 4`; `--json FILE` writes the table.

A tiny model in fp32 on the CPU, one optimizer step in each of several layouts; bytes of real tensors, and of what the
exchanges of experts and tables are given for the other process. Sending depends on the batch: the plan takes routing to
be even and the rows looked up to be distinct.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from model.parallel.ranks import Parallel, RankGroup, rows_here
from tests.distributed.ranks import Group
from train.build import Run, build
from train.config.compose import CONF_DIR, open_overrides
from train.config.parse import parse
from train.config.schema import Config
from train.distributed.launch import launch
from train.distributed.launchers import run_to_the_end
from train.distributed.world import World, axis_group, rank_mesh
from train.loop import train_step
from train.planning.resources import plan
from train.planning.traffic import ENTRIES, GATHERED, HALO, OWNED, SUMMED

SENT_TO = "sent to single ranks (experts, tables, window keys, owners)"
SENT_TO_ALL = "sent to all ranks, and sums (entries, head, dense matrices)"
SEEN = {  # the plan's kinds of traffic that `Sent` counts, which counts no all-reduce
    SENT_TO: ("all-to-all", OWNED, HALO),
    SENT_TO_ALL: ("head gathered", GATHERED, SUMMED, ENTRIES),
}


def layouts(ranks: int) -> dict[str, tuple[int, int, bool, int, int]]:
    """By name: parallel.expert_parallel, table_shards, shard_embeddings, dense_shards, context_parallel."""
    return {
        f"experts over {ranks}": (ranks, 1, False, 1, 1),
        f"Engram tables over {ranks}": (1, ranks, False, 1, 1),
        f"dense matrices over {ranks}": (1, 1, False, ranks, 1),
        f"rows over {ranks}": (1, 1, False, 1, ranks),
        f"experts, tables, embedding and head over {ranks}": (ranks, ranks, True, 1, 1),
        f"experts and rows over {ranks}": (ranks, 1, False, 1, ranks),
    }


MODULES = ("abc", "bisect", "copy", "glob", "heapq", "operator", "queue", "sched", "string", "textwrap", "token")


def configure(folder: Path, layout: str, ranks: int) -> Config:
    experts, tables, embeddings, dense, context = layouts(ranks)[layout]
    given = [
        "task=plan", "plan.load_factor=1.0", "model=tiny", "optim=report",
        "task.seq_len=64", f"task.micro_batch={1 if context > 1 else 8 // ranks}", "task.global_batch_rows=8",
        "runtime.recompute=true", "parallel.device=cpu", f"parallel.world_size={ranks}",
        f"parallel.expert_parallel={experts}", f"parallel.table_shards={tables}",
        f"parallel.shard_embeddings={str(embeddings).lower()}", f"parallel.dense_shards={dense}",
        f"parallel.context_parallel={context}",
        "data.source=text", f"data.paths=[{folder}/text]", f"data.validation_paths=[{folder}/text/token.txt]",
        f"data.cache_dir={folder}/cache", "data.vocab_size=512",
    ]  # fmt: skip
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return parse(compose("train", overrides=open_overrides(given)))


def parallel_of(layout: str, split: RankGroup) -> Parallel:
    """How a layout spreads the model over the processes."""
    sizes = layouts(split.size)[layout]
    experts, tables, _, dense, context = (split if n > 1 else RankGroup() for n in sizes)
    return Parallel(experts, tables, sizes[2], dense=dense, context=context)


class Sent:
    """Counts the bytes that are given to exchanges and gathers for other ranks, while it is entered."""

    def __enter__(self) -> Sent:
        self.bytes = dict.fromkeys(SEEN, 0)
        self.kept = (dist.all_to_all_single, dist.all_gather_single, dist.reduce_scatter_single)
        swap, gather, scatter = self.kept

        def all_to_all_single(output, input, receive=None, send=None, group=None, **options):
            own = len(input) // dist.get_world_size(group) if send is None else send[dist.get_rank(group)]
            self.bytes[SENT_TO] += (len(input) - own) * input[:1].nbytes
            return swap(output, input, receive, send, group=group, **options)

        def all_gather_single(output, input, group=None, **options):
            self.bytes[SENT_TO_ALL] += (dist.get_world_size(group) - 1) * input.nbytes
            return gather(output, input, group=group, **options)

        def reduce_scatter_single(output, input, op=dist.ReduceOp.SUM, group=None, **options):
            self.bytes[SENT_TO_ALL] += (dist.get_world_size(group) - 1) * output.nbytes
            return scatter(output, input, op, group, **options)

        dist.all_to_all_single, dist.all_gather_single = all_to_all_single, all_gather_single
        dist.reduce_scatter_single = reduce_scatter_single
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single, dist.all_gather_single, dist.reduce_scatter_single = self.kept


def measure(config: Config, world: World) -> dict[str, float]:
    """Bytes of this rank's tensors in and after a step, and of what it sent."""
    run = build(config, world)
    batches = iter(run.train_batches)
    step = [run.to_device(next(batches)) for _ in range(run.micro_batches)]
    held: dict[str, float] = {"weights": _bytes(map(rows_here, run.model.parameters()))}
    collect = run.optimizer.collect_gradients

    def collected() -> None:
        held["gradients"] = _bytes(rows_here(p.grad) for p in run.model.parameters() if p.grad is not None)
        collect()

    run.optimizer.collect_gradients = collected
    with Sent() as sent:
        train_step(run, step, 0, 0)
    for method in ("muon", "sinkhorn", "adamw"):
        held[f"optimizer state, {method}"] = _state_bytes(run, method)
    return held | sent.bytes | {"remote share": _remote_share(run, step)}


def _remote_share(run: Run, step: list[dict]) -> float:
    """Share of this rank's token copies that went to experts of other ranks."""
    experts = run.model.layers[0].ffn.experts.shard
    with torch.no_grad():
        denominators = run.model.loss_denominators(**step[0])
        load = sum(run.model.losses(**batch, denominators=denominators).expert_load for batch in step)
    return 1 - (load[..., experts.start : experts.stop].sum() / load.sum()).item()


def _state_bytes(run: Run, method: str) -> int:
    groups = (group for group in run.optimizer.param_groups if group["method"] == method)
    states = (run.optimizer.state.get(param, {}) for group in groups for param in group["params"])
    return _bytes(value for state in states for value in state.values() if isinstance(value, torch.Tensor))


def _bytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def rank_main(folder: Path, ranks: int) -> None:
    """One of the processes: measure every layout; the first writes what all found."""
    split = launch(configure(folder, list(layouts(ranks))[-1], ranks).parallel)
    with split.collective_guard():
        found, mesh = {}, rank_mesh(ranks, split.device)
        for layout in layouts(ranks):
            parallel = parallel_of(layout, axis_group(mesh, "parts") if "dense" in layout else split.parallel.experts)
            world = replace(split, parallel=parallel, dense_mesh=mesh if parallel.dense.size > 1 else None)
            found[layout] = world.gather(measure(configure(folder, layout, ranks), world))
        if split.first:
            torch.save(found, folder / "found.pt")


def compare(folder: Path, number: int = 2) -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    """Start `number` processes; by layout, what is planned and what was measured: memory on the rank with most
    optimizer state, bytes sent as the mean over ranks.
    """
    (folder / "text").mkdir(parents=True)
    for name in MODULES:
        text = Path(os.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        (folder / "text" / f"{name}.txt").write_text(text, encoding="utf-8")
    command = ["tests/bench/bench_plan.py", "--folder", str(folder), "--ranks", str(number)]
    with Group(number, command, folder / "ranks") as group:
        for rank, ended in enumerate(group.finish()):
            assert ended.code == 0, f"rank {rank}:\n{ended.output}"
    both = {}
    for layout, ranks in torch.load(folder / "found.pt").items():
        p = plan(configure(folder, layout, number))
        terms = {"weights": sum(p.weights.values()), "gradients": sum(p.gradients.values())}
        terms |= {f"optimizer state, {method}": size for method, size in p.state.items()}
        for term, kinds in SEEN.items():
            terms[term] = sum(p.traffic[kind] for kind in p.traffic if kind.startswith(kinds))
        state = [sum(held[term] for term in held if term.startswith("optimizer state")) for held in ranks]
        measured = dict(ranks[state.index(max(state))])
        for term in (*SEEN, "remote share"):  # ranks differ in what they send, and the plan is about their mean
            measured[term] = sum(held[term] for held in ranks) / number
        both[layout] = terms, measured
    return both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4), help="processes")
    parser.add_argument("--json", type=Path, help="file to write the table to")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        rank_main(options.folder, options.ranks)
        return
    with tempfile.TemporaryDirectory() as folder:
        both = compare(Path(folder), options.ranks)
    for layout, (planned, measured) in both.items():
        print(f"{layout + ', bytes':<64}{'planned':>12}{'measured':>12}{'difference':>12}")
        for term, size in planned.items():
            if size or measured[term]:
                off = f"{size / measured[term] - 1:+.2%}"
                print(f"  {term:<62}{size:>12,.0f}{measured[term]:>12,.0f}{off:>12}")
    if options.json:
        table = {layout: {"planned": planned, "measured": measured} for layout, (planned, measured) in both.items()}
        options.json.write_text(json.dumps({"ranks": options.ranks, "layouts": table}, indent=1) + "\n")


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_to_the_end(main)
    else:
        main()
