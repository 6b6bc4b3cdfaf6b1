"""Checkpoints: all that is needed to resume a run. A checkpoint is written completely or not at all.

``<run>/checkpoints/step-00000100/`` holds the tensors (see ``storage.py``) and ``state.json``, which contains the
counters, the position in the data, the model configuration and the optimizer method of every parameter. The tensors are
named ``model.<name>``, ``optimizer.<name>.<key>``, ``scales.<name>`` (``model.released_scales``) and ``random.<rank>``.
Each tensor is stored with its full shape, however its rows were split over the processes, so a run can be resumed with
another number of processes. A folder gets its final name only after all its files have reached the disk, so every
folder with such a name is complete. Nothing is ever unpickled.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from data.errors import naming
from model import ModelConfig
from model.build import allocate_model
from model.checkpoint.names import allocate_scales, released_names, released_tensors, scale_parts
from model.checkpoint.released import TensorSource, packing_of, row_blocks, tile_span
from model.parallel.ranks import Shard, rows_here
from optim.optimizer import Optimizer
from optim.ownership import assign_owners
from train.checkpoint import storage
from train.checkpoint.background import Background
from train.checkpoint.storage import CheckpointError, Index, ShardedTensor

log = logging.getLogger(__name__)

FORMAT = 2
MODEL, SCALES, OPTIMIZER, RANDOM = "model.", "scales.", "optimizer.", "random."
NAME = re.compile(r"step-(\d{8,})")


@dataclass
class TrainerState:
    """The counters of a run: steps, tokens, seconds, and the results of the first and the last evaluation."""

    step: int = 0  # number of optimizer steps taken
    tokens: int = 0  # number of tokens trained on, padding not counted
    seconds: float = 0.0  # seconds spent in training steps, over all restarts
    first_valid: dict[str, Any] | None = None  # record of the evaluation before the first step
    last_valid: dict[str, Any] | None = None


def save(
    directory: Path,
    state: TrainerState,
    *,
    model: torch.nn.Module,
    optimizer: Optimizer,
    data: dict[str, Any],
    model_config: dict[str, Any],
    keep: int,
    background: Background | None = None,
) -> Path:
    """Write a checkpoint into ``directory``, then delete all but the ``keep`` newest. Returns the checkpoint's folder.

    All ranks call this together. If the checkpoint of this step exists already, it is left unchanged. With
    ``background`` this function only copies the tensors; the folder is written later, and the methods of ``background``
    raise the error if writing fails.

    Raises:
        OSError: the disk is full or refuses to write. All ranks raise it, and the incomplete files are deleted.
    """
    if background is not None:
        background.wait()
    final = directory / f"step-{state.step:08d}"
    if _agreed(final.exists()):
        return final
    methods = {name: method for name, method, _ in _named(optimizer)}
    manifest = {"format": FORMAT, "state": asdict(state), "data": data, "model": model_config, "optimizer": methods}
    text = json.dumps(manifest, indent=1)

    def finish(folder: Path, index: Index) -> None:
        lacking = [name for name, entry in index.items() if name.startswith(MODEL) and not storage.complete(entry)]
        assert not lacking, f"no rank holds all rows of {lacking[0]}"
        (folder / "state.json").write_text(text, encoding="utf-8")

    def write(tensors: dict[str, ShardedTensor]) -> None:
        storage.save(final, tensors, finish)
        if storage.rank() == 0:
            prune(directory, keep)

    tensors = _share(_model_tensors(model) | _scale_tensors(model)) | _optimizer_tensors(optimizer)
    tensors[f"{RANDOM}{storage.rank()}"] = ShardedTensor.whole(_tensor(json.dumps(random_state()).encode()))
    if background is None:
        write(tensors)
    else:
        storage.group()  # all ranks must create it together, so it is not created in the thread
        background.start(tensors, write)
    return final


def load(
    folder: Path,
    *,
    model: torch.nn.Module,
    optimizer: Optimizer,
    set_data: Callable[[dict[str, Any]], None],
    model_config: dict[str, Any],
) -> TrainerState:
    """Restore everything that ``save`` wrote into the given objects, and return the counters.

    All ranks call this together. The number of ranks may differ from when the state was saved; a rank that did not
    exist at that time keeps the present state of its random generators.

    Raises:
        CheckpointError: the folder is damaged, or it was saved with another model or other optimizer methods; the
            message names the first difference.
    """
    manifest, index = _read_manifest(folder), storage.read_index(folder)
    difference = first_difference(_as_today(manifest["model"]), model_config)
    if difference:
        raise CheckpointError(
            f"{folder} holds another model: {difference}. Use another run name, or the model of that checkpoint"
        )
    _check_methods(folder, manifest["optimizer"], optimizer)
    load_model(folder, model)
    _load_optimizer(folder, optimizer, index)
    _load_random_state(folder, index)
    set_data(manifest["data"])
    return TrainerState(**manifest["state"])


def load_model(folder: Path, model: torch.nn.Module) -> None:
    """Restore only the model: parameters, buffers and quantisation scales. All ranks call this together.

    Raises:
        CheckpointError: the tensors of the checkpoint have other names, shapes or types than those of ``model``; the
            error is raised before anything is changed.
    """
    _read_manifest(folder)
    index = storage.read_index(folder)
    wanted = _model_tensors(model)
    _check_tensors(folder, index, wanted)
    allocate_scales(model, {name.removeprefix(SCALES) for name in index if name.startswith(SCALES)})
    storage.load(folder, wanted | _scale_tensors(model), index)


@contextmanager
def open_model(folder: Path) -> Iterator[dict[str, TensorSource]]:
    """Open the weights of a checkpoint by their released names, in the order of the model.

    The values of a tensor are read a few rows at a time.

    Raises:
        CheckpointError: the folder is damaged, or its tensors do not match its own model configuration.
    """
    index = storage.read_index(folder)
    config = ModelConfig.from_dict(model_config(folder))
    skeleton = allocate_model(config, None, None, "meta", torch.float32)
    _check_tensors(folder, index, _model_tensors(skeleton))
    shapes = {part.name: part.shape for part in released_tensors(skeleton)}
    with storage.open_rows(folder, index) as read:
        found = {}
        for name, tensor in skeleton.state_dict().items():
            for place, released in enumerate(released_names(name, tensor.shape)):
                expert = place if len(shapes[released]) < tensor.dim() else None
                found[released] = _source(released, f"{MODEL}{name}", expert, index, read)
        yield found


def _source(
    name: str, entry: str, expert: int | None, index: Index, read: Callable[..., Tensor], rows: slice | None = None
) -> TensorSource:
    """Describe how to read one released tensor, or some of its rows, from the saved tensors.

    expert: index of the expert whose matrix is read from the saved stack of all experts' matrices; None for a tensor
    that is saved under its own name.
    """
    dtype, shape, _ = index[entry]
    shape = shape if expert is None else shape[1:]

    def blocks() -> Iterator[Tensor]:
        if expert is not None:
            matrix = read(entry, slice(expert, expert + 1))[0]
            yield from (matrix[part] for part in row_blocks(shape, rows))
        elif not shape:
            yield read(entry)
        else:
            yield from (read(entry, part) for part in row_blocks(shape, rows))

    def kept() -> Tensor:
        packing = packing_of(name)
        assert packing is not None, "only quantised weights have kept scales"
        return read(scales, None if rows is None else tile_span(rows, packing))

    scales, of_rows = f"{SCALES}{name}", functools.partial(_source, name, entry, expert, index, read)
    start = 0 if rows is None else rows.start
    return TensorSource(name, shape, dtype, blocks, kept if scales in index else None, start, of_rows=of_rows)


def model_config(folder: Path) -> dict[str, Any]:
    """Read the model configuration of a checkpoint."""
    return _read_manifest(folder)["model"]


def latest(directory: Path) -> Path | None:
    """Return the folder of the newest complete checkpoint in ``directory``, or None if there is none."""
    found = _complete(directory)
    return found[-1] if found else None


def prune(directory: Path, keep: int) -> None:
    """Delete all but the ``keep`` newest checkpoints, and the incomplete files of an interrupted save.

    If a checkpoint is a symbolic link, only the link is deleted, not its target. A folder that cannot be deleted does
    not stop training: a warning names it once, and the next call tries again.
    """
    for folder in [*_complete(directory)[:-keep], *directory.glob(".tmp-*")]:
        try:
            if folder.is_symlink():
                folder.unlink()
                continue
            doomed = folder.with_name(f".tmp-{folder.name.removeprefix('.tmp-')}")
            folder.rename(doomed)  # renamed first, so that no half-deleted folder looks like a checkpoint
            shutil.rmtree(doomed)
        except OSError as error:
            _warn_once(f"{error.filename or folder} cannot be deleted: {error.strerror}. The next save tries again")


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)


def write_text(path: Path, text: str) -> None:
    """Write a small text file, or replace it. If writing fails, the old file is unchanged."""
    temporary = path.with_name(f".tmp-{path.name}")
    with naming(str(path)), open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def first_difference(saved: Any, wanted: Any, key: str = "model") -> str | None:
    """Describe the first difference between a saved and an expected configuration, or return None if they are equal."""
    if isinstance(saved, Mapping) and isinstance(wanted, Mapping):
        for name in [*wanted, *(name for name in saved if name not in wanted)]:
            found = first_difference(saved.get(name), wanted.get(name), f"{key}.{name}")
            if found:
                return found
        return None
    return None if saved == wanted else f"{key} is {saved!r}, expected {wanted!r}"


def _as_today(model: dict[str, Any]) -> dict[str, Any]:
    """Add the default values of keys that did not exist yet when a model configuration was saved."""
    try:
        return ModelConfig.from_dict(model).to_dict()
    except ValueError:  # the configuration has unknown keys, which `first_difference` will name
        return model


def random_state() -> dict[str, Any]:
    """Return the states of all random generators that a training step may use, as values that JSON can store."""
    name, keys, *rest = cast(tuple, np.random.get_state(legacy=True))
    return {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *rest],
        "torch": bytes(torch.get_rng_state().numpy()).hex(),
        "cuda": bytes(torch.cuda.get_rng_state().numpy()).hex() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the random generators from the result of ``random_state``."""
    version, internal, gauss = state["python"]
    name, keys, *rest = state["numpy"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(_tensor(bytes.fromhex(state["torch"])))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(bytes.fromhex(state["cuda"])))


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _agreed(found: bool) -> bool:
    """Return on every rank the value that ``found`` has on rank 0.

    The values of ``found`` may differ between ranks, since a shared file system shows a change to some hosts later than
    to others.
    """
    answer = [found]
    if (group := storage.group()) is not None:
        dist.broadcast_object_list(answer, src=0, group=group)
    return answer[0]


def _spread(tensor: Tensor) -> ShardedTensor:
    """Wrap a parameter or buffer for saving. Its attribute ``shard`` says which rows of the whole tensor it has; a
    tensor without this attribute is saved as a whole.
    """
    shard = getattr(tensor, "shard", None)
    if shard is None:
        return ShardedTensor.whole(tensor)
    return _rows(rows_here(tensor), shard)


def _rows(tensor: Tensor, shard: Shard) -> ShardedTensor:
    return ShardedTensor.rows(tensor, shard.start, shard.total, shard.ranks.size)


def _share(tensors: dict[str, ShardedTensor]) -> dict[str, ShardedTensor]:
    """Select the tensors that this rank writes, so that a tensor that several ranks hold is written only once.

    A tensor may be split over a set of consecutive ranks. If several such sets hold the same tensor, one set writes all
    parts of the tensor.
    """
    share: dict[str, ShardedTensor] = {}
    for number in {spread.parts for spread in tensors.values()}:
        alike = {name: spread for name, spread in tensors.items() if spread.parts == number}
        sizes = [math.prod(spread.shape) * spread.dtype.itemsize for spread in alike.values()]
        writers = assign_owners(sizes, storage.size() // number)
        mine = storage.rank() // number
        share |= {name: alike[name] for name, writer in zip(alike, writers, strict=True) if writer == mine}
    return share


def _model_tensors(model: torch.nn.Module) -> dict[str, ShardedTensor]:
    return {f"{MODEL}{name}": _spread(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}


def _scale_tensors(model: torch.nn.Module) -> dict[str, ShardedTensor]:
    return {
        f"{SCALES}{part.name}": ShardedTensor.rows(
            cast(Tensor, part.tensor), part.start, part.shape[0], part.copies.size
        )
        for part in scale_parts(model)
    }


def _named(optimizer: Optimizer) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (name, method such as muon or adamw, tensor) of every parameter in the optimizer."""
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            yield name, group["method"], parameter


def _optimizer_tensors(optimizer: Optimizer) -> dict[str, ShardedTensor]:
    """Collect the optimizer state of the parameters that this rank updates. A step count becomes a 0-d tensor."""
    tensors = {}
    for name, _, parameter in _named(optimizer):
        shard = None if isinstance(parameter, DTensor) else getattr(parameter, "shard", None)  # whole at its owner
        for key, value in optimizer.state.get(parameter, {}).items():
            value = torch.as_tensor(value)
            entry = ShardedTensor.whole(value) if shard is None or not value.shape else _rows(value, shard)
            tensors[f"{OPTIMIZER}{name}.{key}"] = entry
    return tensors


def _load_optimizer(folder: Path, optimizer: Optimizer, index: Index) -> None:
    """Replace the optimizer's state by the saved one.

    If a row has no saved state, its state becomes zero, as before the first update of the row.
    """
    keys: dict[str, list[str]] = {}
    for entry in index:
        if entry.startswith(OPTIMIZER):
            name, _, key = entry.removeprefix(OPTIMIZER).rpartition(".")
            keys.setdefault(name, []).append(key)
    optimizer.state.clear()
    for name, _, parameter in _named(optimizer):
        for key in keys.get(name, ()) if optimizer.owns(parameter) else ():
            dtype, shape, _ = index[f"{OPTIMIZER}{name}.{key}"]
            like = parameter.shape if shape else ()
            optimizer.state[parameter][key] = torch.zeros(like, dtype=dtype, device=parameter.device)
    storage.load(folder, _optimizer_tensors(optimizer), index)
    for state in optimizer.state.values():
        state.update({key: int(value) for key, value in state.items() if not value.shape})


def _load_random_state(folder: Path, index: Index) -> None:
    name = f"{RANDOM}{storage.rank()}"
    found = {name: ShardedTensor.whole(torch.zeros(index[name].shape, dtype=torch.uint8))} if name in index else {}
    storage.load(folder, found, index)
    if found:
        set_random_state(json.loads(bytes(found[name].pieces[0].numpy())))


def _complete(directory: Path) -> list[Path]:
    """List the folders of complete checkpoints, oldest first."""
    found = [(int(match[1]), path) for path in directory.glob("step-*") if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        found = manifest.get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise storage.damaged(path, error) from None
    if found != FORMAT:
        advice = "Continue the run with the version that wrote it, or start a new run from its export"
        raise CheckpointError(f"{folder} has checkpoint format {found}; this version reads format {FORMAT}. {advice}")
    return manifest


def _check_tensors(folder: Path, index: Index, wanted: Mapping[str, ShardedTensor]) -> None:
    for entry in [*wanted, *(name for name in index if name.startswith(MODEL))]:
        there, here, name = index.get(entry), wanted.get(entry), entry.removeprefix(MODEL)
        if there is None or here is None:
            shown = "is missing from the checkpoint" if there is None else "is not part of this run's model"
            raise CheckpointError(f"{folder} holds another model: tensor {name} {shown}")
        if there.shape != here.shape or there.dtype != here.dtype:
            shown = f"{list(there.shape)} {there.dtype}, expected {list(here.shape)} {here.dtype}"
            raise CheckpointError(f"{folder} holds another model: tensor {name} is {shown}")
        if not storage.complete(there):
            raise storage.damaged(folder / storage.INDEX, ValueError(f"rows of {name} are missing"))


def _check_methods(folder: Path, saved: Mapping[str, str], optimizer: Optimizer) -> None:
    here = {name: method for name, method, _ in _named(optimizer)}
    problems = [
        f"{name}: saved with {saved.get(name, 'no method')}, expected {here.get(name, 'no method')}"
        for name in [*here, *(name for name in saved if name not in here)]
        if saved.get(name) != here.get(name)
    ]
    if problems:
        raise CheckpointError(f"{folder} was trained by other optimizer methods:\n  " + "\n  ".join(problems))
