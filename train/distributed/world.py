"""The processes of a run as one of them sees them: its rank, its groups, sums over all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model.parallel.ranks import ONE_PROCESS, Parallel, RankGroup
from train.distributed.failure_detector import FailureDetector, message
from train.distributed.launchers import ProcessInfo
from train.errors import RankLost


def pick_device(name: str, process: ProcessInfo = ProcessInfo()) -> torch.device:  # noqa: B008
    """``auto`` is a CUDA device if there is one, else the CPU. A process that sees several devices takes its own."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if process.size == 1:
        return torch.device("cuda")
    return torch.device("cuda", process.local_rank if torch.cuda.device_count() > 1 else 0)


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    device: torch.device
    rank: int = 0
    size: int = 1
    parallel: Parallel = ONE_PROCESS
    replica_groups: Mapping[int, RankGroup] = field(default_factory=lambda: {1: RankGroup()})
    # ^ by the number of parts a parameter is split into: the ranks that hold the same part as this one
    failure_detector: FailureDetector | None = None  # of several processes

    @property
    def first(self) -> bool:
        """Whether this process prints, logs and writes."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place; returns the tensor."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_all(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sum of each tensor over all ranks, in one call per dtype."""
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
        """Whether it is true on any rank."""
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
        """Wraps what the ranks do together. If one ends, all end, with a message that names it.

        ``agreed``: exceptions that every rank raises at the same place.

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
            # A rank whose peer is gone gets some error from the collective call before the detector knows which it is.
            collective = _from_collective(error)
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


def _from_collective(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
