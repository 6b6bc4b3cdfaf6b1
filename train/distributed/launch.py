"""Connects the processes of a run and creates their process groups."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from model.parallel.ranks import Parallel, RankGroup
from train.config.problems import ConfigError, problem
from train.config.schema import ParallelConfig
from train.distributed.engine import init_distributed, make_groups
from train.distributed.failure_detector import FailureDetector, rendezvous
from train.distributed.launchers import ProcessInfo, find_process
from train.distributed.world import World, axis_group, pick_device, rank_mesh
from train.signals import ctrl_c_ends
from train.start import StartTimes

BACKEND = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def launch(layout: ParallelConfig, stacks: Path | None = None) -> World:
    """Connect this process with the other processes that torchrun, the deepspeed launcher or srun has started, if any.
    Returns the ``World`` of this process.

    stacks: folder for the stack traces of all ranks, written if a rank hangs (``parallel.hang_timeout``).

    Raises:
        ConfigError: the number of started processes differs from ``parallel.world_size``.
        LauncherError: an environment variable of the launcher cannot be used.
        RankLost: some of the processes did not start in time.
    """
    start = StartTimes()
    start.mark("imports")
    process = find_process()
    if process.size != layout.world_size:
        raise ConfigError([_mismatch(layout, process)])
    device = pick_device(layout.device, process)
    if process.size == 1:
        return World(device, start=start)
    with ctrl_c_ends():
        return _connect(process, device, layout, start, stacks)


def _connect(
    process: ProcessInfo, device: torch.device, layout: ParallelConfig, start: StartTimes, stacks: Path | None
) -> World:
    """Connect this process with the others of the run and create all process groups."""
    _form_group(process, device, layout)
    groups = {n: make_groups(n, process) for n in sorted({layout.expert_parallel, layout.table_shards})}
    experts, tables = (groups[n][0] for n in (layout.expert_parallel, layout.table_shards))
    mesh = rank_mesh(layout.dense_shards, device) if layout.dense_shards > 1 else None
    dense = axis_group(mesh, "parts") if mesh is not None else RankGroup()
    context = RankGroup()
    if layout.context_parallel > 1:
        context = axis_group(rank_mesh(layout.context_parallel, device), "parts")
    parallel = Parallel(experts, tables, layout.shard_embeddings, dense=dense, context=context)
    everyone = RankGroup(cast(dist.ProcessGroup, dist.group.WORLD), process.rank, process.size)
    replica_groups = {n: same for n, (_, same) in groups.items()} | {1: everyone}
    store = cast(Any, dist.distributed_c10d._get_default_store()).clone()
    detector = FailureDetector(store, process.rank, process.size, layout.heartbeat_timeout, layout.hang_timeout, stacks)
    detector.start()
    start.mark("processes")
    return World(device, process.rank, process.size, parallel, replica_groups, detector, start, dense_mesh=mesh)


def _form_group(process: ProcessInfo, device: torch.device, layout: ParallelConfig) -> None:
    """Wait until all processes have started, then create the default process group."""
    # DeepSpeed uses LOCAL_RANK as the device index, which is wrong if each process sees only its own device.
    local_rank = process.local_rank if device.index is None else device.index
    os.environ.update(RANK=str(process.rank), WORLD_SIZE=str(process.size), LOCAL_RANK=str(local_rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = rendezvous(process.rank, process.size, process.local_rank, layout.start_timeout)
    init_distributed(BACKEND[device.type], device.type, timedelta(seconds=layout.collective_timeout))
    del store  # the process group keeps the store alive from here on


def _mismatch(layout: ParallelConfig, process: ProcessInfo) -> str:
    started = "1 process was started" if process.size == 1 else f"{process.size} processes were started"
    command = f"torchrun --nproc-per-node {layout.world_size} -m train ..."
    remedy = f"Start that number ({command}, or slurm/train.sbatch), or set parallel.world_size={process.size}"
    return problem("parallel.world_size", layout.world_size, started, remedy)
