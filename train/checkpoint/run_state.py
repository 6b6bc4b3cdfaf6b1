"""The run state on disk: written whole or not at all by any number of processes, read back into any layout.

``<run>/checkpoints/step-00000100/`` holds the tensors (``storage.py``) and ``state.json``: counters, data
position, model configuration and the optimizer's method for every parameter. The tensors are ``model.<name>``,
``optimizer.<name>.<key>``, ``scales.<name>`` (``model.released_scales``) and ``random.<rank>``, each under its whole
shape whoever holds which rows. A folder gets its final name only after everything in it has reached the disk, so every
folder of that name is complete. Nothing is ever unpickled.
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

from data.errors import naming
from model import ModelConfig
from model.build import allocate_model
from model.checkpoint.names import allocate_scales, released_names, released_tensors, scale_parts
from model.checkpoint.released import TensorSource, row_blocks
from model.parallel.ranks import Shard
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
    """The counters of a run; everything else that resumes is in model, optimizer, data loader and random generators."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # real tokens trained on
    seconds: float = 0.0  # spent in training steps, over all restarts
    first_valid: dict[str, Any] | None = None  # evaluation before the first step
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
    """Write the run state below ``directory``, then delete all but the ``keep`` newest. Returns the folder.

    All ranks call it together. A step that is on the disk already is left as it is. With ``background`` only a copy is
    made before this returns; the folder appears later, and what goes wrong is raised by ``background``.

    Raises:
        OSError: the disk is full or refuses; nothing is left behind, in no rank.
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
        storage.group()  # made by all ranks together, so not in a thread
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
    """Restore everything that ``save`` wrote into the given objects, whatever layout it was written from; returns the
    counters. All ranks call it together. A rank that did not exist when the state was saved keeps its random
    generators.

    Raises:
        CheckpointError: the folder is damaged, or belongs to another model or other methods; the message names the
            first difference.
    """
    manifest, index = _read_manifest(folder), storage.read_index(folder)
    difference = first_difference(_as_today(manifest["model"]), model_config)
    if difference:
        raise CheckpointError(
            f"{folder} holds another model: {difference}. Use another run name, or the model it was made with"
        )
    _check_methods(folder, manifest["optimizer"], optimizer)
    load_model(folder, model)
    _load_optimizer(folder, optimizer, index)
    _load_random_state(folder, index)
    set_data(manifest["data"])
    return TrainerState(**manifest["state"])


def load_model(folder: Path, model: torch.nn.Module) -> None:
    """Restore parameters, buffers and kept scales only. All ranks call it together.

    Raises ``CheckpointError`` for other names, shapes or types, before anything is changed.
    """
    _read_manifest(folder)
    index = storage.read_index(folder)
    wanted = _model_tensors(model)
    _check_tensors(folder, index, wanted)
    allocate_scales(model, {name.removeprefix(SCALES) for name in index if name.startswith(SCALES)})
    storage.load(folder, wanted | _scale_tensors(model), index)


@contextmanager
def open_model(folder: Path) -> Iterator[dict[str, TensorSource]]:
    """The weights of a checkpoint under their released names, in the order of the model, read a few rows at a time.

    Raises ``CheckpointError`` if the folder is damaged or does not hold its own model.
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


def _source(name: str, entry: str, expert: int | None, index: Index, read: Callable[..., Tensor]) -> TensorSource:
    """One released tensor from the saved ones: a whole entry, or one expert of a stack."""
    dtype, shape, _ = index[entry]

    def blocks() -> Iterator[Tensor]:
        if expert is not None:
            matrix = read(entry, slice(expert, expert + 1))[0]
            yield from (matrix[rows] for rows in row_blocks(tuple(matrix.shape)))
        elif not shape:
            yield read(entry)
        else:
            yield from (read(entry, rows) for rows in row_blocks(shape))

    scales = f"{SCALES}{name}"
    kept = (lambda: read(scales)) if scales in index else None
    return TensorSource(name, shape if expert is None else shape[1:], dtype, blocks, kept)


def model_config(folder: Path) -> dict[str, Any]:
    """The configuration of the model in a checkpoint."""
    return _read_manifest(folder)["model"]


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = _complete(directory)
    return found[-1] if found else None


def prune(directory: Path, keep: int) -> None:
    """Delete all but the ``keep`` newest checkpoints, and what an interrupted write left behind.

    Of a link only the link is deleted. What cannot be deleted is named once and tried again by the next call: training
    does not depend on it.
    """
    for folder in [*_complete(directory)[:-keep], *directory.glob(".tmp-*")]:
        try:
            if folder.is_symlink():
                folder.unlink()
                continue
            doomed = folder.with_name(f".tmp-{folder.name.removeprefix('.tmp-')}")
            folder.rename(doomed)  # what is deleted by half is no checkpoint any more
            shutil.rmtree(doomed)
        except OSError as error:
            _warn_once(f"{error.filename or folder} cannot be deleted: {error.strerror}; tried again at the next save")


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)


def write_text(path: Path, text: str) -> None:
    """Replace a small file, whole or not at all."""
    temporary = path.with_name(f".tmp-{path.name}")
    with naming(str(path)), open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def first_difference(saved: Any, wanted: Any, key: str = "model") -> str | None:
    """The first difference between two plain configurations, in words; None if they are equal."""
    if isinstance(saved, Mapping) and isinstance(wanted, Mapping):
        for name in [*wanted, *(name for name in saved if name not in wanted)]:
            found = first_difference(saved.get(name), wanted.get(name), f"{key}.{name}")
            if found:
                return found
        return None
    return None if saved == wanted else f"{key} is {saved!r} there and {wanted!r} here"


def _as_today(model: dict[str, Any]) -> dict[str, Any]:
    """A saved model configuration, with defaults for keys that did not exist then."""
    try:
        return ModelConfig.from_dict(model).to_dict()
    except ValueError:  # it has unknown keys, which the comparison names
        return model


def random_state() -> dict[str, Any]:
    """The state of every generator that a step could draw from, as JSON."""
    name, keys, *rest = cast(tuple, np.random.get_state(legacy=True))
    return {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *rest],
        "torch": bytes(torch.get_rng_state().numpy()).hex(),
        "cuda": bytes(torch.cuda.get_rng_state().numpy()).hex() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the generators to a ``random_state``."""
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
    """What rank 0 found: a file system may show a change to some hosts later than to others."""
    answer = [found]
    if (group := storage.group()) is not None:
        dist.broadcast_object_list(answer, src=0, group=group)
    return answer[0]


def _spread(tensor: Tensor) -> ShardedTensor:
    """A parameter or buffer: the rows that ``parameter.shard`` says, else all of it."""
    shard = getattr(tensor, "shard", None)
    if shard is None:
        return ShardedTensor.whole(tensor)
    return _rows(tensor, shard)


def _rows(tensor: Tensor, shard: Shard) -> ShardedTensor:
    return ShardedTensor.rows(tensor, shard.start, shard.total, shard.ranks.size)


def _share(tensors: dict[str, ShardedTensor]) -> dict[str, ShardedTensor]:
    """The tensors that this rank writes: each tensor held by several ranks is assigned to one of them. Ranks that split
    a tensor are consecutive, and such a set writes all parts of the tensor or none.
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
    """(name, method, parameter) of everything in the optimizer."""
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            yield name, group["method"], parameter


def _optimizer_tensors(optimizer: Optimizer) -> dict[str, ShardedTensor]:
    """The state of the parameters that this rank updates; a step count is a 0-d tensor."""
    tensors = {}
    for name, _, parameter in _named(optimizer):
        shard = getattr(parameter, "shard", None)
        for key, value in optimizer.state.get(parameter, {}).items():
            value = torch.as_tensor(value)
            entry = ShardedTensor.whole(value) if shard is None or not value.shape else _rows(value, shard)
            tensors[f"{OPTIMIZER}{name}.{key}"] = entry
    return tensors


def _load_optimizer(folder: Path, optimizer: Optimizer, index: Index) -> None:
    """Replace the optimizer's state. Rows without a saved state start with zeros, as at their first step."""
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
    """Checkpoints, oldest first."""
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
        advice = "Continue with the version that wrote it, or begin from its export"
        raise CheckpointError(f"{folder} has checkpoint format {found}, this version reads format {FORMAT}. {advice}")
    return manifest


def _check_tensors(folder: Path, index: Index, wanted: Mapping[str, ShardedTensor]) -> None:
    for entry in [*wanted, *(name for name in index if name.startswith(MODEL))]:
        there, here, name = index.get(entry), wanted.get(entry), entry.removeprefix(MODEL)
        if there is None or here is None:
            where = "here" if there is None else "there"
            raise CheckpointError(f"{folder} holds another model: tensor {name} is only {where}")
        if there.shape != here.shape or there.dtype != here.dtype:
            shown = f"{list(there.shape)} {there.dtype} there and {list(here.shape)} {here.dtype} here"
            raise CheckpointError(f"{folder} holds another model: tensor {name} is {shown}")
        if not storage.complete(there):
            raise storage.damaged(folder / storage.INDEX, ValueError(f"rows of {name} are missing"))


def _check_methods(folder: Path, saved: Mapping[str, str], optimizer: Optimizer) -> None:
    here = {name: method for name, method, _ in _named(optimizer)}
    problems = [
        f"{name}: {saved.get(name, 'missing')} there, {here.get(name, 'missing')} here"
        for name in [*here, *(name for name in saved if name not in here)]
        if saved.get(name) != here.get(name)
    ]
    if problems:
        raise CheckpointError(f"{folder} was trained by other methods:\n  " + "\n  ".join(problems))
