"""Checkpoints in the released layout: names, quantised and plain folders, conversion between them.

Our parameter names are the released ones except that a layer's experts are stacked and an mHC mix is a submodule.
Reading is strict: a missing, extra, mis-shaped or mis-typed tensor is named before anything is used. Reading and
writing go block by block: beside the model, memory holds a few blocks and one tensor's scales.

Released -> ours -> released gives back the bytes of every quantised weight that was not changed. The values alone do
not determine the scales they were stored with (see `quantize.pack`), so these are kept: in `model.released_scales`,
and in plain folders beside the weights (`SCALES`).

A model that is spread over processes (`model.parallel`) is read and written by all of them, each its own experts and
rows; the folder is the one that a single process would write.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from model.backbone import DeepseekV41, allocate_model
from model.checkpoint.released import (
    PLAIN,
    QUANTIZATION,
    SPELLED,
    Header,
    Shards,
    Stored,
    TensorSource,
    file_headers,
    is_quantised,
    packed,
    packing_of,
    read_headers,
    row_blocks,
    scale_name,
    tile_span,
    write_files,
    write_shards,
)
from model.config import ForwardOptions, ModelConfig
from model.engram import build_token_map, engram_tables
from model.parallel.collective_errors import ALONE, all_or_none, gather_objects
from model.parallel.ranks import ONE_PROCESS, Parallel, RankGroup
from model.quantize import FP4_ROWS, Packing

SCALES = "released_scales.tensors"  # a safetensors file; the name keeps it out of other programs' *.safetensors
SHARD_BYTES = 4 * 2**30
_STACKED = re.compile(r"(.*\.experts)\.(w[123])")
_MIX = re.compile(r"(.*)\.hc_(attn|ffn)\.(fn|base|scale)")
_EXPERT = re.compile(r"((?:layers|mtp)\.\d+\.ffn\.experts)\.(\d+)\.(w[123])\.weight")
_RELEASED_MIX = re.compile(r"((?:layers|mtp)\.\d+)\.hc_(attn|ffn)_(fn|base|scale)")
GENERATION = "generation_config.json"
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    GENERATION,
)  # small files that come along with weights


def released_names(name: str, shape: torch.Size) -> list[str]:
    """Released tensor names of one of our tensors; one per expert for stacked experts."""
    if match := _STACKED.fullmatch(name):
        return [f"{match[1]}.{expert}.{match[2]}.weight" for expert in range(shape[0])]
    if match := _MIX.fullmatch(name):
        return [f"{match[1]}.hc_{match[2]}_{match[3]}"]
    return [name]


def own_state(released: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict under our names from plain tensors under released names; experts in the order of their numbers."""
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in released.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        elif match := _RELEASED_MIX.fullmatch(name):
            state[f"{match[1]}.hc_{match[2]}.{match[3]}"] = tensor
        else:
            state[name] = tensor
    for name, tensors in experts.items():
        state[name] = torch.stack([tensors[expert] for expert in sorted(tensors)])
    return state


class Change(NamedTuple):
    """What a tensor of this shape is to become: `apply(rows, block)` are these rows of it, given what they are."""

    shape: tuple[int, ...]
    apply: Callable[[slice, Tensor], Tensor]


class TensorShard(NamedTuple):
    """A released tensor of a model, and the rows of it that this process holds, from `start` on; None: no row."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    tensor: Tensor | None
    start: int
    number: int  # place among all parts of the model
    copies: RankGroup  # the processes that hold different rows (or experts); others hold the same as one of these

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + len(self.tensor))

    def written_by(self, ranks: RankGroup) -> bool:
        """Whether this one of the processes that hold the rows is to write them."""
        if self.tensor is None:
            return False
        others = ranks.size // self.copies.size
        return self.number % others == ranks.rank // self.copies.size


def released_tensors(model: nn.Module) -> Iterator[TensorShard]:
    """Everything that a checkpoint of the whole model holds, in the order of the model; stacked experts one by one."""
    number = 0
    for name, tensor in model.state_dict(keep_vars=True).items():
        shard = getattr(tensor, "shard", None)
        tensor = tensor.detach()
        start, total = (0, len(tensor)) if shard is None else (shard.start, shard.total)
        shape = (total, *tensor.shape[1:])
        ranks = ALONE if shard is None else shard.ranks
        if not _STACKED.fullmatch(name):
            found = [(shape, tensor if len(tensor) else None, start)]
        else:
            found = [
                (shape[1:], tensor[expert - start] if 0 <= expert - start < len(tensor) else None, 0)
                for expert in range(total)
            ]
        for released, (whole, part, first) in zip(released_names(name, torch.Size(shape)), found, strict=True):
            yield TensorShard(released, tuple(whole), tensor.dtype, part, first, number, ranks)
            number += 1


def check_packable(model: nn.Module) -> None:
    """Raise ValueError that names every weight whose shape the released layout cannot hold."""
    problems = []
    for part in released_tensors(model):
        try:
            if packing := packing_of(part.name):
                packing.codes_shape(*part.shape)
        except ValueError as error:
            problems.append(f"{part.name} {error}")
    if problems:
        raise ValueError("\n  ".join(["this model cannot be written in the released layout:", *problems]))


def scale_parts(model: nn.Module) -> Iterator[TensorShard]:
    """The kept scales (`model.released_scales`) as parts, each under the name of its weight."""
    kept = getattr(model, "released_scales", {})
    for part in released_tensors(model) if kept else ():
        if part.name in kept:
            packing = packing_of(part.name)
            first = tile_span(part.rows, packing).start
            yield part._replace(shape=packing.scale_shape(*part.shape), tensor=kept[part.name], start=first)


def allocate_scales(model: nn.Module, names: Container[str]) -> None:
    """Make room in `model.released_scales` for this process's rows of the scales of some weights, not yet written."""
    model.released_scales = {
        part.name: torch.empty(packing_of(part.name).scale_shape(*part.tensor.shape), dtype=torch.float8_e8m0fnu)
        for part in (released_tensors(model) if names else ())
        if part.name in names and part.tensor is not None
    }


def load_pretrained(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    runtime: ForwardOptions | None = None,
    parallel: Parallel = ONE_PROCESS,
) -> DeepseekV41:
    """Load a checkpoint folder: config.json, safetensors in the released names (quantised, bf16 or fp32),
    tokenizer.json if it has Engram layers. `parallel` loads this process's part of the model.

    Raises FileNotFoundError for a missing file and ValueError that lists every missing, extra, mis-shaped or mis-typed
    tensor. Drafter tensors (`mtp.*`) are left out: `load_drafter` reads them.
    """
    folder = Path(folder)
    config = ModelConfig.load(folder)
    token_map = None
    if config.text.engram_layer_ids:
        token_map = build_token_map(_tokenizer(folder))
    model = allocate_model(config, runtime, token_map, device, dtype, parallel)
    load_weights(model, folder)
    return model


@torch.no_grad()
def load_weights(model: nn.Module, folder: str | Path, beside: Sequence[TensorShard] = ()) -> None:
    """Copy a folder's tensors into `model` (or a drafter), block by block; a spread model reads only its own experts
    and rows. Nothing is copied unless names, shapes and types agree completely, also those of `beside`, which the
    folder must hold too. The scales of quantised weights are kept in `model.released_scales` (at most 1 byte for 32
    entries).
    """
    held = list(released_tensors(model))
    targets = {part.name: part for part in held if part.tensor is not None}
    with open_checkpoint(folder, ModelConfig.load(folder), [*held, *beside]) as sources:
        sources = [source for source in sources if source.name in targets]
        # first what stays, then what passes through: between the blocks, the scales would scatter over the heap
        kept = {source.name: source.kept().clone() for source in sources if source.kept is not None}
        for source in sources:
            target, row = targets[source.name].tensor, 0
            for block in source.blocks():
                target[row : row + len(block)].copy_(block)
                row += len(block)
    model.released_scales = kept


def save_pretrained(
    model: DeepseekV41,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    format: Literal["plain", "released"] = "plain",
    companions: Mapping[str, str] | None = None,
    ranks: RankGroup = ALONE,
    drafter: nn.Module | None = None,
) -> None:
    """Write config.json, safetensors shards with an index, and tokenizer.json; the folder appears whole or not at all.
    `drafter` is written beside the model, as `mtp.*`.

    `companions`: name -> text of more files that readers expect beside them (see `data.tokenizer_files`).

    `format="released"` quantises the weights that the released checkpoint holds quantised. `dtype` casts the other
    matrices and embeddings (None keeps them); what the report keeps in fp32 stays fp32. An existing folder is
    replaced. Raises ValueError for a weight that cannot be quantised (a value is not finite), and for a model that
    holds an adapter, whose factors have no place in this layout.

    `ranks` are the processes that write together, all that the model is spread over and their copies; they must see
    the same file system. If one of them fails, all raise.
    """
    scales = {**getattr(model, "released_scales", {}), **getattr(drafter, "released_scales", {})}

    def source(part: TensorShard) -> TensorSource:
        if not part.written_by(ranks):
            return TensorSource(part.name, part.shape, part.dtype, lambda: iter(()))
        kept = (lambda: scales[part.name]) if part.name in scales else None
        return TensorSource(part.name, part.shape, part.dtype, partial(_blocks, part.tensor), kept, part.start)

    held = [*released_tensors(model), *(() if drafter is None else released_tensors(drafter))]
    if adapter := next((part.name for part in held if ".lora_" in part.name), None):
        raise ValueError(f"the model holds an adapter ({adapter}); merge it into the weights first, or save it alone")
    spread = max(part.copies.size for part in held)
    if ranks.size % spread:
        raise ValueError(f"the model is spread over {spread} processes; all must save it together, not {ranks.size}")
    kept = _kept_anywhere(held, scales, ranks) if format == "plain" else ()
    with whole_folder(Path(folder), ranks) as work:
        write_checkpoint(work, [source(part) for part in held], kept, model.config, format, dtype, shard_bytes, ranks)
        if ranks.rank == 0:
            if tokenizer is not None:
                tokenizer.save(str(work / "tokenizer.json"))
            for name, text in (companions or {}).items():
                (work / name).write_text(text, encoding="utf-8")


def _kept_anywhere(held: list[TensorShard], scales: Mapping[str, Tensor], ranks: RankGroup) -> set[str]:
    """The weights whose scales were kept, by the processes that hold them."""
    here = [part.name for part in held if part.tensor is not None and packing_of(part.name)]
    found = gather_objects((bool(scales), [name for name in here if name not in scales]), ranks)
    if not any(some for some, _ in found):
        return set()
    lacking = {name for _, names in found for name in names}
    return {part.name for part in held if packing_of(part.name) and part.name not in lacking}


def convert_checkpoint(
    src: str | Path,
    dst: str | Path,
    format: Literal["bf16", "released"],
    shard_bytes: int = SHARD_BYTES,
    changes: Mapping[str, Change] | None = None,
) -> int:
    """Rewrite a checkpoint folder in another format, without building the model. Returns the bytes of all tensors.

    "bf16" unpacks the weights of a quantised folder (the rest stays as stored), and casts the matrices of a plain one.
    "released" quantises; the rest stays as stored. Drafter tensors come along, and so do the tokenizer's files.
    `changes`: by tensor name. Raises what `load_pretrained` raises; ValueError if `dst` exists, or for a change of a
    tensor that is not there or has another shape.
    """
    src, dst = Path(src), Path(dst)
    if format not in ("bf16", "released"):
        raise ValueError(f"format: {format!r} is unknown, allowed are 'bf16' and 'released'")
    if dst.exists():
        raise ValueError(f"{dst} exists already; name a new folder")
    config = ModelConfig.load(src)
    skeleton = allocate_model(config, None, None, "meta", torch.float32)
    with open_checkpoint(src, config, list(released_tensors(skeleton))) as sources, whole_folder(dst) as work:
        if changes:
            sources = _changed(sources, changes)
        kept = {source.name for source in sources if source.kept is not None}
        dtype = torch.bfloat16 if format == "bf16" and not is_quantised(config.to_dict()) else None
        layout = "released" if format == "released" else "plain"
        total = write_checkpoint(work, sources, kept, config, layout, dtype, shard_bytes, ALONE)
        for name in COMPANIONS:
            if (src / name).is_file():
                shutil.copyfile(src / name, work / name)
    return total


def _changed(sources: list[TensorSource], changes: Mapping[str, Change]) -> list[TensorSource]:
    """The same tensors with some of them changed; the scales that those had are of no more use."""
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
        source._replace(blocks=partial(blocks, source), kept=None) if source.name in changes else source
        for source in sources
    ]


@contextmanager
def open_checkpoint(folder: str | Path, config: ModelConfig, held: list[TensorShard]) -> Iterator[list[TensorSource]]:
    """The rows of a folder's tensors that this process holds, in the order of the files, once the folder as a whole is
    checked against the model's tensors. Drafter tensors (`mtp.*`) are among them, as the files say unless `held` names
    them. Raises what `load_pretrained` raises.
    """
    folder = Path(folder)
    shapes = {part.name: part.shape for part in held}
    rows = {part.name: part.rows for part in held if part.tensor is not None}
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
        raise ValueError(f"{folder} does not hold this model:\n  {shown}")
    with Shards(headers) as shards, Shards(scales) as kept:
        sources = []
        for name in headers:
            if name not in rows and name not in drafter:  # scales, and what others hold
                continue
            if packing := packings.get(name):
                sources.append(shards.quantised(name, packing, rows.get(name)))
            elif scale_name(name) in scales and not quantised:
                tiles = tile_span(rows[name], packing_of(name)) if name in rows else None
                read = partial(kept.read, scale_name(name), tiles)
                sources.append(shards.plain(name, rows.get(name))._replace(kept=read))
            else:
                sources.append(shards.plain(name, rows.get(name)))
        yield sources


def _problems(
    headers: dict[str, Header],
    shapes: dict[str, tuple[int, ...]],
    packings: dict[str, Packing | None],
    quantised: bool,
) -> list[str]:
    """Every tensor that is missing, extra, mis-shaped or mis-typed."""
    problems, expected = [], set()
    for name, shape in shapes.items():
        packing = packings.get(name)
        parts = [(name, shape, PLAIN)]
        if packing is not None:
            try:
                codes = packing.codes_shape(*shape)
            except (ValueError, TypeError):  # odd columns; no matrix at all (a drafter's)
                problems.append(f"shape: {name} is {list(shape)}, which cannot be a quantised weight")
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
    """Shapes of the drafter's tensors, taken from the file itself: a model without its drafter does not know them."""
    shapes = {}
    for name, header in headers.items():
        if name.startswith("mtp.") and not name.endswith(".scale"):
            shapes[name] = header.shape
            if packing_of(name) == FP4_ROWS and header.dtype == "I8":
                shapes[name] = (*header.shape[:-1], 2 * header.shape[-1])
    return shapes


def _scale_problems(scales: dict[str, Header], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """What is wrong with the kept scales of a plain folder."""
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


def write_checkpoint(
    folder: Path,
    sources: Iterable[TensorSource],
    kept: Container[str],
    config: ModelConfig,
    format: str,
    dtype: torch.dtype | None,
    shard_bytes: int,
    ranks: RankGroup = ALONE,
) -> int:
    """Write config.json and the tensors into a folder, as `save_pretrained` does; returns the bytes of all tensors.
    `kept`: the weights whose scales go beside them in a plain folder.
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
        stored = Stored(source.name, source.shape, source.dtype if keep else dtype, source.blocks, source.start)
        bundles.append([stored])
        if source.name == "embed.weight":
            plain = stored.dtype
        if source.name in kept and packing is not None:
            scales.append(_kept_scales(source, packing))
    total = write_shards(folder, bundles, shard_bytes, ranks)
    if scales:
        write_files({folder / SCALES: scales}, ranks)
    if ranks.rank == 0:
        _write_json(folder / "config.json", _written_config(config, format, plain))
        ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(folder / GENERATION, ids)
    return total


def _kept_scales(source: TensorSource, packing: Packing) -> Stored:
    def blocks() -> Iterator[Tensor]:
        if source.kept is not None:  # else another process has them
            yield source.kept()

    first = tile_span(slice(source.start, source.start), packing).start
    return Stored(scale_name(source.name), packing.scale_shape(*source.shape), torch.float8_e8m0fnu, blocks, first)


def _written_config(config: ModelConfig, format: str, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a folder whose plain matrices are stored in `dtype`; rows of Engram tables are spelled out."""
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
def whole_folder(folder: Path, ranks: RankGroup = ALONE) -> Iterator[Path]:
    """A folder to write into, which takes the place of `folder` once the block ends well and else disappears. All
    `ranks` work in the same one; what fails in one fails in all.
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


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    for rows in row_blocks(tuple(tensor.shape)):
        yield tensor[rows].detach()


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; a model with Engram layers needs its tokenizer to compress token ids"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is no tokenizer: {error}") from None
