"""``init_from``: start a run from the weights, the model configuration and the tokenizer of a checkpoint.

``init_from`` may name a checkpoint folder in the released layout (``config.json``, safetensors, ``tokenizer.json``), a
run directory, or one of the checkpoints of a run. The weights of a checkpoint folder may be quantised. The folder
``export`` of a finished run is a checkpoint folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from data.progress import progress
from model import ForwardOptions, ModelConfig, load_weights, open_folder
from model.checkpoint.load import never_packed, parameter_packing
from model.checkpoint.released import TensorSource, is_quantised, read_headers
from model.quantize import Packing
from train.checkpoint import run_state

# The options of the forward pass that change what a model computes, and not only how.
CHANGE_RESULTS = (
    "kv_quant",
    "expert_quant",
    "dense_quant",
    "engram_quant",
    "candidate_pool",
    "decoder_replay",
    "stream_dtype",
    "dispatch",
)


@dataclass(frozen=True)
class Pretrained:
    """A checkpoint to start from: its folder, its model configuration and its tokenizer file."""

    folder: Path
    model: dict[str, Any]
    tokenizer: Path

    def tokens(self) -> dict[str, Any]:
        """The parts of the tokenizer file that determine the token ids of a text.

        The post-processor is left out, since an exported tokenizer has one and the tokenizer file of a run has none.
        """
        return token_parts(self.tokenizer.read_text(encoding="utf-8"))


def token_parts(tokenizer: str) -> dict[str, Any]:
    """Return the parts of a tokenizer, given as JSON, that determine the token ids of a text."""
    found = json.loads(tokenizer)
    return {key: found.get(key) for key in ("model", "added_tokens", "normalizer", "pre_tokenizer")}


def find_pretrained(name: str) -> Pretrained:
    """Find the checkpoint that ``init_from`` names. Only the small files of the checkpoint are read, not the weights.

    Raises:
        ValueError: ``name`` is not a checkpoint, the checkpoint is incomplete, or its configuration cannot be used.
    """
    folder = Path(name).expanduser()
    newest = run_state.latest(folder / "checkpoints")
    if _is_released(folder):
        model, tokenizer = ModelConfig.load(folder).to_dict(), folder / "tokenizer.json"
    elif newest or (folder / "state.json").is_file():
        folder = newest or folder
        run = folder.resolve().parent.parent
        if part := _part_alone(run):
            raise ValueError(
                f"{folder} holds only {part}, without the model it belongs to; name the run's export, {run / 'export'}"
            )
        model, tokenizer = run_state.model_config(folder), run / "tokenizer.json"
    else:
        what = "holds neither config.json nor state.json" if folder.is_dir() else "is not a folder"
        raise ValueError(f"{folder} {what}; name a checkpoint folder, a run directory or one of its checkpoints")
    if not tokenizer.is_file():
        raise ValueError(f"{tokenizer} does not exist; a run needs the tokenizer that the weights were trained with")
    return Pretrained(folder, model, tokenizer)


def forward_options(origin: Pretrained) -> ForwardOptions | None:
    """Return the options of the forward pass with which the run of a checkpoint was trained. The result is None, which
    stands for the defaults, for a checkpoint folder such as an export, because such a folder does not store these
    options.
    """
    config = origin.folder.resolve().parent.parent / "config.yaml"
    if _is_released(origin.folder) or not config.is_file():
        return None
    saved = yaml.safe_load(config.read_text(encoding="utf-8")).get("runtime") or {}
    return ForwardOptions(**{name: saved[name] for name in CHANGE_RESULTS if name in saved})


def load_pretrained_weights(model: torch.nn.Module, name: str) -> Path:
    """Copy the weights of the checkpoint that ``init_from`` names into ``model``. Returns the checkpoint's folder.

    Raises:
        ValueError: tensors are missing or unknown, or have another shape or type than in ``model``; the message names
            them.
    """
    folder = find_pretrained(name).folder
    if not _is_released(folder):
        run_state.load_model(folder, model)
        return folder
    try:
        with progress("loading weights", 1.0, shared=True) as done:
            load_weights(model, folder, done=done)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    return folder


def frozen_packing(origin: Pretrained, frozen: str) -> Callable[[str], Packing | None]:
    """Return a function that says, for each parameter, in which packed format its frozen weights stay in memory (None:
    not packed).

    Weights stay packed if ``frozen`` (``runtime.frozen``) is "packed" and the checkpoint stores them quantised.
    """
    packed = frozen == "packed" and _is_released(origin.folder) and is_quantised(origin.model)
    return parameter_packing if packed else never_packed


def holds_drafter(folder: Path) -> bool:
    """Return whether a checkpoint folder also holds the weights of a drafter."""
    return _is_released(folder) and any(name.startswith("mtp.") for name in read_headers(folder))


@contextmanager
def open_pretrained(origin: Pretrained) -> Iterator[Mapping[str, TensorSource]]:
    """Open the tensors of a checkpoint by their released names, in the order of the model.

    The values of a tensor are read a few rows at a time.

    Raises:
        ValueError: tensors are missing or unknown, or have another shape or type than the checkpoint's configuration
            says; the message names them.
    """
    with open_folder(origin.folder) if _is_released(origin.folder) else run_state.open_model(origin.folder) as tensors:
        yield tensors


def _part_alone(run: Path) -> str | None:
    """Return "a drafter" or "an adapter" if the run's checkpoints contain only a drafter or an adapter, without the
    base weights; otherwise None.
    """
    path = run / "config.yaml"
    settings = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if settings.get("dspark"):
        return "a drafter"
    return "an adapter" if settings.get("lora", {}).get("targets") else None


def _is_released(folder: Path) -> bool:
    return (folder / "config.json").is_file()
