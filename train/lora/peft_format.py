"""Reads a LoRA adapter in `peft`'s format as changes to weights, which can be applied to a few rows at a time.

With this module, an adapter can be merged into a checkpoint on disk without building the model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from model.checkpoint.convert import Change
from model.checkpoint.names import MERGED

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
BIASES = "router_biases.safetensors"  # router biases, if the LoRA run updated them; `peft` ignores this file
PREFIX = "base_model.model."  # of names in WEIGHTS; followed by "model." if `peft` wrapped the transformers class
STACK = ("w1", "w2", "w3")  # the weights of stacked experts, in registration order
_NAME = re.compile(re.escape(PREFIX) + r"(?:model\.)?(.+?)((?:\.base_layer)*)\.(lora_A\.weight|lora_embedding_A)")
# Settings that a plain adapter (alpha / rank * B A added to unchanged weights) may have. All others must be off.
_USUAL = {
    *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "init_lora_weights", "target_modules", "target_parameters"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size"),
}
# Values of init_lora_weights; all other values change the base weights
_KEEP_THE_BASE = (None, True, False, "gaussian", "orthogonal", "eva")


class Adapter(NamedTuple):
    """An adapter that has been read: the factors (B, A) of each tensor that it changes, by released tensor name; the
    new router biases, if it has any; and its configuration. The change of a tensor is `scaling` * B A.
    """

    factors: dict[str, tuple[Tensor, Tensor]]
    biases: dict[str, Tensor]
    config: dict[str, Any]

    @property
    def scaling(self) -> float:
        return self.config["lora_alpha"] / self.config["r"]

    def changes(self) -> dict[str, Change]:
        """The change of each tensor that the adapter changes, by the tensor's name in the released checkpoint."""
        added = {name: _added(b, a, self.scaling) for name, (b, a) in self.factors.items()}
        return added | {name: Change(tuple(t.shape), partial(_replaced, t)) for name, t in self.biases.items()}


def read_changes(folder: Path, experts: int) -> dict[str, Change]:
    """Read the adapter in `folder` as the change of each tensor; see `read_adapter`."""
    return read_adapter(folder, experts).changes()


def read_adapter(folder: Path, experts: int) -> Adapter:
    """Read the adapter in `folder`.

    experts: number of routed experts in each layer of the model.

    Raises:
        ValueError: the folder holds no LoRA adapter, an unsupported kind of adapter, or a damaged one.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
        biases = load_file(folder / BIASES) if (folder / BIASES).is_file() else {}
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder} does not hold a readable LoRA adapter: {error}") from None
    if odd := list(_oddities(config)):
        raise ValueError(f"{folder / CONFIG} is not the configuration of a plain LoRA adapter: {', '.join(odd)}")
    for name, tensor in (tensors | biases).items():
        if not tensor.isfinite().all():
            raise ValueError(f"{folder}: tensor {name} has a NaN or infinite value")
    try:
        return Adapter(dict(_factors(tensors, config, experts)), biases, config)
    except ValueError as error:
        raise ValueError(f"{folder / WEIGHTS}: {error}") from None


def merged_record(adapter: Path, base: Path) -> str:
    """Return the content of the file that lists the adapters merged into a checkpoint, with `adapter` added to it.

    Raises:
        ValueError: the adapter is already merged into the checkpoint `base`.
    """
    with (adapter / WEIGHTS).open("rb") as file:
        digest = hashlib.file_digest(file, "blake2b").hexdigest()[:32]
    path = base / MERGED
    merged = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    if digest in merged:
        raise ValueError(
            f"the adapter in {adapter} has already been merged into {base} ({path.name} names it); a second merge "
            "would apply it twice. Name the checkpoint that the adapter was trained on"
        )
    return json.dumps([*merged, digest], indent=2) + "\n"


def _oddities(config: Any) -> Iterator[str]:
    """Yield the reasons why an adapter with this configuration is not a plain LoRA adapter."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        yield "peft_type is not LORA"
        return
    rank, alpha, start = config.get("r"), config.get("lora_alpha"), config.get("init_lora_weights")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        yield f"r = {rank!r}, lora_alpha = {alpha!r}"
    if start not in _KEEP_THE_BASE:
        yield f"init_lora_weights = {start!r}"
    for key, value in config.items():
        if key not in _USUAL and value not in (None, False, {}, [], "none"):
            yield f"{key} = {value!r}"


def _factors(
    tensors: dict[str, Tensor], config: dict[str, Any], experts: int
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    rank = config["r"]
    left = dict(tensors)
    for key in tensors:
        if not (match := _NAME.fullmatch(key)):
            continue
        module, depth, embedding = match[1], match[2].count("."), match[3] == "lora_embedding_A"
        other = key.replace("lora_A", "lora_B").replace("lora_embedding_A", "lora_embedding_B")
        a, b = left.pop(key), left.pop(other, None)
        if b is None:
            raise ValueError(f"factor {key} has no matching factor {other}")
        count = experts if module.endswith(".experts") else 1
        if a.dim() != 2 or b.dim() != 2 or not rank * count == a.shape[0] == b.shape[1]:
            wanted = f"[{rank * count}, in] and [out, {rank * count}]"
            raise ValueError(f"the factors of {module} are {list(a.shape)} and {list(b.shape)}, must be {wanted}")
        if embedding:
            yield f"{module}.weight", (a.t(), b.t())
        elif not module.endswith(".experts"):
            yield f"{module}.weight", (b, a)
        else:
            weight = _stacked(module, depth, config.get("target_parameters") or [])
            for expert in range(experts):
                own_a, own_b = a.unflatten(0, (experts, -1))[expert], b.unflatten(1, (-1, experts))[:, :, expert]
                yield f"{module}.{expert}.{weight}.weight", (own_b, own_a)
    if left:
        raise ValueError(f"tensor {min(left)} is not a LoRA factor, or its matching factor is missing")


def _stacked(module: str, depth: int, targets: list[str]) -> str:
    """Return which weight of stacked experts (w1, w2 or w3) a LoRA wrapper belongs to.

    `peft` nests the wrappers of the weights that `target_parameters` names; w1 is innermost. depth: nesting depth of
    the wrapper, counted from the outermost one.
    """
    named = [w for w in STACK if any(f".model.{module}.{w}".endswith(f".{target}") for target in targets)]
    if depth >= len(named):
        raise ValueError(f"{CONFIG} does not name the weights of {module} under target_parameters")
    return named[-1 - depth]


def _added(b: Tensor, a: Tensor, scaling: float) -> Change:
    def apply(rows: slice, block: Tensor) -> Tensor:
        return block.float() + scaling * (b[rows].float() @ a.float())

    return Change((len(b), a.shape[1]), apply)


def _replaced(tensor: Tensor, rows: slice, block: Tensor) -> Tensor:
    return tensor[rows]
