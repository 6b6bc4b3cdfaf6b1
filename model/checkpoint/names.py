"""Converts between tensor names in the released layout and in our state dicts, and names the files of a checkpoint
folder.

Our parameter names are the released ones, except that the experts of a layer are stacked in one tensor and the mHC
coefficients are a submodule.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.checkpoint.released import packing_of, tile_span
from model.parallel.ranks import ONE_RANK, RankGroup, rows_here

SCALES = "released_scales.tensors"  # a safetensors file that other programs' *.safetensors do not match

GENERATION = "generation_config.json"

MERGED = "merged_adapters.json"  # digests of the adapters that have been merged into the weights

# Small files that are copied along with weights
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    GENERATION,
    MERGED,
)

_STACKED = re.compile(r"(.*\.experts)\.(w[123])")

_MIX = re.compile(r"(.*)\.hc_(attn|ffn)\.(fn|base|scale)")

_EXPERT = re.compile(r"((?:layers|mtp)\.\d+\.ffn\.experts)\.(\d+)\.(w[123])\.weight")

_RELEASED_MIX = re.compile(r"((?:layers|mtp)\.\d+)\.hc_(attn|ffn)_(fn|base|scale)")


def released_names(name: str, shape: torch.Size) -> list[str]:
    """The released tensor names of one of our tensors: one name per expert for stacked experts, otherwise a single
    name.
    """
    if match := _STACKED.fullmatch(name):
        return [f"{match[1]}.{expert}.{match[2]}.weight" for expert in range(shape[0])]
    if match := _MIX.fullmatch(name):
        return [f"{match[1]}.hc_{match[2]}_{match[3]}"]
    return [name]


def own_state(released: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make a state dict with our names from plain tensors with released names; experts are stacked in the order of
    their numbers.
    """
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


class TensorShard(NamedTuple):
    """A tensor of the released layout, with the rows that this process holds: `tensor` contains these rows, the first
    of which is row `start` (`tensor` is None if the process holds no row).
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    tensor: Tensor | None
    start: int
    number: int  # position among all tensors of the model
    copies: RankGroup  # the processes that together hold all rows (or experts), each only once
    divided: bool = False  # the rows may begin or end inside a tile (see `Parallel.dense`); kept scales cover all rows

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + (0 if self.tensor is None else len(self.tensor)))

    @property
    def tiles(self) -> slice:
        """The rows of this process, extended to whole tiles (see `packing_of`)."""
        packing = packing_of(self.name) if self.divided else None
        height = 1 if packing is None else packing.tile_rows
        return slice(
            self.rows.start // height * height, min(-(-self.rows.stop // height) * height, (*self.shape, 1)[0])
        )

    def written_by(self, ranks: RankGroup) -> bool:
        """Whether this process writes its rows to the file; exactly one of all processes that hold the same rows writes
        them.
        """
        if self.tensor is None:
            return False
        others = ranks.size // self.copies.size
        return self.number % others == ranks.rank // self.copies.size


def released_tensors(model: nn.Module) -> Iterator[TensorShard]:
    """Yield all tensors of a checkpoint of the whole model, in the order of the model; stacked experts are yielded one
    by one.
    """
    number = 0
    for name, tensor in model.state_dict(keep_vars=True).items():
        shard, divided = getattr(tensor, "shard", None), hasattr(tensor, "to_local")
        tensor = rows_here(tensor)
        start, total = (0, len(tensor)) if shard is None else (shard.start, shard.total)
        shape = (total, *tensor.shape[1:])
        ranks = ONE_RANK if shard is None else shard.ranks
        if not _STACKED.fullmatch(name):
            found = [(shape, tensor if len(tensor) or divided else None, start)]
        else:
            found = [
                (shape[1:], tensor[expert - start] if 0 <= expert - start < len(tensor) else None, 0)
                for expert in range(total)
            ]
        for released, (whole, part, first) in zip(released_names(name, torch.Size(shape)), found, strict=True):
            yield TensorShard(released, tuple(whole), tensor.dtype, part, first, number, ranks, divided)
            number += 1


def check_packable(model: nn.Module) -> None:
    """Raise ValueError that lists every weight whose shape cannot be quantised in the released layout."""
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
    """Yield the quantisation scales in `model.released_scales` as tensor shards, each with the name of its weight."""
    kept = getattr(model, "released_scales", {})
    for part in released_tensors(model) if kept else ():
        if part.name in kept:
            packing = packing_of(part.name)
            first = 0 if part.divided else tile_span(part.rows, packing).start
            copies = ONE_RANK if part.divided else part.copies
            shape = packing.scale_shape(*part.shape)
            yield part._replace(shape=shape, tensor=kept[part.name], start=first, copies=copies)


def allocate_scales(model: nn.Module, names: Container[str]) -> None:
    """Allocate uninitialised quantisation scales in `model.released_scales`, for the rows of some weights that this
    process holds.
    """
    model.released_scales = {  # type: ignore[assignment]
        part.name: torch.empty(
            packing_of(part.name).scale_shape(*(part.shape if part.divided else part.tensor.shape)),
            dtype=torch.float8_e8m0fnu,
        )
        for part in (released_tensors(model) if names else ())
        if part.name in names and part.tensor is not None
    }
