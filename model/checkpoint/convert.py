"""Rewriting a checkpoint folder in another format, without building the model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from model.build import allocate_model
from model.checkpoint.load import open_checkpoint
from model.checkpoint.names import COMPANIONS, released_tensors
from model.checkpoint.released import TensorSource, is_quantised
from model.checkpoint.save import SHARD_BYTES, whole_folder, write_checkpoint
from model.config import ModelConfig


class Change(NamedTuple):
    """What a tensor of this shape becomes: `apply(rows, block)` returns the new values of these rows, given the old
    ones.
    """

    shape: tuple[int, ...]
    apply: Callable[[slice, Tensor], Tensor]


def convert_checkpoint(
    src: str | Path,
    dst: str | Path,
    format: Literal["bf16", "plain", "released"],
    shard_bytes: int = SHARD_BYTES,
    changes: Mapping[str, Change] | None = None,
    replace: bool = False,
    files: Mapping[str, str] | None = None,
) -> int:
    """Rewrite a checkpoint folder in another format, without building the model. Returns the bytes of all tensors.

    "bf16" unpacks the weights of a quantised folder (the rest stays as stored), and casts the matrices of a plain one.
    "plain" gives fp32 matrices.
    "released" quantises; the rest stays as stored. Drafter tensors come along, and so do the tokenizer's files.
    `changes`: by tensor name. `files`: texts of small files to write beside the weights. Raises what `load_pretrained`
    raises; ValueError if `dst` exists (unless `replace`), or for a change of a tensor that is not there or has another
    shape.
    """
    src, dst = Path(src), Path(dst)
    if format not in ("bf16", "plain", "released"):
        raise ValueError(f"format: {format!r} is unknown, allowed are 'bf16', 'plain' and 'released'")
    if dst.exists() and not replace:
        raise ValueError(f"{dst} exists already; name a new folder")
    config = ModelConfig.load(src)
    skeleton = allocate_model(config, None, None, "meta", torch.float32)
    with open_checkpoint(src, config, list(released_tensors(skeleton))) as sources, whole_folder(dst) as work:
        if changes:
            sources = _changed(sources, changes)
        with_scales = {source.name for source in sources if source.scales is not None}
        dtype = torch.bfloat16 if format == "bf16" and not is_quantised(config.to_dict()) else None
        dtype = torch.float32 if format == "plain" else dtype
        layout = "released" if format == "released" else "plain"
        total = write_checkpoint(work, sources, with_scales, config, layout, dtype, shard_bytes)
        for name in COMPANIONS:
            if (src / name).is_file():
                shutil.copyfile(src / name, work / name)
        for name, text in (files or {}).items():
            (work / name).write_text(text, encoding="utf-8")
    return total


def _changed(sources: list[TensorSource], changes: Mapping[str, Change]) -> list[TensorSource]:
    """The same tensors with some of them changed; the scales of those are no longer valid."""
    shapes = {source.name: source.shape for source in sources}
    for name, change in changes.items():
        if name not in shapes:
            raise ValueError(f"the checkpoint has no tensor {name} to change")
        if change.shape != shapes[name]:
            raise ValueError(f"{name} is {list(shapes[name])}, its change is for {list(change.shape)}")

    def blocks(source: TensorSource) -> Iterator[Tensor]:
        row = source.start
        for block in source.blocks():
            yield changes[source.name].apply(slice(row, row + len(block)), block).to(block.dtype)
            row += len(block)

    return [
        source._replace(blocks=partial(blocks, source), scales=None) if source.name in changes else source
        for source in sources
    ]
