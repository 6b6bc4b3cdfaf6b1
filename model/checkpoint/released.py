"""The released layout on disk: how each weight is quantised, and reading and writing of safetensors shards in blocks.

The layout is that of the released config and weights of V4.1 (report: arXiv 2609.19969). A quantised weight `X.weight`
has its scales in the tensor `X.scale`; all other tensors are bf16 or fp32. names.py maps parameters to tensor names.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.parallel.collective_errors import all_or_none, gather_objects
from model.parallel.ranks import ONE_RANK, RankGroup
from model.quantize import FP4_ROWS, FP8_ROWS, FP8_TILES, Packing, pack, unpack

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [32, 32],
    "expert_dtype": "fp4",
}
_PACKINGS = (
    (
        re.compile(
            r"(layers|mtp)\.\d+\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|ffn\.shared_experts\.w[123]"
            r"|engram\.wkv)\.weight|mtp\.\d+\.main_proj\.weight"
        ),
        FP8_TILES,
    ),
    (re.compile(r"(layers|mtp)\.\d+\.ffn\.experts\.\d+\.w[123]\.weight"), FP4_ROWS),
    (re.compile(r"layers\.\d+\.engram\.embed\.weight"), FP8_ROWS),
)
_DTYPES = {  # as safetensors spells them
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
}
SPELLED = {dtype: name for name, dtype in _DTYPES.items()}
PLAIN = ("F32", "BF16", "F16")
BLOCK = 2**20  # number of tensor elements that are processed at a time


def packing_of(name: str) -> Packing | None:
    """The packing in which the released checkpoint stores the weight with this released name, or None if it is not
    quantised.
    """
    return next((packing for pattern, packing in _PACKINGS if pattern.fullmatch(name)), None)


def scale_name(name: str) -> str:
    """The name of the tensor with the scales of a quantised weight."""
    return name.removesuffix(".weight") + ".scale"


def is_quantised(config: dict[str, Any]) -> bool:
    """Whether a config.json in the released format says that the weights of its folder are quantised.

    Raises ValueError that lists every value of `quantization_config` that differs from the released one.
    """
    found = config.get("quantization_config")
    if found is None:
        return False
    if not isinstance(found, dict):
        raise ValueError(f"quantization_config: must be a mapping, got {type(found).__name__}")
    problems = [
        f"quantization_config.{key}: is {found[key]!r}, must be {value!r}"
        for key, value in QUANTIZATION.items()
        if found.get(key, value) != value
    ]
    if "quant_method" not in found:
        problems.append("quantization_config.quant_method: is missing, must be 'fp8'")
    if problems:
        raise ValueError("the checkpoint is quantised in a format that cannot be read:\n  " + "\n  ".join(problems))
    return True


class Header(NamedTuple):
    """The header entry of one tensor in a safetensors file; `dtype` is the name that safetensors uses, such as
    "BF16".
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]


def read_headers(folder: Path) -> dict[str, Header]:
    """The headers of all tensors of a checkpoint folder, read from the shards; they must agree with the index file.

    Raises FileNotFoundError for a missing file, and ValueError for a damaged file or a contradiction between index and
    shards.
    """
    index = folder / INDEX
    if index.is_file():
        listed = _weight_map(index)
    elif (folder / SINGLE).is_file():
        listed = None
    else:
        raise FileNotFoundError(f"{folder} has neither {INDEX} nor {SINGLE}; weights in other formats cannot be read")
    found: dict[str, Header] = {}
    for file in [SINGLE] if listed is None else sorted(set(listed.values())):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{index} lists the file {file}, which does not exist")
        for name, header in file_headers(folder / file).items():
            if name in found:
                raise ValueError(f"{name} is in both {found[name].path} and {folder / file}")
            if listed is not None and name not in listed:
                raise ValueError(f"{folder / file} contains {name}, which {index} does not list")
            found[name] = header
    for name, file in (listed or {}).items():
        if name not in found or found[name].path.name != file:
            raise ValueError(f"{index} says that {name} is in {file}, but that file does not contain it")
    return found


def file_headers(path: Path) -> dict[str, Header]:
    """The headers of all tensors of one safetensors file. Raises ValueError if the file is damaged or truncated."""
    try:
        with safe_open(path, framework="pt") as shard:
            slices = {name: shard.get_slice(name) for name in shard.keys()}
            return {name: Header(path, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from None


def _weight_map(index: Path) -> dict[str, str]:
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        usable = bool(listed) and all(isinstance(f, str) and Path(f).name == f for f in listed.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        usable = False
    if not usable:
        raise ValueError(f"{index} is damaged: its key 'weight_map' must map every tensor to a file in the same folder")
    return listed


class TensorSource(NamedTuple):
    """A tensor to be copied. `blocks()` yields the rows that this process copies, in order, a few at a time, beginning
    at row `start`.

    shape: the shape of the whole tensor, of which this process may handle only some rows or none.
    dtype: the dtype to store the tensor in, unless the writer asks for another.
    scales: returns the quantisation scales that were loaded for the rows, if there are any.
    stored: yields the codes and scales of each block, if the tensor is stored quantised.
    of_rows: returns a `TensorSource` for only a range of rows, which must begin at the start of a tile.
    stored_as: is called after each block, with the values of the block as the file represents them.
    mapped: returns the codes and scales of all rows as memory-mapped tensors, which are read from the file when used.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: Callable[[], Iterator[Tensor]]
    scales: Callable[[], Tensor] | None = None
    start: int = 0
    stored: Callable[[], Iterator[tuple[Tensor, Tensor]]] | None = None
    of_rows: Callable[[slice], TensorSource] | None = None
    stored_as: Callable[[Tensor], None] | None = None
    mapped: Callable[[], tuple[Tensor, Tensor]] | None = None


def deal_rows(sources: Iterable[TensorSource], ranks: RankGroup) -> Iterator[TensorSource]:
    """Divide the rows of all tensors among the processes that convert them together. Yields each tensor with only the
    rows of this process, in whole tiles. Every process gets nearly the same number of values of each kind of packing.
    """
    sources, before = list(sources), defaultdict[Packing | None, int](int)
    if ranks.size == 1:
        yield from sources
        return
    totals = defaultdict[Packing | None, int](int)
    for source in sources:
        totals[packing_of(source.name)] += math.prod(source.shape)
    for source in sources:
        kind, size = packing_of(source.name), math.prod(source.shape)
        if source.shape:
            ends = [totals[kind] * rank // ranks.size - before[kind] for rank in (ranks.rank, ranks.rank + 1)]
            columns = max(math.prod(source.shape[1:]), 1)
            first, stop = (min(max(-(-end // (32 * columns)) * 32, 0), source.shape[0]) for end in ends)
            assert source.of_rows is not None, f"{source.name} can only be read whole"
            yield source.of_rows(slice(first, stop) if first < stop else slice(0, 0))
        else:
            yield source if ranks.rank == 0 else source._replace(blocks=lambda: iter(()))
        before[kind] += size


def row_blocks(shape: tuple[int, ...], rows: slice | None = None) -> Iterator[slice]:
    """Cut the first axis (or only its range `rows`) into slices of about `BLOCK` elements, each a multiple of 32 rows
    high so that no tile is cut.
    """
    rows = rows or slice(0, shape[0])
    height = max(BLOCK // max(math.prod(shape[1:]), 1) // 32, 1) * 32
    for start in range(rows.start, rows.stop, height):
        yield slice(start, min(start + height, rows.stop))


def tile_span(rows: slice, packing: Packing) -> slice:
    """The rows of the scale tensor that belong to a range of matrix rows; the range must begin at the start of a
    tile.
    """
    assert rows.start % packing.tile_rows == 0, "a tile cannot be split over processes"
    return slice(rows.start // packing.tile_rows, -(-rows.stop // packing.tile_rows))


class Shards:
    """Reads tensors of safetensors files block by block. The reader is a context manager, which keeps the files open
    until it exits.
    """

    def __init__(self, headers: dict[str, Header]):
        self.headers = headers
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read a stored tensor, or some of its rows, without unpacking it."""
        path = self.headers[name].path
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._open[path].get_tensor(name) if rows is None else self._open[path].get_slice(name)[rows]

    def map(self, name: str) -> Tensor:
        """Returns a stored tensor as a memory map of its file, without reading it. Do not write to the tensor."""
        path, spelled, shape = self.headers[name]
        dtype = _DTYPES[spelled]
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            first, stop = json.loads(file.read(length))[name]["data_offsets"]
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        pages.madvise(mmap.MADV_RANDOM)  # a look-up reads single rows far apart
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            raw = torch.frombuffer(pages, dtype=torch.uint8, count=stop - first, offset=8 + length + first)
        return raw.view(dtype).view(shape)

    def plain(
        self, name: str, rows: slice | None = None, kept: Callable[[slice | None], Tensor] | None = None
    ) -> TensorSource:
        """The `TensorSource` of a tensor that is stored without quantisation, or of some of its rows. `kept(rows)`
        reads the quantisation scales that a plain folder keeps for these rows (None: for all rows).
        """
        header = self.headers[name]

        def blocks() -> Iterator[Tensor]:
            if not header.shape:
                yield self.read(name)
            for part in row_blocks(header.shape, rows) if header.shape else ():
                yield self.read(name, part)

        scales = None if kept is None else partial(kept, rows)
        start, of_rows = rows.start if rows else 0, partial(self.plain, name, kept=kept)
        return TensorSource(name, header.shape, _DTYPES[header.dtype], blocks, scales, start, of_rows=of_rows)

    def quantised(
        self, name: str, packing: Packing, rows: slice | None = None, whole_scales: bool = False
    ) -> TensorSource:
        """The `TensorSource` of a quantised weight, or of some of its rows; it yields unpacked fp32 blocks. With
        `whole_scales`, the scales of all rows are read. Reading raises ValueError if the weight has a NaN or infinite
        value.
        """
        path, _, (height, columns) = self.headers[name]
        shape = (height, 2 * columns if packing.codes == torch.int8 else columns)
        rows = rows or slice(0, height)

        def pieces() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            for part in row_blocks(shape, rows):
                codes, scale = self.read(name, part), self.read(scale_name(name), tile_span(part, packing))
                values = unpack(codes, scale, packing)
                if not values.isfinite().all():
                    raise ValueError(f"{path}: {name} with {scale_name(name)} has a NaN or infinite value")
                yield codes, scale, values

        def blocks() -> Iterator[Tensor]:
            return (values for _, _, values in pieces())

        def stored() -> Iterator[tuple[Tensor, Tensor]]:
            return ((codes, scale) for codes, scale, _ in pieces())

        def read_scales() -> Tensor:
            return self.read(scale_name(name), None if whole_scales else tile_span(rows, packing))

        def mapped() -> tuple[Tensor, Tensor]:
            return self.map(name)[rows], self.map(scale_name(name))[tile_span(rows, packing)]

        of_rows = partial(self.quantised, name, packing)
        source = TensorSource(name, shape, torch.bfloat16, blocks, read_scales, rows.start, stored, of_rows)
        return source._replace(mapped=mapped)


class Stored(NamedTuple):
    """A tensor in the form in which it is written to a file. `blocks()` yields this process's rows in order, beginning
    at row `start`; each block may be computed only when it is requested.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    blocks: Callable[[], Iterator[Tensor]]
    start: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def first_byte(self) -> int:
        return self.start * math.prod(self.shape[1:]) * self.dtype.itemsize


def packed(source: TensorSource, packing: Packing) -> list[Stored]:
    """Quantise a weight to codes and scales for writing. The scales are computed while the codes are written, so the
    codes must be written first.
    """
    name, shape = source.name, source.shape
    scales: list[Tensor] = []

    def codes() -> Iterator[Tensor]:
        former, row = source.scales() if source.scales else None, 0
        for block in source.blocks():
            if not block.isfinite().all():
                raise ValueError(f"{name} has a NaN or infinite value and cannot be quantised")
            tiles = tile_span(slice(row, row + len(block)), packing)
            part, scale = pack(block, packing, None if former is None else former[tiles].to(block.device))
            scales.append(scale)
            if source.stored_as is not None:
                source.stored_as(unpack(part, scale, packing))
            yield part
            row += len(block)

    def written() -> Iterator[Tensor]:
        while scales:
            yield scales.pop(0)

    try:
        codes_shape = packing.codes_shape(*shape)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    first = tile_span(slice(source.start, source.start), packing).start
    return [
        Stored(name, codes_shape, packing.codes, codes, source.start),
        Stored(scale_name(name), packing.scale_shape(*shape), torch.float8_e8m0fnu, written, first),
    ]


def write_shards(folder: Path, bundles: Iterable[list[Stored]], shard_bytes: int, ranks: RankGroup = ONE_RANK) -> int:
    """Write bundles of tensors into shards of at most `shard_bytes` bytes with an index file, or into a single file if
    all tensors fit into one. The tensors of a bundle are in the same shard; a bundle that exceeds `shard_bytes` has a
    shard of its own. Returns the total size of all tensors in bytes.

    With several processes, every process passes the same bundles of tensors, but with only the rows that it writes
    itself. All processes write into the same files, so all must have access to the folder; the files equal those that a
    single process would write.
    """
    by_name = {bundle[0].name: bundle for bundle in bundles}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda bundle: sum(stored.nbytes for stored in bundle),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    shards = {
        file: [stored for name in names for stored in by_name[name]]
        for file, names in split.filename_to_tensors.items()
    }
    write_files({folder / file: shard for file, shard in shards.items()}, ranks)
    if split.is_sharded and ranks.rank == 0:
        where = {stored.name: file for file, shard in shards.items() for stored in shard}
        index = {"metadata": split.metadata, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return split.metadata["total_size"]


def write_files(files: dict[Path, list[Stored]], ranks: RankGroup = ONE_RANK) -> None:
    """Write safetensors files block by block; each process writes its own rows. (The writer of the safetensors library
    would need a whole file in memory.) All data is on disk when this function returns. If one process fails, or if a
    row is written by no process, every process raises an error.
    """
    layouts = {path: _layout(tensors) for path, tensors in files.items()}
    with all_or_none(ranks):
        if ranks.rank == 0:
            for path, layout in layouts.items():
                with open(path, "wb") as file:
                    file.write(layout.header)
                    file.truncate(layout.size)
    with all_or_none(ranks):
        written = sum(_fill(path, layout) for path, layout in layouts.items())
    expected = sum(layout.size - len(layout.header) for layout in layouts.values())
    assert sum(gather_objects(written, ranks)) == expected, "rows of a tensor were written by no process, or by two"


class _Layout(NamedTuple):
    """The layout of a safetensors file: its header bytes, its size, and its tensors with the byte offset at which each
    begins.
    """

    header: bytes
    size: int
    tensors: list[tuple[Stored, int]]


def _layout(tensors: list[Stored]) -> _Layout:
    # Keeps tensors aligned; scales still follow their codes
    tensors = sorted(tensors, key=lambda stored: -stored.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for stored in tensors:
        span = [end, end := end + stored.nbytes]
        header[stored.name] = {"dtype": SPELLED[stored.dtype], "shape": list(stored.shape), "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    placed = [(stored, start + header[stored.name]["data_offsets"][0]) for stored in tensors]
    return _Layout(len(text).to_bytes(8, "little") + text, start + end, placed)


def _fill(path: Path, layout: _Layout) -> int:
    """Write this process's rows into a file that already has its final size. Returns the number of bytes written."""
    written = 0
    with open(path, "r+b") as file:
        for stored, begin in layout.tensors:
            file.seek(begin + stored.first_byte)
            for block in stored.blocks():
                block = block.detach().to("cpu", stored.dtype).contiguous()
                written += file.write(block.flatten().view(torch.uint8).numpy().data)
            assert file.tell() <= begin + stored.nbytes, f"{stored.name}: too many rows"
        file.flush()
        os.fsync(file.fileno())
    return written
