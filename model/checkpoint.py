"""Checkpoints in the released layout: names, shards, index.

Our parameter names are the released ones except that a layer's experts are stacked and an mHC mix is a submodule.
Reading is strict: a missing, extra or mis-shaped tensor is named before anything is used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from model.backbone import DeepseekV41, allocate_model
from model.config import ModelConfig, Runtime
from model.engram import build_token_map

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_STACKED = re.compile(r"(.*\.experts)\.(w[123])")
_MIX = re.compile(r"(.*)\.hc_(attn|ffn)\.(fn|base|scale)")


def released_names(name: str, shape: torch.Size) -> list[str]:
    """Released tensor names of one of our tensors; one per expert for stacked experts."""
    if match := _STACKED.fullmatch(name):
        return [f"{match[1]}.{expert}.{match[2]}.weight" for expert in range(shape[0])]
    if match := _MIX.fullmatch(name):
        return [f"{match[1]}.hc_{match[2]}_{match[3]}"]
    return [name]


def load_pretrained(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    runtime: Runtime | None = None,
) -> DeepseekV41:
    """Load a checkpoint folder: config.json, safetensors in the released names (bf16 or fp32), tokenizer.json if it
    has Engram layers.

    Raises FileNotFoundError for a missing file and ValueError that lists every missing, extra or mis-shaped tensor.
    Drafter tensors (`mtp.*`) are left out: the drafter is not part of this model.
    """
    folder = Path(folder)
    config = ModelConfig.load(folder)
    token_map = None
    if config.text.engram_layer_ids:
        token_map = build_token_map(_tokenizer(folder))
    model = allocate_model(config, runtime, token_map, device, dtype)
    load_weights(model, folder)
    return model


@torch.no_grad()
def load_weights(model: DeepseekV41, folder: str | Path) -> None:
    """Copy a folder's tensors into `model`, one at a time. Nothing is copied unless names and shapes agree
    completely.
    """
    files = _tensor_files(Path(folder))
    targets = {}
    for name, tensor in _state(model):
        names = released_names(name, tensor.shape)
        parts = tensor.unbind(0) if len(names) > 1 or _STACKED.fullmatch(name) else [tensor]
        targets.update(zip(names, parts, strict=True))
    problems = [f"missing: {name} {list(t.shape)}" for name, t in targets.items() if name not in files]
    problems += [f"extra: {name}" for name in files if name not in targets and not name.startswith("mtp.")]
    problems += _shape_problems(files, targets)
    if problems:
        shown = "\n  ".join(problems[:20]) + (f"\n  and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise ValueError(f"{folder} does not hold this model:\n  {shown}")
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():
                if name in targets:
                    targets[name].copy_(shard.get_tensor(name))


def save_pretrained(
    model: DeepseekV41,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 4 * 2**30,
) -> None:
    """Write config.json, safetensors shards with an index, and tokenizer.json; the folder appears whole or not at all.

    `dtype` casts matrices and embeddings (None keeps them); what the report keeps in fp32 stays fp32. An existing
    folder is replaced.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(model, work, dtype, shard_bytes)
        if tokenizer is not None:
            tokenizer.save(str(work / "tokenizer.json"))
        (work / "config.json").write_text(json.dumps(model.config.to_dict(), indent=2) + "\n", encoding="utf-8")
        os.chmod(work, 0o755)
        if folder.exists():
            old = work.with_name(work.name + "-old")
            folder.rename(old)
            work.rename(folder)
            shutil.rmtree(old)
        else:
            work.rename(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _write(model: DeepseekV41, folder: Path, dtype: torch.dtype | None, shard_bytes: int) -> None:
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    held = total = 0

    def flush() -> None:
        nonlocal pending, held
        if pending:
            save_file(pending, folder / f"part-{len(shards):05d}", metadata={"format": "pt"})
            shards.append(list(pending))
            pending, held = {}, 0

    for name, tensor in _released_tensors(model, dtype):
        size = tensor.numel() * tensor.element_size()
        if held + size > shard_bytes:
            flush()
        pending[name] = tensor
        held += size
        total += size
    flush()
    if len(shards) == 1:
        (folder / "part-00000").rename(folder / SINGLE)
        return
    where = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number:05d}").rename(folder / file)
        where.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _released_tensors(model: DeepseekV41, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in _state(model):
        keep = dtype is None or tensor.dim() < 2 or ".hc_" in name
        tensor = tensor.detach() if keep else tensor.detach().to(dtype)
        names = released_names(name, tensor.shape)
        parts = tensor.unbind(0) if _STACKED.fullmatch(name) else [tensor]
        for released, part in zip(names, parts, strict=True):
            yield released, part.contiguous().cpu().clone()


def _state(model: DeepseekV41) -> Iterator[tuple[str, Tensor]]:
    return iter(model.state_dict(keep_vars=True).items())


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file that holds it, from the index or the single file, checked against the files' own headers."""
    index = folder / INDEX
    if index.is_file():
        listed = {
            name: folder / file for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
        }
        paths = sorted(set(listed.values()))
    elif (folder / SINGLE).is_file():
        listed, paths = None, [folder / SINGLE]
    else:
        raise FileNotFoundError(f"{folder} holds neither {INDEX} nor {SINGLE}")
    found: dict[str, Path] = {}
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{index} names {path.name}, which does not exist")
        try:
            with safe_open(path, framework="pt") as shard:
                found.update(dict.fromkeys(shard.keys(), path))
        except SafetensorError as error:
            raise ValueError(f"{path} is no complete safetensors file: {error}") from None
    for name in listed or ():
        if found.get(name) != listed[name]:
            raise ValueError(f"{index} places {name} in {listed[name].name}, which does not hold it")
    return found


def _shape_problems(files: dict[str, Path], targets: dict[str, Tensor]) -> list[str]:
    problems = []
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():
                if name not in targets:
                    continue
                piece = shard.get_slice(name)
                if list(piece.get_shape()) != list(targets[name].shape):
                    problems.append(f"shape: {name} is {piece.get_shape()}, must be {list(targets[name].shape)}")
                if piece.get_dtype() not in ("F32", "BF16", "F16"):
                    problems.append(f"type: {name} is {piece.get_dtype()}, must be F32, BF16 or F16")
    return problems


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; a model with Engram layers needs its tokenizer to compress token ids"
        )
    return Tokenizer.from_file(str(path))
