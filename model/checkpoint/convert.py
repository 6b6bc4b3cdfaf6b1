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
    """How much of an intended change of one or several tensors is found in their stored values, which are rounded.

    All fields are sums over the elements of the tensors. The stored change is the difference between the stored values
    after and before the change.
    meant: sum of the squares of the intended change.
    stored: sum of the squares of the stored change.
    along: sum of the products of intended and stored change.
    """

    meant: float = 0.0
    stored: float = 0.0
    along: float = 0.0

    def __add__(self, other: Arrived) -> Arrived:
        return Arrived(self.meant + other.meant, self.stored + other.stored, self.along + other.along)

    @property
    def norm_share(self) -> float:
        """The norm of the stored change divided by the norm of the intended change. Rounding adds noise to the stored
        change, so the quotient can be large although little of the change itself was stored; see `along_share`.
        """
        return math.sqrt(self.stored / self.meant) if self.meant else 1.0

    @property
    def along_share(self) -> float:
        """The length of the stored change projected onto the intended change, divided by the norm of the intended
        change: 1 if the change was stored exactly, 0 if all of it was rounded away.
        """
        return self.along / self.meant if self.meant else 1.0


class Converted(NamedTuple):
    """The result of `convert_checkpoint`: the size of all written tensors in bytes, and how much of each change was
    stored.
    """

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
    is called after each block of rows, with the block's fraction of all values. `ranks`: the processes that convert the
    folder together; each process converts a part of the rows, and the files equal those that a single process would
    write. Raises the errors of `load_pretrained`, and ValueError if `dst` exists (unless `replace` is set) or if a
    tensor to change is missing or has another shape.
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
    """Returns the same tensors, which call `done` after each block of rows that is read. `done` gets the block's
    fraction of the values of all whole tensors.
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
    """Apply changes to some of the tensors. The loaded scales of a changed tensor are dropped, because they are no
    longer valid. While the tensors are written, `arrived` records how much of each change is stored.
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
