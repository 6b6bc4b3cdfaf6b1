"""Writes an adapter for serving engines, next to its packed base model, and reports what a merge has rounded away.

Engines add the factors of an adapter to the products of quantised weights, so nothing of the change is rounded. Engines
require one pair of factors for each expert, and add factors only in layers that they call as linear layers. The tensor
names and these layers follow vLLM's language model (`vllm/models/deepseek_v41`, September 2026); see docs/one-node.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from model.checkpoint.convert import Arrived
from train.lora.peft_format import CONFIG, PREFIX, WEIGHTS, Adapter
from train.lora.targets import LORA_TARGETS

BASE, ADAPTER = "base", "adapter"  # the two folders that `task=convert keep=true` writes
LITTLE = 0.5  # a part of a merge below this share is warned about

# vLLM multiplies by the packed weight of wo_a itself, and does not add the factors of an adapter there.
_SERVED = re.compile(
    r"layers\.\d+\.(attn\.(wq_a|wq_b|wkv|wo_b)|ffn\.shared_experts\.w[123]|ffn\.experts\.\d+\.w[123])\.weight"
)


def split_for_serving(adapter: Adapter) -> tuple[Adapter, Adapter]:
    """Split an adapter into the part that serving engines add to packed weights, and the rest, which must be merged."""
    beside = {name: pair for name, pair in adapter.factors.items() if _SERVED.fullmatch(name)}
    rest = {name: pair for name, pair in adapter.factors.items() if name not in beside}
    return adapter._replace(factors=beside, biases={}), adapter._replace(factors=rest)


def write_for_serving(adapter: Adapter, folder: Path, base: str) -> None:
    """Write an adapter with one pair of factors A [rank, in] and B [out, rank] for each matrix of the released layout.

    base: the name of the checkpoint that the adapter belongs to, for the adapter's configuration.
    """
    folder.mkdir()
    tensors = {}
    for name, (b, a) in adapter.factors.items():
        module = PREFIX + name.removesuffix(".weight")
        tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = (
            part.clone(memory_format=torch.contiguous_format) for part in (a, b)
        )
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.config["r"],
        "lora_alpha": adapter.config["lora_alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({name.split(".")[-2] for name in adapter.factors}),
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def link_folder(src: Path, dst: Path) -> int:
    """Make a folder with the files of the checkpoint folder ``src``, as hard links if the file system allows it and as
    copies otherwise. Returns the size of the weights in bytes.
    """
    dst.mkdir()
    files = [path for path in src.iterdir() if path.is_file()]
    for path in files:
        try:
            os.link(path.resolve(), dst / path.name)
        except OSError:
            shutil.copyfile(path, dst / path.name)
    return sum(path.stat().st_size for path in files if path.suffix == ".safetensors")


def part_of(name: str) -> str:
    """Return the part of the model that a released tensor belongs to, named as in ``lora.targets``."""
    module = name.removesuffix(".weight")
    found = (part for part, pattern in LORA_TARGETS.items() if re.fullmatch(rf"({pattern})(\.\d+\.w[123])?", module))
    return next(found, "router biases" if ".gate.bias" in name else "other")


def merge_report(arrived: Mapping[str, Arrived]) -> list[str]:
    """Return lines that say, for each part of the model, how much of an adapter's change the stored weights contain,
    and a warning about parts that contain little of it.
    """
    parts: dict[str, Arrived] = defaultdict(Arrived)
    for name, one in arrived.items():
        parts[part_of(name)] += one
    if not parts:
        return []
    width = max(map(len, parts))
    lines = ["what the stored weights keep of the adapter (norm of the stored change; its length along the change):"]
    lines += [f"  {part:{width}} {one.norm_share:8.1%} {one.along_share:8.1%}" for part, one in parts.items()]
    if lost := [part for part, one in parts.items() if one.along_share < LITTLE]:
        lines.append(
            f"warning: rounding takes more than half of the adapter's change of {', '.join(lost)}; the merged model "
            "may answer like its base. Keep the adapter beside the packed base instead: task=convert src=BASE "
            "adapter=ADAPTER dst=NEW_FOLDER format=released keep=true"
        )
    return lines
