"""Describes the processes of a run from the view of one process: the rank and the process groups of this process, and
collective operations.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from model.parallel.collective_errors import gather_objects
from model.parallel.ranks import ONE_PROCESS, Parallel, RankGroup
from train.config.schema import Config
from train.distributed.failure_detector import POLL_INTERVAL, FailureDetector, message
from train.distributed.launchers import LauncherError, ProcessInfo
from train.errors import RankLost
from train.start import StartTimes

T = TypeVar("T")


def pick_device(name: str, process: ProcessInfo = ProcessInfo()) -> torch.device:  # noqa: B008
    """Return the device for ``parallel.device``; ``auto`` is a CUDA device if there is one, otherwise the CPU.

    If this process sees several CUDA devices, the device whose index is the local rank of the process (its rank on this
    host) is returned.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if process.size == 1:
        return torch.device("cuda")
    count = torch.cuda.device_count()
    if 1 < count <= process.local_rank:
        rule = f"process {process.local_rank} of this host (LOCAL_RANK or SLURM_LOCALID), but it sees {count} GPUs"
        raise LauncherError(f"this is {rule}. Start at most {count} processes on a host")
    return torch.device("cuda", process.local_rank if count > 1 else 0)


def rank_mesh(parts: int, device: torch.device) -> DeviceMesh:
    """Create a mesh that arranges all ranks in rows of ``parts`` consecutive ranks. The axis ``parts`` runs along a
    row; the axis ``sets`` connects the ranks at the same position of all rows. All ranks must call this function
    together, because it creates process groups.
    """
    shape = (dist.get_world_size() // parts, parts)
    return init_device_mesh(device.type, shape, mesh_dim_names=("sets", "parts"))


def axis_group(mesh: DeviceMesh, axis: str) -> RankGroup:
    """Return the group of the ranks that differ from this rank only in their position along ``axis`` of the mesh."""
    group = mesh.get_group(axis)
    return RankGroup(group, dist.get_rank(group), dist.get_world_size(group))


def settle_precision(config: Config, device: torch.device) -> Config:
    """Return ``config`` with ``parallel.precision`` set to fp32 or bf16. The value ``auto`` is replaced by the
    precision that ``auto`` stands for on ``device``.
    """
    return config.with_precision("bf16" if computes_in_bf16("auto", device) else "fp32")


def computes_in_bf16(precision: str, device: torch.device) -> bool:
    """Return whether a value of ``parallel.precision`` (auto, fp32 or bf16) means bf16 on ``device``."""
    if precision != "auto":
        return precision == "bf16"
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


@dataclass(frozen=True)
class World:
    """The device, rank and process groups of this process, and collective operations over all processes of the run."""

    device: torch.device
    rank: int = 0
    size: int = 1
    parallel: Parallel = ONE_PROCESS
    replica_groups: Mapping[int, RankGroup] = field(default_factory=lambda: {1: RankGroup()})
    # ^ number of parts that a parameter is split into -> the ranks that hold the same part as this rank
    failure_detector: FailureDetector | None = None  # None if there is only one process
    start: StartTimes = field(default_factory=StartTimes)  # how long each part of the start of this process took
    _onces: Iterator[int] = field(default_factory=itertools.count)  # numbers the calls of `once`
    dense_mesh: DeviceMesh | None = None  # `rank_mesh` of the ranks that divide dense matrices; None: not divided

    @property
    def row_groups(self) -> int:
        """Number of groups of processes that compute different rows. Without context parallelism, each process is a
        group.
        """
        return self.size // self.parallel.context.size

    @property
    def row_group(self) -> int:
        """Index of the group of this process among the ``row_groups`` groups, which determines the rows that this
        process computes.
        """
        return self.rank // self.parallel.context.size

    @property
    def counts_rows(self) -> bool:
        """True on the first rank of each group that shares rows. Statistics of whole rows are counted only on this
        rank, so that each row counts once.
        """
        return self.parallel.context.rank == 0

    def share_rows(self, batches: list[Any]) -> list[Any]:
        """Return the batches (CPU tensors) of all ranks that share rows with this rank, in the order of ranks. Without
        context parallelism, only ``batches`` itself is returned.
        """
        return [batch for theirs in gather_objects(batches, self.parallel.context) for batch in theirs]

    @property
    def first(self) -> bool:
        """True on rank 0, the process that prints, logs and writes files."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over all ranks, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_all(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sum each tensor over all ranks, with one collective call per dtype. Returns new tensors."""
        if self.size == 1:
            return tensors
        found: dict[str, Tensor] = {}
        for dtype in {value.dtype: None for value in tensors.values()}:
            names = [name for name, value in tensors.items() if value.dtype == dtype]
            flat = self.sum_(torch.cat([tensors[name].flatten() for name in names]))
            pieces = flat.split([tensors[name].numel() for name in names])
            found |= {name: piece.view_as(tensors[name]) for name, piece in zip(names, pieces, strict=True)}
        return found

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on at least one rank."""
        return bool(self.sum_(torch.tensor(int(flag))))

    def from_first(self, value: Any) -> Any:
        """Return rank 0's ``value``, a picklable object, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def once(self, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0 and return its result, a picklable object, on every rank. If ``make`` refuses the
        user's input, its error is raised on every rank.
        """
        if self.size == 1:
            return make()
        found: Any = None
        error: Exception | None = None
        if self.first:
            try:
                found = make()
            except (ValueError, OSError) as refused:
                error = refused
        self._wait_for_first()
        found, error = self.from_first((found, error))
        if error is not None:
            raise error
        return found

    def _wait_for_first(self) -> None:
        """Wait until rank 0 has called this method as often as this rank. The ranks poll the store instead of using a
        collective call, because hashing a large corpus on rank 0 takes longer than the time limit of such a call.
        """
        store, key = dist.distributed_c10d._get_default_store(), f"once/{next(self._onces)}"
        if self.first:
            store.set(key, "")
        while not store.check([key]):
            time.sleep(POLL_INTERVAL)

    def gather(self, value: Any) -> list[Any]:
        """Return the list of every rank's ``value``, a picklable object, in the order of ranks."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        if self.size > 1:
            self.any(False)

    @contextmanager
    def collective_guard(self, *agreed: type[Exception]) -> Iterator[None]:
        """Context manager for code that all ranks run together: if one rank ends, all ranks end with a message that
        names this rank.

        agreed: types of exceptions that all ranks raise together, so that no rank is waiting for another.

        Raises:
            RankLost: another rank ended or no longer answers.
        """
        detector = self.failure_detector
        if detector is None:
            yield
            return
        try:
            yield
        except agreed:
            self._leave(detector)
            raise
        except Exception as error:
            # If another rank is gone, the collective call may fail before the failure detector knows which rank it is.
            collective = is_collective(error)
            failure = detector.wait_for_failure(detector.timeout + 5 if collective else 0)
            detector.announce(f"{type(error).__name__}: {error}")
            if failure and collective:
                raise RankLost(message(failure), reported=not detector.is_reporter()) from error
            raise
        self._leave(detector)

    def _leave(self, detector: FailureDetector) -> None:
        self.barrier()
        detector.close()
        dist.destroy_process_group()


def is_collective(error: BaseException) -> bool:
    """Return whether ``error`` comes from a failed collective call, for example because another rank is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
