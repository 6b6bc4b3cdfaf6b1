"""Converts a checkpoint folder to another format without building the model."""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from model.build import allocate_model
from model.checkpoint.load import open_checkpoint
from model.checkpoint.names import COMPANIONS, released_tensors
from model.checkpoint.released import TensorSource, deal_rows, is_quantised
from model.checkpoint.save import SHARD_BYTES, whole_folder, write_checkpoint
from model.config import ModelConfig
from model.parallel.collective_errors import gather_objects
from model.parallel.ranks import ONE_RANK, RankGroup


class Change(NamedTuple):
    """A change to one tensor of the given shape: `apply(rows, block)` returns the new values of the rows, whose old
    values are `block`.
    """

    shape: tuple[int, ...]
    apply: Callable[[slice, Tensor], Tensor]


@dataclass(frozen=True)
class Arrived:
    """What the stored values of one or several tensors have of a change that was added to them.

    meant: sum of the squares of the change. stored: sum of the squares of the stored change, which is the difference
    between the stored values after and before. along: sum of the products of both. All are sums over the elements of
    the tensors.
    """

    meant: float = 0.0
    stored: float = 0.0
    along: float = 0.0

    def __add__(self, other: Arrived) -> Arrived:
        return Arrived(self.meant + other.meant, self.stored + other.stored, self.along + other.along)

    @property
    def norm_share(self) -> float:
        """The norm of the stored change divided by the norm of the change. Rounding adds noise to the stored change, so
        the quotient can be large although little of the change itself was stored; see `along_share`.
        """
        return math.sqrt(self.stored / self.meant) if self.meant else 1.0

    @property
    def along_share(self) -> float:
        """The length of the stored change in the direction of the change, divided by the norm of the change: 1 if the
        change was stored exactly, 0 if all of it was rounded away.
        """
        return self.along / self.meant if self.meant else 1.0


class Converted(NamedTuple):
    """What `convert_checkpoint` wrote: the size of all tensors in bytes, and what arrived of each changed tensor."""

    nbytes: int
    arrived: dict[str, Arrived]


def convert_checkpoint(
    src: str | Path,
    dst: str | Path,
    format: Literal["bf16", "plain", "released"],
    shard_bytes: int = SHARD_BYTES,
    changes: Mapping[str, Change] | None = None,
    replace: bool = False,
    files: Mapping[str, str] | None = None,
    done: Callable[[float], None] = lambda share: None,
    ranks: RankGroup = ONE_RANK,
) -> Converted:
    """Convert the checkpoint folder `src` to another format and write it to `dst`.

    Format "bf16" unpacks the quantised weights of a quantised folder, and casts the matrices of a plain folder to bf16.
    Format "plain" writes fp32 matrices. Format "released" quantises the weights that the released checkpoint quantises.
    All other tensors stay as they are stored; drafter tensors and the files of the tokenizer are copied too.

    `changes` maps tensor names to changes. `files` maps names of small files beside the weights to their texts. `done`
    is called after each block of rows, with the share of all values that were read. `ranks`: the processes that convert
    the folder together; each converts a part of the rows, and the files are those that a single process would write.
    Raises the errors of `load_pretrained`, and ValueError if `dst` exists (unless `replace` is set) or if a tensor to
    change is missing or has another shape.
    """
    src, dst = Path(src), Path(dst)
    if format not in ("bf16", "plain", "released"):
        raise ValueError(f"format: {format!r} is unknown, allowed are 'bf16', 'plain' and 'released'")
    if dst.exists() and not replace:
        raise ValueError(f"{dst} already exists; choose a new folder")
    config = ModelConfig.load(src)
    skeleton = allocate_model(config, None, None, "meta", torch.float32)
    with open_checkpoint(src, config, list(released_tensors(skeleton))) as sources, whole_folder(dst, ranks) as work:
        sources = list(deal_rows(sources, ranks))
        arrived: dict[str, Arrived] = {}
        if changes:
            sources = _changed(sources, changes, arrived)
        sources = watched(sources, done)
        with_scales = {source.name for source in sources if source.scales is not None}
        dtype = torch.bfloat16 if format == "bf16" and not is_quantised(config.to_dict()) else None
        dtype = torch.float32 if format == "plain" else dtype
        layout = "released" if format == "released" else "plain"
        total = write_checkpoint(work, sources, with_scales, config, layout, dtype, shard_bytes, ranks)
        if ranks.rank == 0:
            for name in COMPANIONS:
                if (src / name).is_file():
                    shutil.copyfile(src / name, work / name)
            for name, text in (files or {}).items():
                (work / name).write_text(text, encoding="utf-8")
    gathered: dict[str, Arrived] = defaultdict(Arrived)
    for part in gather_objects(arrived, ranks):
        for name, share in part.items():
            gathered[name] += share
    return Converted(total, dict(gathered))


def watched(sources: list[TensorSource], done: Callable[[float], None]) -> list[TensorSource]:
    """The same tensors; `done` is called with the share of each block of rows that is read in the values of all whole
    tensors.
    """
    total = sum(math.prod(source.shape) for source in sources)

    def blocks(source: TensorSource) -> Iterator[Tensor]:
        for block in source.blocks():
            yield block
            done(block.numel() / total)

    return [source._replace(blocks=partial(blocks, source)) for source in sources]


def _changed(
    sources: list[TensorSource], changes: Mapping[str, Change], arrived: dict[str, Arrived]
) -> list[TensorSource]:
    """Apply changes to some of the tensors; changed tensors lose their kept scales, which are no longer valid. While
    the tensors are written, `arrived` is filled with what is stored of each change.
    """
    shapes = {source.name: source.shape for source in sources}
    for name, change in changes.items():
        if name not in shapes:
            raise ValueError(f"the checkpoint has no tensor {name} to change")
        if change.shape != shapes[name]:
            raise ValueError(f"{name} has shape {list(shapes[name])}, but its change is for shape {list(change.shape)}")
    return [
        _with_change(source, changes[source.name], arrived) if source.name in changes else source for source in sources
    ]


def _with_change(source: TensorSource, change: Change, arrived: dict[str, Arrived]) -> TensorSource:
    before = meant = torch.empty(0)
    arrived[source.name] = Arrived()

    def blocks() -> Iterator[Tensor]:
        nonlocal before, meant
        row = source.start
        for block in source.blocks():
            new = change.apply(slice(row, row + len(block)), block)
            before, meant = block.float(), (new.float() - block.float()).flatten()
            yield new.to(block.dtype)
            row += len(block)

    def stored_as(values: Tensor) -> None:
        stored = (values.float() - before).flatten()
        sums = [float(a.double() @ b.double()) for a, b in ((meant, meant), (stored, stored), (meant, stored))]
        arrived[source.name] += Arrived(*sums)

    return source._replace(blocks=blocks, scales=None, stored_as=stored_as)
