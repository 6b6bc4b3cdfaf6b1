"""Tokens per second on 1, 2 and 4 processes of one thread each, and the share of communication. Run `make
bench-distributed`.

The demo's model on real text, the same rows a step on any number of processes; experts and tables are split over all of
them. Communication is the time inside collective calls, which is also the time of waiting for the slowest process: with
more processes than free cores most of it is that. Medians over the steps, means over the processes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

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

CALLS = ("all_reduce", "all_to_all_single", "all_gather_single", "reduce_scatter_single", "broadcast")


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


def configuration(folder: str, size: int, rows: int, length: int) -> Config:
    overrides = [
        "experiment=demo", f"output={folder}", f"task.micro_batch={rows}", f"task.global_batch_rows={rows}",
        "parallel.device=cpu",
        f"task.seq_len={length}", f"parallel.world_size={size}", f"parallel.expert_parallel={size}",
        f"parallel.table_shards={size}", f"parallel.shard_embeddings={str(size > 1).lower()}",
    ]  # fmt: skip
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return parse(compose("train", overrides=open_overrides(overrides)))


def work(arguments: argparse.Namespace) -> None:
    """One of the processes: the steps, and the line of the table from rank 0."""
    torch.set_num_threads(1)
    clock = Clock()
    size = find_process().size
    config = configuration(arguments.folder, size, arguments.rows, arguments.length)
    world = launch(config.parallel)
    with world.collective_guard():
        run = build(config, world)
        batches, seconds, spent = iter(run.train_batches), [], []
        for step in range(arguments.steps + 2):
            micro_batches = [next(batches) for _ in range(run.micro_batches)]
            before, started = clock.seconds, time.perf_counter()
            real = int(train_step(run, micro_batches, step, 0)["num_tokens"])
            seconds.append((time.perf_counter() - started) / real)
            spent.append((clock.seconds - before) / real)
        share = median(spent[2:]) / median(seconds[2:])
        shares = world.gather(share)
        if world.first:
            print(f"{size:>9}{1 / median(seconds[2:]):>12.0f}{sum(shares) / size:>16.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        work(arguments)
        return
    print(f"{arguments.rows} rows of {arguments.length} tokens a step, {os.cpu_count()} cores")
    print(f"{'processes':>9}{'tokens/s':>12}{'communication':>16}")
    with tempfile.TemporaryDirectory() as folder:
        for size in (1, 2, 4):
            options = [f"--{key}={value}" for key, value in vars(arguments).items() if key != "folder"]
            command = [__file__, *options, f"--folder={folder}"]
            with Group(size, command, Path(folder) / f"logs{size}") as group:
                ended = group.finish(seconds=1200)
            print(ended[0].output.strip("\n") if not any(end.code for end in ended) else group.outputs(), flush=True)


if __name__ == "__main__":
    run_to_the_end(main)
