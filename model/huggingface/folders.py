"""Handles the folders and options that `from_pretrained` and `save_pretrained` receive."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from model.backbone import DeepseekV41
from model.build import build_model
from model.checkpoint.names import own_state
from model.checkpoint.released import is_quantised
from model.config import ForwardOptions, ModelConfig
from model.engram import build_token_map
from model.huggingface.configuration import DeepseekV41Config

# Options that transformers passes and that have no effect on this model.
IGNORED = {
    "_from_auto",
    "adapter_kwargs",
    "attn_implementation",
    "code_revision",
    "ignore_mismatched_sizes",
    "offload_state_dict",
    "low_cpu_mem_usage",
    "trust_remote_code",
    "use_safetensors",
    "weights_only",
}
_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def local_folder(name: str | os.PathLike, options: dict[str, Any]) -> Path:
    """Returns the local folder of a checkpoint. If there is no folder called `name`, the checkpoint is downloaded from
    the Hugging Face hub. The options for the hub (such as `revision`) are removed from `options`.
    """
    hub = {key: options.pop(key) for key in _HUB if key in options}
    options = {key: value for key, value in hub.items() if value not in (None, "")}
    if not Path(name).is_dir():
        from huggingface_hub import snapshot_download

        subfolder, wanted = options.pop("subfolder", ""), ["*.json", "*.safetensors", "*.jinja"]
        return Path(snapshot_download(str(name), allow_patterns=wanted, **options)) / subfolder
    return Path(name) / options.get("subfolder", "")


def bytes_of(size: int | str) -> int:
    """Returns the number of bytes that an integer or a string such as "5GB" stands for. Raises ValueError for any other
    string.
    """
    if isinstance(size, int):
        return size
    if match := re.fullmatch(r"(\d+) ?([KMGT])B", size.upper()):
        return int(match[1]) * 1000 ** (" KMGT".index(match[2]))
    raise ValueError(f"max_shard_size={size!r}: must be a number of bytes or a string like '5GB'")


def read_config(folder: Path) -> dict[str, Any]:
    ModelConfig.load(folder)  # names the file in its errors
    return PreTrainedConfig._dict_from_json_file(folder / "config.json")


def dtype_of(wanted: torch.dtype | str | None, config: DeepseekV41Config) -> torch.dtype:
    if wanted in (None, "auto"):
        quantised = is_quantised(config.to_dict())
        wanted = "bfloat16" if quantised else (config.dtype or "float32")
    return getattr(torch, wanted) if isinstance(wanted, str) else wanted


def device_of(device_map: Any) -> torch.device:
    if isinstance(device_map, dict) and set(device_map) == {""}:
        device_map = device_map[""]
    if device_map is None:
        return torch.device("cpu")
    if not isinstance(device_map, (str, int, torch.device)):
        raise ValueError(f"device_map={device_map!r}: must be one device or 'auto'")
    return torch.device(device_map)


def new_model(config: ModelConfig, runtime: ForwardOptions | None, tokenizer: Any) -> DeepseekV41:
    token_map = None
    if config.text.engram_layer_ids:
        if tokenizer is None:
            raise ValueError("a new model with Engram layers needs its tokenizer: from_config(config, tokenizer=...)")
        token_map = build_token_map(getattr(tokenizer, "backend_tokenizer", tokenizer))
    return build_model(config, runtime, token_map, torch.initial_seed() % 2**31, dtype=torch.get_default_dtype())


def rename_released(module: torch.nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """A hook that runs before `load_state_dict`. The hook renames the tensors in `state` from their names in the
    released safetensors files to their names in this model's state dict.
    """
    if prefix or not any(name in state for name in ("embed.weight", "head.weight")):
        return
    for name, tensor in own_state({name: state.pop(name) for name in list(state)}).items():
        state[f"model.{name}"] = tensor
