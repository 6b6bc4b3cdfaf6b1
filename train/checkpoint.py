"""The run state on disk: written whole or not at all, read without ever unpickling arbitrary objects.

``<run>/checkpoints/step-00000100/`` holds ``model.safetensors`` (parameters and buffers under the model's own names),
``training.pt`` (optimizer and random states; tensors and plain containers only) and ``state.json`` (counters, data
position, model configuration). A folder gets its final name only after everything in it has reached the disk, so every
folder of that name is complete.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from train.errors import InputError

FORMAT = 1
NAME = re.compile(r"step-(\d{8,})")


@dataclass
class State:
    """The counters of a run; the rest of what resumes lives in model, optimizer, data loader and random generators."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # real tokens trained on
    seconds: float = 0.0  # spent in training steps, over all restarts
    first_valid: dict[str, Any] | None = None  # evaluation before the first step
    last_valid: dict[str, Any] | None = None
    wandb_id: str | None = None


class CheckpointError(InputError):
    """A checkpoint cannot be used; the message names the file and the first thing that is wrong."""


def save(
    directory: Path,
    state: State,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data: dict[str, Any],
    model_config: dict[str, Any],
    keep: int,
) -> Path:
    """Write the run state below ``directory``, then delete all but the ``keep`` newest. Returns the folder.

    A step that is on the disk already is left as it is. Raises OSError if the disk is full or refuses.
    """
    final = directory / f"step-{state.step:08d}"
    if final.exists():
        return final
    manifest = {"format": FORMAT, "state": asdict(state), "data": data, "model": model_config}
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    training = {"optimizer": optimizer.state_dict(), "random": random_state()}
    with atomic_directory(final) as folder:
        try:
            save_file(tensors, folder / "model.safetensors")
            torch.save(training, folder / "training.pt")
        except (SafetensorError, RuntimeError) as error:  # neither writer passes on the system's own error
            reason = str(error).splitlines()[0]
            raise OSError(f"{final} cannot be written: {reason}. Is the disk full?") from error
        (folder / "state.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    prune(directory, keep)
    return final


def load(
    folder: Path,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    set_data: Callable[[dict[str, Any]], None],
    model_config: dict[str, Any],
) -> State:
    """Restore everything that ``save`` wrote into the given objects; the counters are returned.

    Raises:
        CheckpointError: the folder is damaged, or belongs to another model; the message names the first difference.
    """
    manifest = _read_manifest(folder)
    difference = first_difference(manifest["model"], model_config)
    if difference:
        raise CheckpointError(
            f"{folder} holds another model: {difference}. Use another run name, or the model it was made with"
        )
    training = _read(folder / "training.pt", lambda path: torch.load(path, map_location="cpu", weights_only=True))
    load_model(folder, model)
    optimizer.load_state_dict(training["optimizer"])
    set_data(manifest["data"])
    set_random_state(training["random"])
    return State(**manifest["state"])


def load_model(folder: Path, model: torch.nn.Module) -> None:
    """Restore parameters and buffers alone. Raises ``CheckpointError`` for other names, shapes or types."""
    tensors = _read(folder / "model.safetensors", load_file)
    _check_tensors(folder, tensors, model.state_dict())
    model.load_state_dict(tensors)


def model_config(folder: Path) -> dict[str, Any]:
    """The configuration of the model in a checkpoint."""
    return _read_manifest(folder)["model"]


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = _complete(directory)
    return found[-1] if found else None


def prune(directory: Path, keep: int) -> None:
    """Delete all but the ``keep`` newest checkpoints, and what an interrupted write left behind."""
    for folder in [*_complete(directory)[:-keep], *directory.glob(".tmp-*")]:
        shutil.rmtree(folder)


@contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """A temporary folder beside ``final`` that takes its name once the block ends well and all is on the disk."""
    assert not final.exists(), f"{final} is complete already; replacing it could not be done whole"
    temporary = final.parent / f".tmp-{final.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in [*temporary.iterdir(), temporary]:
            _fsync(path)
        os.rename(temporary, final)
        _fsync(final.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a small file whole or not at all."""
    temporary = path.with_name(f".tmp-{path.name}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def first_difference(saved: Any, wanted: Any, key: str = "model") -> str | None:
    """Where two plain configurations differ first, in words; None if they are equal."""
    if isinstance(saved, Mapping) and isinstance(wanted, Mapping):
        for name in [*wanted, *(name for name in saved if name not in wanted)]:
            found = first_difference(saved.get(name), wanted.get(name), f"{key}.{name}")
            if found:
                return found
        return None
    return None if saved == wanted else f"{key} is {saved!r} there and {wanted!r} here"


def random_state() -> dict[str, Any]:
    """Every generator a step could draw from, as tensors and plain containers."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Undo what was drawn since ``random_state``."""
    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _complete(directory: Path) -> list[Path]:
    """Checkpoints, oldest first."""
    found = [(int(match[1]), path) for path in directory.glob("step-*") if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _read_manifest(folder: Path) -> dict[str, Any]:
    manifest = _read(folder / "state.json", lambda path: json.loads(path.read_text(encoding="utf-8")))
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has checkpoint format {manifest.get('format')}, this version reads format {FORMAT}"
        )
    return manifest


def _read(path: Path, reader: Callable[[Path], Any]) -> Any:
    """``reader(path)``, with a damaged or missing file reported by name."""
    try:
        return reader(path)
    except (OSError, SafetensorError, RuntimeError, EOFError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    except Exception as error:  # torch.load raises pickle.UnpicklingError for anything but tensors and plain containers
        reason = f"not a plain tensor file ({type(error).__name__})"
    raise CheckpointError(
        f"{path} cannot be read: {reason}. Delete {path.parent} to continue from the checkpoint before it"
    )


def _check_tensors(folder: Path, saved: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    for name in [*wanted, *saved]:
        there, here = saved.get(name), wanted.get(name)
        if there is None or here is None:
            raise CheckpointError(
                f"{folder} holds another model: tensor {name} is only {'here' if there is None else 'there'}"
            )
        if there.shape != here.shape or there.dtype != here.dtype:
            shown = f"{list(there.shape)} {there.dtype} there and {list(here.shape)} {here.dtype} here"
            raise CheckpointError(f"{folder} holds another model: tensor {name} is {shown}")


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
