"""Reads a checkpoint folder.

Reading is strict: an error lists every tensor that is missing, unexpected or of the wrong shape or dtype before any
tensor is used. Tensors are read block by block, so that memory holds, besides the model, only a few blocks and the
scales of one tensor. If the model is split over processes, each process reads its own experts and rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from model.backbone import DeepseekV41
from model.build import allocate_model
from model.checkpoint.names import SCALES, TensorShard, released_names, released_tensors
from model.checkpoint.released import (
    PLAIN,
    SPELLED,
    Header,
    Shards,
    TensorSource,
    file_headers,
    is_quantised,
    packing_of,
    read_headers,
    scale_name,
    tile_span,
)
from model.config import ForwardOptions, ModelConfig
from model.engram import build_token_map
from model.packed import PackedWeight
from model.parallel.ranks import ONE_PROCESS, Parallel
from model.quantize import FP4_ROWS, Packing


def load_pretrained(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    runtime: ForwardOptions | None = None,
    parallel: Parallel = ONE_PROCESS,
    packed: bool = False,
    done: Callable[[float], None] = lambda share: None,
) -> DeepseekV41:
    """Load a model from a checkpoint folder with config.json, safetensors files with the released names (quantised,
    bf16 or fp32) and, for a model with Engram layers, tokenizer.json. `parallel`: load only this process's part of the
    model. `packed`: keep the weights of a quantised folder in their stored form and frozen (see model/packed.py); this
    has no effect for a plain folder.

    Raises FileNotFoundError for a missing file, and ValueError that lists every tensor that is missing, unexpected or
    of the wrong shape or dtype. Drafter tensors (`mtp.*`) are not loaded here but by `load_drafter`.
    """
    folder = Path(folder)
    config = ModelConfig.load(folder)
    token_map = read_token_map(folder, config)
    kinds = parameter_packing if packed and is_quantised(config.to_dict()) else never_packed
    model = allocate_model(config, runtime, token_map, device, dtype, parallel, packing_of=kinds)
    load_weights(model, folder, done=done)
    return model


def read_token_map(folder: Path, config: ModelConfig) -> torch.Tensor | None:
    """The Engram token map that a folder's tokenizer gives, see `build_token_map`; None without Engram layers. Raises
    FileNotFoundError or ValueError if the tokenizer cannot be read.
    """
    return build_token_map(_tokenizer(folder)) if config.text.engram_layer_ids else None


@torch.no_grad()
def load_weights(
    model: nn.Module,
    folder: str | Path,
    beside: Sequence[TensorShard] = (),
    done: Callable[[float], None] = lambda share: None,
) -> None:
    """Copy the tensors of a folder into `model` (a model or a drafter), block by block; a process that holds a part of
    the model reads only its own experts and rows. Nothing is copied unless all names, shapes and dtypes agree.
    `beside`: tensors that the folder must contain besides those of `model`. The scales of quantised weights are kept in
    `model.released_scales` (at most 1 byte per 32 weights). `done` is called after each block, with the block's
    fraction of all values to copy.
    """
    held = list(released_tensors(model))
    targets = {part.name: part for part in held if part.tensor is not None}
    with open_checkpoint(folder, ModelConfig.load(folder), [*held, *beside]) as sources:
        sources = [source for source in sources if source.name in targets]
        # allocate the scales first, because they stay in memory; allocated between the blocks they would fragment the
        # heap
        packed = {name for name, part in targets.items() if isinstance(part.tensor, PackedWeight)}
        released_scales = {s.name: s.scales().clone() for s in sources if s.scales is not None and s.name not in packed}
        total = sum(targets[source.name].tensor.numel() for source in sources)
        for source in sources:
            part = targets[source.name]
            if isinstance(part.tensor, PackedWeight):
                # the tensors of `targets` are detached, and only the parameter itself can be given mapped codes
                _copy_stored(model.get_parameter(source.name) if part.tensor.on_host else part.tensor, source)
                done(part.tensor.numel() / total)
                continue
            row = source.start
            for block in source.blocks():
                low, high = max(row, part.rows.start), min(row + len(block), part.rows.stop)
                if low < high:  # some rows of a tile may belong to other processes
                    part.tensor[low - part.start : high - part.start].copy_(block[low - row : high - row])
                row += len(block)
                done(block.numel() / total)
    model.released_scales = released_scales  # type: ignore[assignment]


def _copy_stored(target: Tensor, source: TensorSource) -> None:
    """Copy the stored bytes of a quantised weight into a packed weight. A weight that stays on the host is
    memory-mapped from the file instead; its values are not checked for NaN, because a check would read the whole
    weight.
    """
    assert isinstance(target, PackedWeight)
    if source.stored is None or source.mapped is None:
        raise ValueError(
            f"{source.name} is not stored quantised, so it cannot be kept packed; load the folder with packed=False"
        )
    if target.on_host:
        target.codes, target.scale = source.mapped()
        return
    row, tile = 0, 0
    for codes, scale in source.stored():
        target.codes[row : row + len(codes)].copy_(codes)
        target.scale[tile : tile + len(scale)].copy_(scale)
        row, tile = row + len(codes), tile + len(scale)


def parameter_packing(name: str) -> Packing | None:
    """The packing in which the released layout stores a parameter, given its name in our model."""
    return packing_of(released_names(name, torch.Size([1]))[0])


def never_packed(name: str) -> None:
    """Returns None for every name: a `packing_of` function that keeps no weight packed."""


@contextmanager
def open_checkpoint(folder: str | Path, config: ModelConfig, held: list[TensorShard]) -> Iterator[list[TensorSource]]:
    """Check a folder against all tensors of the model (`held`), then yield the tensors in the order of the files, each
    with the rows that this process holds. The folder's drafter tensors (`mtp.*`) are included; unless `held` contains
    drafter tensors, their shapes are taken from the files. Raises the errors of `load_pretrained`.
    """
    folder = Path(folder)
    shapes = {part.name: part.shape for part in held}
    rows = {part.name: part.tiles for part in held if part.tensor is not None}
    divided = {part.name for part in held if part.divided}
    try:
        quantised = is_quantised(config.to_dict())
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    headers = read_headers(folder)
    drafter = {} if any(name.startswith("mtp.") for name in shapes) else _drafter_shapes(headers)
    packings = {name: packing_of(name) for name in shapes} if quantised else {}
    packings |= {name: packing_of(name) for name in drafter if headers[name].dtype not in PLAIN}
    scales = file_headers(folder / SCALES) if (folder / SCALES).is_file() else {}
    problems = _problems(headers, shapes | drafter, packings, quantised) + _scale_problems(scales, shapes | drafter)
    if problems:
        shown = "\n  ".join(problems[:20]) + (f"\n  and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise ValueError(f"{folder} does not contain this model:\n  {shown}")
    with Shards(headers) as shards, Shards(scales) as scale_shards:
        sources = []
        for name in headers:
            if name not in rows and name not in drafter:  # a scale, or a tensor that only other processes hold
                continue
            if packing := packings.get(name):
                sources.append(shards.quantised(name, packing, rows.get(name), name in divided))
            elif scale_name(name) in scales and not quantised:
                read = partial(_read_scales, scale_shards, name, name in divided)
                sources.append(shards.plain(name, rows.get(name), read))
            else:
                sources.append(shards.plain(name, rows.get(name)))
        yield sources


def _read_scales(shards: Shards, name: str, whole: bool, rows: slice | None) -> Tensor:
    """Reads the quantisation scales that a plain folder keeps for `rows` of a weight (all rows if `whole` is set or
    `rows` is None).
    """
    tiles = None if whole or rows is None else tile_span(rows, packing_of(name))
    return shards.read(scale_name(name), tiles)


def _problems(
    headers: dict[str, Header],
    shapes: dict[str, tuple[int, ...]],
    packings: dict[str, Packing | None],
    quantised: bool,
) -> list[str]:
    """Returns one message for every tensor of a folder that is missing, unexpected or of the wrong shape or dtype."""
    problems, expected = [], set()
    for name, shape in shapes.items():
        packing = packings.get(name)
        parts: list[tuple[str, tuple[int, ...], tuple[str, ...]]] = [(name, shape, PLAIN)]
        if packing is not None:
            try:
                codes = packing.codes_shape(*shape)
            except (ValueError, TypeError):  # an odd number of columns, or (in a drafter) not a matrix
                problems.append(f"shape: {name} has shape {list(shape)}, which a quantised weight cannot have")
                continue
            parts = [
                (name, codes, (SPELLED[packing.codes],)),
                (scale_name(name), packing.scale_shape(*shape), (SPELLED[torch.float8_e8m0fnu],)),
            ]
        for part, wanted, types in parts:
            expected.add(part)
            if part not in headers:
                problems.append(f"missing: {part} {list(wanted)}")
                continue
            _, dtype, found = headers[part]
            if found != wanted:
                problems.append(f"shape: {part} is {list(found)}, must be {list(wanted)}")
            if dtype not in types:
                why = ""
                if packing_of(name) is not None and not name.startswith("mtp."):
                    why = f" (config.json has {'a' if quantised else 'no'} quantization_config)"
                allowed = " or ".join(", ".join(types).rsplit(", ", 1))
                problems.append(f"type: {part} is {dtype}, must be {allowed}{why}")
    for name in headers:
        if name in expected:
            continue
        weight = name.removesuffix(".scale") + ".weight"
        lone = name.endswith(".scale") and weight not in headers
        problems.append(f"scale without weight: {name}" if lone else f"extra: {name}")
    return problems


def _drafter_shapes(headers: dict[str, Header]) -> dict[str, tuple[int, ...]]:
    """The shapes of the drafter's tensors, read from the files, because a model without its drafter does not know
    them.
    """
    shapes = {}
    for name, header in headers.items():
        if name.startswith("mtp.") and not name.endswith(".scale"):
            shapes[name] = header.shape
            if packing_of(name) == FP4_ROWS and header.dtype == "I8":
                shapes[name] = (*header.shape[:-1], 2 * header.shape[-1])
    return shapes


def _scale_problems(scales: dict[str, Header], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """The problems of the quantisation scales that a plain folder keeps: scales without a weight or of a wrong shape or
    dtype.
    """
    problems = []
    weights = {scale_name(name): name for name, shape in shapes.items() if packing_of(name) and len(shape) == 2}
    for name, (_, dtype, found) in scales.items():
        if name not in weights:
            problems.append(f"scale without weight: {name} in {SCALES}")
            continue
        wanted = packing_of(weights[name]).scale_shape(*shapes[weights[name]])
        if found != wanted or dtype != SPELLED[torch.float8_e8m0fnu]:
            problems.append(f"shape: {name} in {SCALES} is {dtype} {list(found)}, must be F8_E8M0 {list(wanted)}")
    return problems


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; a model with Engram layers needs its tokenizer to compress token ids"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no more specific exception
        raise ValueError(f"{path} is not a tokenizer: {error}") from None
