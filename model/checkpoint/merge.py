"""Computes the weighted average of several checkpoints of one model, tensor by tensor, with only a few rows of each
checkpoint in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from model.build import allocate_model
from model.checkpoint.convert import watched
from model.checkpoint.load import open_checkpoint
from model.checkpoint.names import released_tensors
from model.checkpoint.released import TensorSource, deal_rows
from model.checkpoint.save import SHARD_BYTES, whole_folder, write_checkpoint
from model.config import ModelConfig
from model.parallel.ranks import ONE_RANK, RankGroup

Sources = Mapping[str, TensorSource]  # every tensor of a checkpoint by its released name


@contextmanager
def open_folder(folder: str | Path) -> Iterator[Sources]:
    """Yield the tensors of a checkpoint folder by name, in the order of the model, with drafter tensors (`mtp.*`) last.
    Raises the errors of `load_pretrained`.
    """
    config = ModelConfig.load(folder)
    held = list(released_tensors(allocate_model(config, None, None, "meta", torch.float32)))
    with open_checkpoint(folder, config, held) as sources:
        found = {source.name: source for source in sources}
        yield {name: found[name] for name in dict.fromkeys([*(part.name for part in held), *found])}


def merge_checkpoints(
    checkpoints: Sequence[Sources],
    weights: Sequence[float],
    config: ModelConfig,
    dst: str | Path,
    format: Literal["plain", "released"] = "plain",
    companions: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    done: Callable[[float], None] = lambda share: None,
    ranks: RankGroup = ONE_RANK,
) -> tuple[int, list[str]]:
    """Write the weighted sum of checkpoints to the folder `dst`. Each tensor is computed in fp64 and rounded to the
    widest dtype in which one of the checkpoints stores it. A checkpoint with weight 0 is ignored.

    `checkpoints` contain all tensors of the model that `config` describes; a drafter tensor is merged if all
    checkpoints have it, and left out otherwise. `companions` maps names of small files beside the weights to their
    texts. `done` and `ranks` have the same meaning as in `convert_checkpoint`. Returns the total size of all tensors in
    bytes, and the names of the tensors left out. Raises ValueError if a merged value is not finite; in this case `dst`
    is not written.
    """
    weighted = [(weight, sources) for weight, sources in zip(weights, checkpoints, strict=True) if weight]
    shared = [name for name in checkpoints[0] if all(name in sources for sources in checkpoints)]
    left_out = sorted({name for sources in checkpoints for name in sources} - set(shared))
    own = [name for name in left_out if not name.startswith("mtp.")]
    assert not own, f"not in every checkpoint: {own}"
    dealt = [[*deal_rows((sources[name] for name in shared), ranks)] for _, sources in weighted]
    shares = [weight for weight, _ in weighted]
    merged = watched([_merged([*zip(shares, same, strict=True)]) for same in zip(*dealt, strict=True)], done)
    with_scales = {source.name for source in merged if source.scales is not None}
    with whole_folder(Path(dst), ranks) as work:
        size = write_checkpoint(work, merged, with_scales, config, format, None, shard_bytes, ranks)
        for name, text in (companions or {}).items() if ranks.rank == 0 else ():
            (work / name).write_text(text, encoding="utf-8")
    return size, left_out


def _merged(weighted: list[tuple[float, TensorSource]]) -> TensorSource:
    """The weighted sum of one tensor. The sum keeps the quantisation scales of the first checkpoint, so that tiles that
    these scales represent exactly keep their bytes.
    """
    sources = [source for _, source in weighted]
    first = sources[0]

    def blocks() -> Iterator[Tensor]:
        for pieces in zip(*(source.blocks() for source in sources), strict=True):
            products = [piece.double() * weight for piece, (weight, _) in zip(pieces, weighted, strict=True)]
            total = functools.reduce(torch.add, products)
            if not total.isfinite().all():
                raise ValueError(f"{first.name} of the merged checkpoint has a NaN or infinite value")
            yield total

    scales = first.scales if all(source.scales is not None for source in sources) else None
    dtype = functools.reduce(torch.promote_types, [source.dtype for source in sources])
    return TensorSource(first.name, first.shape, dtype, blocks, scales, first.start)
