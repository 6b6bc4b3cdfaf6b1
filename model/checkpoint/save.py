"""Writes a checkpoint folder atomically: either completely or not at all.

Tensors are written block by block, so that memory holds only a few blocks besides the model. If a model is split over
processes, each process writes its own experts and rows; the resulting folder equals the one that a single process would
write.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from model.backbone import DeepseekV41
from model.checkpoint.names import GENERATION, SCALES, TensorShard, released_tensors
from model.checkpoint.released import (
    QUANTIZATION,
    Stored,
    TensorSource,
    packed,
    packing_of,
    row_blocks,
    scale_name,
    tile_span,
    write_files,
    write_shards,
)
from model.config import ModelConfig
from model.engram import engram_tables
from model.packed import PackedWeight
from model.parallel.collective_errors import all_or_none, gather_objects
from model.parallel.exchange import exchange
from model.parallel.ranks import ONE_RANK, RankGroup, row_shard
from model.quantize import Packing

SHARD_BYTES = 4 * 2**30


def save_pretrained(
    model: DeepseekV41,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    format: Literal["plain", "released"] = "plain",
    companions: Mapping[str, str] | None = None,
    ranks: RankGroup = ONE_RANK,
    drafter: nn.Module | None = None,
) -> None:
    """Write a checkpoint folder with config.json, safetensors shards with an index, and tokenizer.json. The folder is
    written completely or not at all. The tensors of `drafter` are written with those of the model, under the names
    `mtp.*`.

    `companions` maps the names of further files that other programs expect in the folder (see `data.tokenizer_files`)
    to their texts.

    `format="released"` quantises the weights that are quantised in the released checkpoint. `dtype`: the dtype that
    other matrices and embeddings are cast to (None: not cast); parameters that the V4.1 report keeps in fp32 stay fp32.
    An existing folder is replaced. Raises ValueError for a weight that cannot be quantised because a value is not
    finite, and for a model with an adapter, because the released layout has no tensors for an adapter.

    `ranks`: the processes that write together, which must be all processes of the run and must see the same file
    system. If one of them fails, all raise an error.
    """
    scales = {**getattr(model, "released_scales", {}), **getattr(drafter, "released_scales", {})}

    def source(part: TensorShard) -> TensorSource:
        if not part.written_by(ranks):
            return TensorSource(part.name, part.shape, part.dtype, lambda: iter(()))
        stored = (lambda: scales[part.name]) if part.name in scales else None
        if isinstance(part.tensor, PackedWeight):
            stored = partial(getattr, part.tensor, "scale")
        return TensorSource(part.name, part.shape, part.dtype, partial(_blocks, part.tensor), stored, part.start)

    held = [*released_tensors(model), *(() if drafter is None else released_tensors(drafter))]
    if adapter := next((part.name for part in held if ".lora_" in part.name), None):
        raise ValueError(
            f"the model has an adapter ({adapter}); merge it into the weights first, or save only the adapter"
        )
    spread = max(part.copies.size for part in held)
    if ranks.size % spread:
        raise ValueError(
            f"the model is split over {spread} processes, so all of these must save it together, not {ranks.size}"
        )
    held = [_whole(part, ranks) if part.divided else part for part in held]
    with_scales = _kept_anywhere(held, scales, ranks) if format == "plain" else ()
    with whole_folder(Path(folder), ranks) as work:
        write_checkpoint(
            work, [source(part) for part in held], with_scales, model.config, format, dtype, shard_bytes, ranks
        )
        if ranks.rank == 0:
            if tokenizer is not None:
                tokenizer.save(str(work / "tokenizer.json"))
            for name, text in (companions or {}).items():
                (work / name).write_text(text, encoding="utf-8")


def _whole(part: TensorShard, ranks: RankGroup) -> TensorShard:
    """Gather a matrix whose rows are split over several processes on the process that writes it. Quantisation needs
    whole tiles, and one tile can have rows on two processes. All `ranks` must call this function together; the matrices
    are distributed evenly over them.
    """
    assert part.tensor is not None, "every process has a tensor, which may be empty, of a row-divided matrix"
    keepers, writer = part.copies, part.number % ranks.size
    whole = None
    if writer // keepers.size == ranks.rank // keepers.size:
        shards = [row_shard(part.shape[0], replace(keepers, rank=rank)) for rank in range(keepers.size)]
        mine = writer == ranks.rank
        receive = [len(shard) * mine for shard in shards]
        send = [part.tensor.shape[0] * (rank == writer % keepers.size) for rank in range(keepers.size)]
        (whole,) = exchange((part.tensor,), send, receive, keepers)
    tensor = whole if writer == ranks.rank else None
    return part._replace(tensor=tensor, start=0, copies=RankGroup(size=ranks.size))


def _kept_anywhere(held: list[TensorShard], scales: Mapping[str, Tensor], ranks: RankGroup) -> set[str]:
    """The names of the weights whose loaded quantisation scales are available on every process that holds a part of the
    weight.
    """
    here = [part for part in held if part.tensor is not None and packing_of(part.name)]
    stored = {part.name for part in here if isinstance(part.tensor, PackedWeight)} | scales.keys()
    found = gather_objects((bool(stored), [part.name for part in here if part.name not in stored]), ranks)
    if not any(some for some, _ in found):
        return set()
    lacking = {name for _, names in found for name in names}
    return {part.name for part in held if packing_of(part.name) and part.name not in lacking}


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    for rows in row_blocks(tuple(tensor.shape)):
        block = tensor[rows].detach()
        yield block.values() if isinstance(block, PackedWeight) else block


def write_checkpoint(
    folder: Path,
    sources: Iterable[TensorSource],
    with_scales: Container[str],
    config: ModelConfig,
    format: str,
    dtype: torch.dtype | None,
    shard_bytes: int,
    ranks: RankGroup = ONE_RANK,
) -> int:
    """Write config.json and the tensors into a folder, in the formats of `save_pretrained`. Returns the total size of
    all tensors in bytes. `with_scales`: the names of the weights whose loaded quantisation scales are also written, if
    the folder is plain.
    """
    if format not in ("plain", "released"):
        raise ValueError(f"format: {format!r} is unknown, allowed are 'plain' and 'released'")
    bundles, scales, plain = [], [], torch.float32
    for source in sources:
        packing = packing_of(source.name)
        if format == "released" and packing is not None:
            bundles.append(packed(source, packing))
            continue
        keep = dtype is None or len(source.shape) < 2 or ".hc_" in source.name
        stored = _cast(source, source.dtype if keep else dtype)
        bundles.append([stored])
        if source.name == "embed.weight":
            plain = stored.dtype
        if source.name in with_scales and packing is not None:
            scales.append(_kept_scales(source, packing))
    total = write_shards(folder, bundles, shard_bytes, ranks)
    if scales:
        write_files({folder / SCALES: scales}, ranks)
    if ranks.rank == 0:
        _write_json(folder / "config.json", _written_config(config, format, plain))
        ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(folder / GENERATION, ids)
    return total


def _cast(source: TensorSource, dtype: torch.dtype) -> Stored:
    def blocks() -> Iterator[Tensor]:
        for block in source.blocks():
            block = block.to(dtype)
            if source.stored_as is not None:
                source.stored_as(block)
            yield block

    return Stored(source.name, source.shape, dtype, blocks, source.start)


def _kept_scales(source: TensorSource, packing: Packing) -> Stored:
    def blocks() -> Iterator[Tensor]:
        if source.scales is not None:  # otherwise another process writes the scales
            yield source.scales()

    first = tile_span(slice(source.start, source.start), packing).start
    return Stored(scale_name(source.name), packing.scale_shape(*source.shape), torch.float8_e8m0fnu, blocks, first)


def _written_config(config: ModelConfig, format: str, dtype: torch.dtype) -> dict[str, Any]:
    """The content of config.json for a folder with plain matrices in `dtype`. The content always includes the number of
    rows of the Engram tables.
    """
    if config.text.engram_layer_ids and not config.text.engram_num_embeddings:
        rows = engram_tables(config.text).rows
        config = replace(config, text=replace(config.text, engram_num_embeddings=rows))
    raw = config.to_dict()
    raw["dtype"] = str(dtype).removeprefix("torch.")
    quantization = raw.pop("quantization_config", None)
    if format == "released":
        raw["quantization_config"] = quantization or QUANTIZATION
    return raw


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def whole_folder(folder: Path, ranks: RankGroup = ONE_RANK) -> Iterator[Path]:
    """A context manager that yields a temporary folder to write into. If the block succeeds, the temporary folder
    replaces `folder`; if it fails, the temporary folder is removed. All `ranks` get the same temporary folder, and an
    error on one rank is raised on all.
    """
    made = None
    with all_or_none(ranks):
        if ranks.rank == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
            made = tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)
    work = Path(gather_objects(made, ranks)[0])
    try:
        with all_or_none(ranks):
            yield work
            if ranks.rank == 0:
                _take_place(work, folder)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(work, ignore_errors=True)
        raise


def _take_place(work: Path, folder: Path) -> None:
    os.chmod(work, 0o755)
    if folder.exists():
        old = work.with_name(work.name + "-old")
        folder.rename(old)
        work.rename(folder)
        shutil.rmtree(old)
    else:
        work.rename(folder)
