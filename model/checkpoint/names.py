"""Names: of tensors in the released layout and in our state dicts, and of the files of a checkpoint folder.

Our parameter names are the released ones except that a layer's experts are stacked and an mHC mix is a submodule.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.checkpoint.released import packing_of, tile_span
from model.parallel.ranks import ONE_RANK, RankGroup

SCALES = "released_scales.tensors"  # a safetensors file; the name keeps it out of other programs' *.safetensors

GENERATION = "generation_config.json"

MERGED = "merged_adapters.json"  # digests of the adapters that have been merged into the weights

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    GENERATION,
    MERGED,
)  # small files that come along with weights

_STACKED = re.compile(r"(.*\.experts)\.(w[123])")

_MIX = re.compile(r"(.*)\.hc_(attn|ffn)\.(fn|base|scale)")

_EXPERT = re.compile(r"((?:layers|mtp)\.\d+\.ffn\.experts)\.(\d+)\.(w[123])\.weight")

_RELEASED_MIX = re.compile(r"((?:layers|mtp)\.\d+)\.hc_(attn|ffn)_(fn|base|scale)")


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
        return slice(self.start, self.start + (0 if self.tensor is None else len(self.tensor)))

    def written_by(self, ranks: RankGroup) -> bool:
        """Whether this process writes the rows: of several that hold the same rows, exactly one does."""
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
        ranks = ONE_RANK if shard is None else shard.ranks
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
    model.released_scales = {  # type: ignore[assignment]
        part.name: torch.empty(packing_of(part.name).scale_shape(*part.tensor.shape), dtype=torch.float8_e8m0fnu)
        for part in (released_tensors(model) if names else ())
        if part.name in names and part.tensor is not None
    }
