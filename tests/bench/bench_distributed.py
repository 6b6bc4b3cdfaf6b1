"""Speed of 1, 2 and 4 processes of one thread each as a ratio to one process, and the share of communication, with
rows split over C = 1, 2 and 4 processes. Run `make bench-distributed`; `--json FILE` writes all numbers.

The demo's model on real text, the same rows a step on any number of processes; experts and tables are split over all of
them. Communication is the time inside collective calls, which is also the time of waiting for the slowest process: with
more processes than free cores most of it is that. The layouts take turns, so that other work on the machine disturbs
all of them alike; every turn gives one ratio to the single process of the same turn. Shown are medians over the turns;
within a turn, medians over the steps and means over the processes. CPU is the processor time a token of all processes
together, as a ratio too: what the work on several processes costs more, without waiting, on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir

from train.build import build
from train.config.compose import CONF_DIR, open_overrides
from train.config.parse import parse
from train.config.schema import Config
from train.distributed.launch import launch
from train.distributed.launchers import find_process, run_to_the_end
from train.loop import train_step

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "distributed")]
from ranks import Group  # noqa: E402

LAYOUTS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))  # processes, parallel.context_parallel
CALLS = ("all_reduce", "all_to_all_single", "all_gather_single", "reduce_scatter_single", "broadcast")


class Turn(NamedTuple):
    """One measurement of a layout: tokens per second, the share of the time in collective calls, and the processor
    seconds of all processes for a token.
    """

    tokens_per_second: float
    communication: float
    cpu_seconds: float


class Clock:
    """Seconds spent in collective calls, and in waiting for those that run beside other work."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in CALLS:
            setattr(dist, name, self._timed(getattr(dist, name)))

    def _timed(self, call: Callable) -> Callable:
        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            work = call(*arguments, **options)
            self.seconds += time.perf_counter() - started
            return None if work is None else _Work(work, self)

        return timed


class _Work:
    def __init__(self, work: dist.Work, clock: Clock):
        self.work, self.clock = work, clock

    def wait(self) -> None:
        started = time.perf_counter()
        self.work.wait()
        self.clock.seconds += time.perf_counter() - started


def configuration(folder: str, size: int, context: int, rows: int, length: int) -> Config:
    overrides = [
        "experiment=demo", f"output={folder}", f"task.micro_batch={rows}", f"task.global_batch_rows={rows}",
        "parallel.device=cpu",
        f"task.seq_len={length}", f"parallel.world_size={size}", f"parallel.expert_parallel={size}",
        f"parallel.context_parallel={context}", f"parallel.table_shards={size}",
        f"parallel.shard_embeddings={str(size > 1).lower()}",
    ]  # fmt: skip
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return parse(compose("train", overrides=open_overrides(overrides)))


def work(arguments: argparse.Namespace) -> None:
    """One of the processes: the steps. Rank 0 prints tokens per second and the share of communication as JSON."""
    torch.set_num_threads(1)
    clock = Clock()
    size = find_process().size
    config = configuration(arguments.folder, size, arguments.context, arguments.rows, arguments.length)
    world = launch(config.parallel)
    with world.collective_guard():
        run = build(config, world)
        batches, seconds, spent, processor = iter(run.train_batches), [], [], []
        for step in range(arguments.steps + 2):
            micro_batches = [next(batches) for _ in range(run.micro_batches)]
            before, started, used = clock.seconds, time.perf_counter(), time.process_time()
            real = int(train_step(run, micro_batches, step, 0)["num_tokens"])
            seconds.append((time.perf_counter() - started) / real)
            spent.append((clock.seconds - before) / real)
            processor.append((time.process_time() - used) / real)
        tokens_per_second = world.gather(1 / median(seconds[2:]))
        shares = world.gather(median(spent[2:]) / median(seconds[2:]))
        processors = world.gather(median(processor[2:]))
        if world.first:
            print(json.dumps([sum(tokens_per_second) / size, sum(shares) / size, sum(processors)]))


def measure(arguments: argparse.Namespace, size: int, context: int, folder: Path) -> Turn:
    """Start the processes of one layout."""
    options = [f"--{key}={getattr(arguments, key)}" for key in ("steps", "rows", "length")]
    command = [__file__, *options, f"--context={context}", f"--folder={folder}"]
    with Group(size, command, folder / f"logs{size}-{context}") as group:
        ended = group.finish(seconds=1200)
        if any(end.code for end in ended):
            sys.exit(group.outputs())
    return Turn(*json.loads(ended[0].output.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3, help="times that every layout is measured")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--json", type=Path, help="file to write all numbers to")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--context", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        work(arguments)
        return
    found: dict[tuple[int, int], list[Turn]] = {layout: [] for layout in LAYOUTS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.turns):
            for layout, turns in found.items():
                turns.append(measure(arguments, *layout, Path(folder)))
    table = [row(layout, turns, found[LAYOUTS[0]]) for layout, turns in found.items()]
    print(f"{arguments.rows} rows of {arguments.length} tokens a step, {os.cpu_count()} cores, {arguments.turns} turns")
    print(f"{'processes':>9}{'C':>4}{'against one':>13}{'lowest':>9}{'highest':>9}{'communication':>15}{'CPU':>7}")
    for one in table:
        print(
            f"{one['processes']:>9}{one['context']:>4}{median(one['ratios']):>13.2f}{min(one['ratios']):>9.2f}"
            f"{max(one['ratios']):>9.2f}{median(one['communication']):>15.1%}{median(one['cpu_ratios']):>7.2f}"
        )
    if arguments.json:
        settings = {key: getattr(arguments, key) for key in ("turns", "steps", "rows", "length")}
        arguments.json.write_text(json.dumps({**settings, "cores": os.cpu_count(), "layouts": table}, indent=1) + "\n")


def row(layout: tuple[int, int], turns: list[Turn], alone: list[Turn]) -> dict[str, Any]:
    """The numbers of a layout by turn: tokens per second and ratios to one process; communication; ratios of CPU."""
    return {
        "processes": layout[0],
        "context": layout[1],
        "tokens_per_second": [turn.tokens_per_second for turn in turns],
        "ratios": [turn.tokens_per_second / one.tokens_per_second for turn, one in zip(turns, alone, strict=True)],
        "communication": [turn.communication for turn in turns],
        "cpu_ratios": [turn.cpu_seconds / one.cpu_seconds for turn, one in zip(turns, alone, strict=True)],
    }


if __name__ == "__main__":
    run_to_the_end(main)
