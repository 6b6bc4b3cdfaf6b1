"""Several processes as one run: who is who, which of them share what, and the sums over all. The only file that knows
DeepSpeed.

``launch`` comes first and gives the ``World``; ``Engine`` then wraps the model. One process makes no process
group, imports no DeepSpeed and computes as if this file did not exist. Several are a DeepSpeed engine at ZeRO stage 0
(its gradient sums over the ranks that hold the same parameter) with our own optimizer, which shares its state out.

RankGroup that split the experts or the tables are consecutive, ranks that hold the same part are strided.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.parallel.ranks import ONE_PROCESS, Parallel, RankGroup
from train.config.schema import ConfigError, ParallelConfig, problem
from train.distributed.failure_detector import SILENCE, RankLost, Watch, meet, message

TIMEOUT = timedelta(
    minutes=30
)  # of a collective; a lost rank is noticed earlier, by train/distributed/failure_detector.py
BACKEND = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
# What starts processes, by the variables it sets: rank, number of processes, rank on this host.
LAUNCHERS = (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))


@dataclass(frozen=True)
class ProcessInfo:
    """Where this process stands among those that were started together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    device: torch.device
    rank: int = 0
    size: int = 1
    parallel: Parallel = ONE_PROCESS
    replica_groups: Mapping[int, RankGroup] = field(default_factory=lambda: {1: RankGroup()})
    # ^ by the number of parts a parameter is split into: the ranks that hold the same part as this one
    watch: Watch | None = None

    @property
    def first(self) -> bool:
        """Whether this process is the one that prints, logs and writes."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place; returns it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether it holds on any rank."""
        return bool(self.sum_(torch.tensor(int(flag))))

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, a picklable object."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, a picklable object, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            self.any(False)

    @contextmanager
    def collective_guard(self, *agreed: type[Exception]) -> Iterator[None]:
        """Around what the ranks do together. All end when one does, with a message that names it.

        ``agreed``: exceptions that every rank raises at the same place.

        Raises:
            RankLost: another rank ended or no longer answers.
        """
        if self.watch is None:
            yield
            return
        try:
            yield
        except agreed:
            self._part()
            raise
        except Exception as error:
            # A rank whose peer is gone gets some error from the collective call, before the watch knows who it is.
            lost = self.watch.verdict(SILENCE + 5 if _from_collective(error) else 0)
            self.watch.leave_word(f"{type(error).__name__}: {error}")
            if lost and _from_collective(error):
                raise RankLost(message(lost), told=not self.watch.speaks()) from error
            raise
        self._part()

    def _part(self) -> None:
        self.barrier()
        self.watch.close()
        dist.destroy_process_group()


class Engine:
    """Gradients of a step: ``backward`` once per micro-batch, then ``reduce``; ``step`` updates and clears them."""

    def __init__(self, world: World, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.world, self.optimizer = world, optimizer
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.deepspeed = _wrap(model, optimizer) if world.size > 1 else None

    def backward(self, loss: Tensor) -> None:
        """Add this rank's gradients; nothing is sent but what the model itself exchanges."""
        if self.deepspeed is None:
            loss.backward()
        else:
            self.deepspeed.backward(loss, scale_wrt_gas=False)

    def reduce(self) -> None:
        """Sum the gradients over the ranks that hold the same parameter. One without a gradient on any rank stays so;
        without one on some only, it counts as zero there.
        """
        if self.deepspeed is None:
            return
        present = torch.tensor([parameter.grad is not None for parameter in self.parameters], dtype=torch.int32)
        self.world.sum_(present)
        self.deepspeed.allreduce_gradients()
        for parameter, count in zip(self.parameters, present.tolist(), strict=True):
            if not count:
                parameter.grad = None
            elif parameter.grad is None:  # DeepSpeed passes over a part without a row; its owner steps all the same
                parameter.grad = torch.zeros_like(parameter)

    def step(self) -> None:
        """Let the optimizer update, and clear the gradients."""
        if self.deepspeed is None:
            self.optimizer.step()
        else:
            self.deepspeed.step()
        self.optimizer.zero_grad(set_to_none=True)


def launch(layout: ParallelConfig) -> World:
    """Meet the other processes, if any: started by torchrun, by the deepspeed launcher or by srun.

    Raises:
        ConfigError: the processes that were started are not those that the configuration names.
        RankLost: some of them did not start.
    """
    place = find_process()
    if place.size != layout.world_size:
        raise ConfigError([_mismatch(layout, place)])
    device = pick_device(layout.device, place)
    if place.size == 1:
        return World(device)
    _meet(place, device)
    groups = {n: _groups(n, place) for n in sorted({layout.expert_parallel, layout.table_shards})}
    experts, tables = (groups[n][0] for n in (layout.expert_parallel, layout.table_shards))
    parallel = Parallel(experts, tables, layout.shard_embeddings)
    everyone = RankGroup(dist.group.WORLD, place.rank, place.size)
    replica_groups = {n: same for n, (_, same) in groups.items()} | {1: everyone}
    watch = Watch(dist.distributed_c10d._get_default_store().clone(), place.rank, place.size)
    watch.start()
    return World(device, place.rank, place.size, parallel, replica_groups, watch)


def find_process(environment: Mapping[str, str] = os.environ) -> ProcessInfo:
    """What the launcher says, if there is one.

    Raises:
        ConfigError: it says half of it.
    """
    for names in LAUNCHERS:
        if all(name in environment for name in names[:2]):
            rank, size = (int(environment[name]) for name in names[:2])
            if size == 1:
                return ProcessInfo()
            missing = [name for name in (names[2], "MASTER_ADDR", "MASTER_PORT") if name not in environment]
            if missing:
                rule = f"{size} processes were started, but the environment lacks {', '.join(missing)}"
                raise ConfigError([f"{rule}. Start them by torchrun, or see slurm/"])
            return ProcessInfo(rank, size, int(environment[names[2]]))
    return ProcessInfo()


def run_to_the_end(main: Callable[[], None]) -> None:
    """Call ``main``, the whole program, and end the process. One of several ends with all that Python does at its end
    except taking itself apart: a thread of gloo or of the store that comes back to Python during that, if only to drop
    a tensor, aborts the process.
    """
    if all(os.environ.get(size, "1") == "1" for _, size, _ in LAUNCHERS):
        main()
        return
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def pick_device(name: str, place: ProcessInfo = ProcessInfo()) -> torch.device:  # noqa: B008
    """``auto`` is a CUDA device if there is one, else the CPU. A process that sees several takes its own."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if place.size == 1:
        return torch.device("cuda")
    return torch.device("cuda", place.local_rank if torch.cuda.device_count() > 1 else 0)


def _mismatch(layout: ParallelConfig, place: ProcessInfo) -> str:
    started = "1 process was started" if place.size == 1 else f"{place.size} processes were started"
    command = f"torchrun --nproc-per-node {layout.world_size} -m train ..."
    remedy = f"Start as many ({command}, or slurm/train.sbatch), or set it to {place.size}"
    return problem("parallel.world_size", layout.world_size, started, remedy)


def _import_deepspeed(device: str) -> Any:
    """DeepSpeed, quiet and without its compiled operators: we use none, and building them takes a minute."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    return deepspeed


def _meet(place: ProcessInfo, device: torch.device) -> None:
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.size), LOCAL_RANK=str(place.local_rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    deepspeed = _import_deepspeed(device.type)
    started = meet(place.rank, place.size, place.local_rank)
    deepspeed.init_distributed(BACKEND[device.type], auto_mpi_discovery=False, verbose=False, timeout=TIMEOUT)
    del started  # the group holds the store now


def _groups(parts: int, place: ProcessInfo) -> tuple[RankGroup, RankGroup]:
    """(ranks that split a parameter into so many parts, ranks that hold the same part)."""
    from deepspeed.utils import groups

    if parts == 1:
        return RankGroup(), RankGroup(dist.group.WORLD, place.rank, place.size)
    name = group_name(parts)
    groups._create_expert_and_data_parallel(parts)
    return (
        RankGroup(groups._get_expert_parallel_group(name), place.rank % parts, parts),
        RankGroup(groups._get_expert_data_parallel_group(name), place.rank // parts, place.size // parts),
    )


def group_name(parts: int) -> str:
    """DeepSpeed's name for the ranks that split a parameter into so many parts."""
    return f"ep_size_{parts}"


def _wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """The DeepSpeed engine: it sums gradients (not averages), clips nothing, and knows which parameters are split."""
    import deepspeed

    split = [parameter for parameter in model.parameters() if hasattr(parameter, "shard")]
    for parameter in split:
        parameter.allreduce, parameter.group_name = False, group_name(parameter.shard.ranks.size)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 1,  # the loaders know better; the engine only counts with it
            "gradient_accumulation_steps": 1,
            "gradient_allreduce_op": "sum",
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 0},
            "steps_per_print": 2**62,
        },
    )
    # Set by the presence of DeepSpeed's own MoE layer only; without it the engine fails on a split parameter.
    engine.has_moe_layers = bool(split)
    engine.enable_backward_allreduce = False  # `Engine.reduce` does it, once a step
    return engine


def _from_collective(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
