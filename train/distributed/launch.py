"""How the processes of a run find each other and form their groups."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from model.parallel.ranks import Parallel, RankGroup
from train.config.problems import ConfigError, problem
from train.config.schema import ParallelConfig
from train.distributed.engine import init_distributed, make_groups
from train.distributed.failure_detector import Watch, meet
from train.distributed.launchers import ProcessInfo, find_process
from train.distributed.world import World, pick_device

TIMEOUT = timedelta(minutes=30)  # for a collective; the failure detector notices a lost rank earlier
BACKEND = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def launch(layout: ParallelConfig) -> World:
    """Join the other processes, if any, started by torchrun, the deepspeed launcher or srun.

    Raises:
        ConfigError: the number of processes started is not the configured one.
        RankLost: some of them did not start.
    """
    process = find_process()
    if process.size != layout.world_size:
        raise ConfigError([_mismatch(layout, process)])
    device = pick_device(layout.device, process)
    if process.size == 1:
        return World(device)
    _rendezvous(process, device)
    groups = {n: make_groups(n, process) for n in sorted({layout.expert_parallel, layout.table_shards})}
    experts, tables = (groups[n][0] for n in (layout.expert_parallel, layout.table_shards))
    parallel = Parallel(experts, tables, layout.shard_embeddings)
    everyone = RankGroup(dist.group.WORLD, process.rank, process.size)
    replica_groups = {n: same for n, (_, same) in groups.items()} | {1: everyone}
    watch = Watch(dist.distributed_c10d._get_default_store().clone(), process.rank, process.size)
    watch.start()
    return World(device, process.rank, process.size, parallel, replica_groups, watch)


def _rendezvous(process: ProcessInfo, device: torch.device) -> None:
    os.environ.update(RANK=str(process.rank), WORLD_SIZE=str(process.size), LOCAL_RANK=str(process.local_rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    started = meet(process.rank, process.size, process.local_rank)
    init_distributed(BACKEND[device.type], device.type, TIMEOUT)
    del started  # the group now holds the store


def _mismatch(layout: ParallelConfig, process: ProcessInfo) -> str:
    started = "1 process was started" if process.size == 1 else f"{process.size} processes were started"
    command = f"torchrun --nproc-per-node {layout.world_size} -m train ..."
    remedy = f"Start as many ({command}, or slurm/train.sbatch), or set it to {process.size}"
    return problem("parallel.world_size", layout.world_size, started, remedy)
