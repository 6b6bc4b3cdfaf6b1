"""Stores tensors that are split over ranks, by torch.distributed.checkpoint (DCP), as safetensors and a JSON index.

DCP plans which rank writes which rows, and which saved rows a rank needs when the tensors are split differently on
loading. DCP's own storage format contains a pickle; the format of this module does not, so nothing is ever unpickled.
Instead of DTensor, the class `ShardedTensor` records which rows of a whole tensor a rank holds. `ShardedTensor` works
without a process group, and when one rank holds several pieces of a tensor.

A folder holds one file ``rank-00000.safetensors`` for each rank that wrote something, and ``tensors.json``, which lists
type, shape and chunks (first row, number of rows, file) of every tensor. A chunk that is not the whole tensor is stored
as ``name[first:end]``. A folder gets its final name only after the files of all ranks have reached the disk.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from data.progress import progress
from model.checkpoint.released import SPELLED, Header, Shards, Stored, file_headers, row_blocks, write_files
from model.parallel.ranks import RankGroup
from train.errors import InputError

INDEX = "tensors.json"
NAMED = {name: dtype for dtype, name in SPELLED.items()}

warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")  # 1 process


class CheckpointError(InputError):
    """A checkpoint cannot be used; the message names the file and the first thing that is wrong."""


@dataclasses.dataclass
class ShardedTensor:
    """The pieces that this process holds of a tensor that is split along its first axis.

    Each piece is stored under the index of its first row in the whole tensor. The methods with underscores and ``size``
    implement DCP's protocol for custom tensors.
    """

    shape: tuple[int, ...]  # shape of the whole tensor
    dtype: torch.dtype
    pieces: dict[int, Tensor]
    parts: int = 1  # number of ranks that the whole tensor is split over

    @classmethod
    def whole(cls, tensor: Tensor) -> ShardedTensor:
        return cls(tuple(tensor.shape), tensor.dtype, {0: tensor.detach()})

    @classmethod
    def rows(cls, tensor: Tensor, start: int, total: int, parts: int) -> ShardedTensor:
        """Wrap ``tensor`` as the rows from ``start`` on of a whole tensor with ``total`` rows, split over ``parts``
        ranks.
        """
        shape = (total, *tensor.shape[1:])
        return cls(shape, tensor.dtype, {start: tensor.detach()} if len(tensor) else {}, parts)

    def copied(self, buffers: dict[int, Tensor]) -> ShardedTensor:
        """Copy the pieces into ``buffers``. Missing buffers are allocated in host memory, pinned if there is a GPU."""
        for start, piece in self.pieces.items():
            buffer = buffers.get(start)
            if buffer is None or buffer.shape != piece.shape:
                buffers[start] = torch.empty_like(piece, device="cpu", pin_memory=piece.is_cuda)
            buffers[start].copy_(piece, non_blocking=True)
        return dataclasses.replace(self, pieces={start: buffers[start] for start in self.pieces})

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def _chunk(self, start: int) -> ChunkStorageMetadata:
        offsets = torch.Size([start, *(0 for _ in self.shape[1:])] if self.shape else [])
        return ChunkStorageMetadata(offsets, self.pieces[start].shape)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        items = []
        for start in self.pieces:
            chunk = self._chunk(start)
            data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.size())
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(start) for start in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.pieces[index.offset[0] if index.offset else 0]


class Chunk(NamedTuple):
    """A range of rows of a tensor, and the file that stores them."""

    start: int
    rows: int
    file: str


class Entry(NamedTuple):
    """Type, shape and chunks of one stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]


Index = dict[str, Entry]


def save(final: Path, tensors: Mapping[str, ShardedTensor], finish: Callable[[Path, Index], None]) -> None:
    """Write the tensors of all ranks into the folder ``final``. All ranks call this together.

    A piece that several ranks hold is written by one of them. When the tensors of all ranks are on disk, rank 0 calls
    ``finish(folder, index)``, which may add small files; then the folder gets its final name. If anything fails on any
    rank, the files are deleted and all ranks raise the error.

    Raises:
        OSError: the disk is full or refuses to write.
    """
    writer = _Writer(final, finish)
    with _failures(), _removed_on_failure(writer):
        dcp.save(
            dict(tensors), storage_writer=writer, planner=_SavePlanner(flatten_state_dict=False), process_group=group()
        )


def load(folder: Path, tensors: Mapping[str, ShardedTensor], index: Index) -> None:
    """Fill the pieces in ``tensors`` with the saved rows, whichever rank saved them. All ranks call this together.

    Each name in ``tensors`` must be an entry of ``index`` with the same shape. Rows that were not saved stay unchanged.

    Raises:
        CheckpointError: a file of the checkpoint is damaged or missing; the message names the file.
    """
    with _failures(), progress("loading the saved state", 1.0, shared=True) as done:
        reader = _Reader(folder, index, done)
        dcp.load(dict(tensors), storage_reader=reader, planner=_LoadPlanner(), process_group=group())


def read_index(folder: Path) -> Index:
    """Read ``tensors.json``, the index of all tensors that a folder stores.

    Raises:
        CheckpointError: ``tensors.json`` is missing or damaged.
    """
    path = folder / INDEX
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: Entry(NAMED[dtype], tuple(shape), [Chunk(*chunk) for chunk in chunks])
            for name, (dtype, shape, chunks) in raw.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, error) from None


@contextmanager
def open_rows(folder: Path, index: Index) -> Iterator[Callable[[str, slice | None], Tensor]]:
    """Yield a function ``read(name, rows)`` that reads rows of a saved tensor; if ``rows`` is None, it reads all rows.

    With this function a single process can read a checkpoint that any number of processes wrote.

    Raises:
        CheckpointError: a file of the checkpoint is damaged or missing; the message names the file.
    """
    files = sorted({chunk.file for entry in index.values() for chunk in entry.chunks})
    headers: dict[str, Header] = {}
    for file in files:
        try:
            headers |= file_headers(folder / file)
        except (OSError, ValueError) as error:
            raise damaged(folder / file, error) from None
    for name, (dtype, shape, chunks) in index.items():
        for chunk in chunks:
            key, wanted = _key(name, shape, chunk.start, chunk.rows), (chunk.rows, *shape[1:]) if shape else ()
            if key not in headers or headers[key][1:] != (SPELLED[dtype], wanted):
                raise damaged(folder / chunk.file, ValueError(f"it does not hold {key} as {INDEX} says it should"))
    with Shards(headers) as shards:

        def read(name: str, rows: slice | None = None) -> Tensor:
            entry = index[name]
            if not entry.shape:
                return shards.read(name)
            first, end = (rows.start, rows.stop) if rows else (0, entry.shape[0])
            pieces = []
            for chunk in sorted(entry.chunks):
                stop = min(end, chunk.start + chunk.rows)
                if chunk.start <= first < stop:
                    key = _key(name, entry.shape, chunk.start, chunk.rows)
                    pieces.append(shards.read(key, slice(first - chunk.start, stop - chunk.start)))
                    first = stop
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

        yield read


def complete(entry: Entry) -> bool:
    """Return whether the stored chunks cover every row of the tensor."""
    end = 0
    for chunk in sorted(entry.chunks):
        if chunk.start > end:
            return False
        end = max(end, chunk.start + chunk.rows)
    return bool(entry.chunks) and (not entry.shape or end >= entry.shape[0])


def damaged(path: Path, error: Exception) -> CheckpointError:
    """Return an error whose message says that a checkpoint file cannot be read, and why."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    advice = f"Delete {path.parent} to continue from the previous checkpoint"
    return CheckpointError(f"{path} cannot be read: {reason}. {advice}")


def group() -> dist.ProcessGroup | None:
    """Return a CPU process group of all processes of this run, or None if there is only one process.

    The first call creates the group, so all ranks must make the first call together.
    """
    return _cpu_group(dist.group.WORLD) if dist.is_initialized() else None


@cache
def _cpu_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Create a separate process group, since checkpoints are written while training steps use the default group."""
    return dist.new_group(backend="gloo")


def rank() -> int:
    """Return the rank of this process; 0 if there is only one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """Return the number of processes of this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def ranks() -> RankGroup:
    """Return the group of all ranks as the `RankGroup` that `model` uses.

    All ranks must make the first call of this function together.
    """
    return RankGroup(cast(dist.ProcessGroup, group()), rank(), size())


def fsync(path: Path) -> None:
    """Wait until the content of a file, or the file names in a folder, have reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _failures() -> Iterator[None]:
    """Raise the error of the first rank that failed, instead of DCP's exception with the tracebacks of all ranks."""
    try:
        yield
    except CheckpointException as collected:
        place, (error, _) = min(collected.failures.items())
        if isinstance(error, (CheckpointError, OSError)):
            raise error from None
        raise RuntimeError(f"checkpoint: rank {place} failed: {type(error).__name__}: {error}") from error


@contextmanager
def _removed_on_failure(writer: _Writer) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if rank() == 0:
            shutil.rmtree(writer.folder, ignore_errors=True)
        raise


class _SavePlanner(dcp.DefaultSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Make DCP's plan but skip DCP's check that all rows are present, because some rows have no optimizer state
        yet.
        """
        return dcp.default_planner.create_default_global_save_plan(dedup_save_plans(all_plans))

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        return dcp.default_planner.create_default_local_load_plan(self.state_dict, cast(Metadata, self.metadata))

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


def _key(name: str, shape: tuple[int, ...], start: int, rows: int) -> str:
    return name if not shape or rows == shape[0] else f"{name}[{start}:{start + rows}]"


def _blocks(planner: dcp.SavePlanner, item: WriteItem) -> Iterator[Tensor]:
    tensor = cast(Tensor, planner.resolve_data(item))  # only tensors are saved, never bytes
    for rows in row_blocks(tuple(tensor.shape)) if tensor.dim() else (...,):
        yield tensor[rows]


def _span(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """Return (index of the first row, number of rows) of a chunk. A 0-d tensor counts as one row."""
    return (offsets[0], sizes[0]) if sizes else (0, 1)


class _Writer(StorageWriter):
    def __init__(self, final: Path, finish: Callable[[Path, Index], None]):
        self.final, self.folder = final, final.parent / f".tmp-{final.name}"
        self._finish = finish

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        files = [f"rank-{number:05d}.safetensors" for number in range(len(plans))]
        return [dataclasses.replace(plan, storage_data=file) for plan, file in zip(plans, files, strict=True)]

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        stored, results = [], []
        for item in plan.items:
            data = item.tensor_data
            assert data is not None, "every item of a save plan must be a tensor"
            sizes, whole = tuple(data.chunk.sizes), tuple(data.size)
            key = _key(item.index.fqn, whole, *_span(data.chunk.offsets, sizes))
            stored.append(Stored(key, sizes, data.properties.dtype, partial(_blocks, planner, item)))
            results.append(WriteResult(item.index, stored[-1].nbytes, plan.storage_data))
        if stored:
            path = self.folder / plan.storage_data
            try:
                write_files({path: stored})
            except OSError as error:
                reason = error.strerror or str(error)
                raise OSError(f"{self.final} cannot be written: {path.name}: {reason}. Is the disk full?") from error
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = {result.index: result.storage_data for written in results for result in written}
        index: Index = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), "every entry of the metadata must be a tensor"
            chunks = [
                Chunk(*_span(chunk.offsets, chunk.sizes), files[MetadataIndex(name, chunk.offsets)])
                for chunk in entry.chunks
            ]
            index[name] = Entry(entry.properties.dtype, tuple(entry.size), sorted(chunks))
        raw = {name: (SPELLED[dtype], shape, chunks) for name, (dtype, shape, chunks) in index.items()}
        try:
            (self.folder / INDEX).write_text(json.dumps(raw), encoding="utf-8")
            self._finish(self.folder, index)
            for path in [*self.folder.iterdir(), self.folder]:
                fsync(path)
            os.rename(self.folder, self.final)
            fsync(self.final.parent)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(f"{self.final} cannot be written: {reason}. Is the disk full?") from error


class _Reader(StorageReader):
    """Reads the wanted rows of a checkpoint. done: called after each read with the fraction of all wanted values that
    this read returned.
    """

    def __init__(self, folder: Path, index: Index, done: Callable[[float], None]):
        self.folder, self.index, self.done = folder, index, done
        self._headers: dict[str, dict[str, Header]] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def read_metadata(self) -> Metadata:
        entries = {}
        for name, entry in self.index.items():
            rest = entry.shape[1:]
            chunks = [
                ChunkStorageMetadata(
                    torch.Size([chunk.start, *(0 for _ in rest)] if entry.shape else []),
                    torch.Size([chunk.rows, *rest] if entry.shape else []),
                )
                for chunk in entry.chunks
            ]
            entries[name] = TensorStorageMetadata(TensorProperties(entry.dtype), torch.Size(entry.shape), chunks)
        return Metadata(dict(entries))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        by_file: dict[str, list[Any]] = {}
        self._wanted = sum(math.prod(item.lengths) for item in plan.items)
        for item in plan.items:
            chunk = self.index[item.storage_index.fqn].chunks[cast(int, item.storage_index.index)]
            by_file.setdefault(chunk.file, []).append((item, chunk))
        for file, items in by_file.items():
            path = self.folder / file
            try:
                headers = file_headers(path)
                with safe_open(path, framework="pt") as file:
                    for item, chunk in items:
                        self._read(file, headers, item, chunk, planner.resolve_tensor(item))
            except (OSError, ValueError, SafetensorError) as error:
                raise damaged(path, error) from None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, file: Any, headers: dict[str, Header], item: Any, chunk: Chunk, target: Tensor) -> None:
        """Copy the wanted rows of a chunk into ``target``, a few rows at a time."""
        name = item.storage_index.fqn
        dtype, shape, _ = self.index[name]
        key = _key(name, shape, chunk.start, chunk.rows)
        if key not in headers:
            raise ValueError(f"it does not hold {key}, although {INDEX} says so")
        wanted = (chunk.rows, *shape[1:]) if shape else ()
        if headers[key].dtype != SPELLED[dtype] or headers[key].shape != wanted:
            raise ValueError(f"{key} is {headers[key].dtype} {list(headers[key].shape)}, but {INDEX} says otherwise")
        if not shape:
            target.copy_(file.get_tensor(key))
            self.done(1 / self._wanted)
            return
        first = item.storage_offsets[0]
        for rows in row_blocks(tuple(item.lengths)):
            part = target[rows]
            part.copy_(file.get_slice(key)[first + rows.start : first + rows.stop])
            self.done(part.numel() / self._wanted)
