"""An adapter in `peft`'s format as changes of the weights it belongs to, a few rows at a time: no model is needed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

Change = Callable[[slice, Tensor], Tensor]  # (rows of a weight, what they are) -> what they become

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
BIASES = "router_biases.safetensors"  # beside an adapter whose run moved them; `peft` knows nothing of it
PREFIX = "base_model.model."  # of the names in WEIGHTS
STACK = ("w1", "w2", "w3")  # the weights of stacked experts in the order of their registration
_NAME = re.compile(re.escape(PREFIX) + r"(.+?)((?:\.base_layer)*)\.(lora_A\.weight|lora_embedding_A)")
# Settings under which an adapter is more, or other, than alpha / rank * B A; the values under which it is not.
_PLAIN = {"bias": "none", "fan_in_fan_out": False, "use_rslora": False, "use_dora": False, "lora_bias": False,
          "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None,
          "trainable_token_indices": None}  # fmt: skip


def read_changes(folder: Path) -> dict[str, Change]:
    """Released tensor name -> change, for everything that the adapter in `folder` touches.

    Raises:
        ValueError: it holds no LoRA adapter, or one of a kind that is not known here.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
        biases = load_file(folder / BIASES) if (folder / BIASES).is_file() else {}
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder} holds no adapter that can be read: {error}") from None
    odd = [f"{key} = {config[key]!r}" for key, plain in _PLAIN.items() if config.get(key, plain) not in (plain, None)]
    if config.get("peft_type") != "LORA" or odd:
        raise ValueError(f"{folder} holds no plain LoRA adapter: {', '.join(odd) or config.get('peft_type')}")
    changes = _factor_changes(tensors, config, folder)
    return changes | {name: partial(_replaced, tensor) for name, tensor in biases.items()}


def _factor_changes(tensors: dict[str, Tensor], config: dict[str, Any], folder: Path) -> dict[str, Change]:
    changes, scaling = {}, config["lora_alpha"] / config["r"]
    used = 0
    for key, a in tensors.items():
        if not (match := _NAME.fullmatch(key)):
            continue
        module, depth, kind = match[1], match[2].count("."), match[3]
        b = tensors.get(key.replace("lora_A", "lora_B").replace("lora_embedding_A", "lora_embedding_B"))
        if b is None:
            raise ValueError(f"{folder / WEIGHTS} has {key} without its other factor")
        used += 2
        if kind == "lora_embedding_A":
            changes[f"{module}.weight"] = partial(_added, a.t(), b.t(), scaling)
        elif module.endswith(".experts"):
            # `peft` wraps the weights of a stack one around the other, the first registered one innermost.
            named = {name.rpartition(".")[2] for name in config["target_parameters"]}
            weight = [name for name in reversed(STACK) if name in named][depth]
            experts = a.shape[0] // config["r"]
            for expert in range(experts):
                own_a = a.unflatten(0, (experts, -1))[expert]
                own_b = b.unflatten(1, (-1, experts))[:, :, expert]
                changes[f"{module}.{expert}.{weight}.weight"] = partial(_added, own_b, own_a, scaling)
        else:
            changes[f"{module}.weight"] = partial(_added, b, a, scaling)
    if used < len(tensors):
        unknown = next(key for key in tensors if not re.search(r"\.lora_(embedding_)?[AB]", key))
        raise ValueError(f"{folder / WEIGHTS} has {unknown}, which is no factor of a weight")
    return changes


def _added(b: Tensor, a: Tensor, scaling: float, rows: slice, block: Tensor) -> Tensor:
    return block.float() + scaling * (b[rows].float() @ a.float())


def _replaced(tensor: Tensor, rows: slice, block: Tensor) -> Tensor:
    return tensor[rows]
