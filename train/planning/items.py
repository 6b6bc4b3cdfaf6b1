"""The parameters of a job, and what one rank of a layout holds of them: weights, gradients and optimizer state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod

from torch import nn

from model import DeepseekV41, count
from model.checkpoint.load import parameter_packing
from model.moe import Experts
from model.quantize import Packing
from optim import Optimizer
from optim.muon import COEFFICIENTS
from optim.optimizer import STATE_KEYS
from optim.ownership import assign_owners
from train.config.schema import LoraConfig, ParallelConfig
from train.distributed.dense import matrices
from train.lora.targets import LORA_TARGETS

FP32 = 4
ADAPTER = "adapter"
# Groups of parameters that are held in the same way.
KINDS = ("dense", "experts", "Engram tables", "embedding and head", ADAPTER)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model. `part`: see `model.count.PARTS`, or "adapter"; `method`: of its update, None if
    it is not trained; `blocks`: the logical matrices (count, rows) that Muon updates one by one; `packing`: of a frozen
    weight that is kept as it is stored; `divided`: one of the matrices whose rows `parallel.dense_shards` divides.
    """

    name: str
    part: str
    shape: tuple[int, ...]
    method: str | None = None
    blocks: tuple[tuple[int, int], ...] | None = None
    packing: Packing | None = None
    divided: bool = False


@dataclass(frozen=True)
class Item:
    """One parameter as a rank of a layout holds it: `units` equal matrices of `numel` elements, held alike by `copies`
    ranks.

    `spans` are the logical matrices (count, rows, columns) of one unit, for Muon. `stored`: bytes of a unit that is
    kept packed; 0: fp32. `kept`: elements of the rows that a rank keeps of a divided matrix; 0: it is not divided.
    """

    kind: str
    method: str | None  # None: not trained
    units: int
    numel: int
    copies: int
    spans: tuple[tuple[int, int, int], ...]
    stored: int = 0
    kept: int = 0

    @property
    def weight_bytes(self) -> int:
        """Of all units."""
        return self.units * (self.stored or FP32 * (self.kept or self.numel))

    @property
    def gradient_bytes(self) -> int:
        """Of all units, fp32."""
        return FP32 * self.units * (self.kept or self.numel) * (self.method is not None)

    @property
    def state_bytes(self) -> int:
        """Optimizer state of one unit, fp32."""
        return FP32 * self.numel * len(STATE_KEYS[self.method]) if self.method else 0


def trained_parameters(model: nn.Module, optimizer: Optimizer) -> Iterator[Parameter]:
    """Every parameter of a model, the trained ones in the optimizer's order, which breaks ties between owners."""
    parameters = dict(model.named_parameters())
    ways = {
        name: (group["method"], blocks)
        for group in optimizer.param_groups
        for name, blocks in zip(group["names"], group["blocks"], strict=True)
    }
    blocks_of = model.layers if isinstance(model, DeepseekV41) else ()
    rows = {id(matrix) for block in blocks_of for matrix in matrices(block)}
    for name in [*ways, *(name for name in parameters if name not in ways)]:
        method, blocks = ways.get(name, (None, None))
        shape, divided = tuple(parameters[name].shape), id(parameters[name]) in rows
        yield Parameter(name, count.part_of(name), shape, method, blocks and tuple(blocks), divided=divided)


def frozen_parameters(model: nn.Module, packed: bool) -> Iterator[Parameter]:
    """Every parameter of a model that is not trained; with `packed` as the released layout stores it."""
    for name, parameter in model.named_parameters():
        packing = parameter_packing(name) if packed else None
        yield Parameter(name, count.part_of(name), tuple(parameter.shape), packing=packing)


def adapter_parameters(model: DeepseekV41, lora: LoraConfig) -> Iterator[Parameter]:
    """The factors that `train.lora.inject.add_adapter` adds, in fp32: A [rank, in] and B [out, rank] of a matrix, of
    each expert's three, and of an embedding [rows, dim] with A [rank, rows] and B [dim, rank].
    """
    patterns = [LORA_TARGETS[target] for target in lora.targets]
    for name, module in model.named_modules():
        if not any(re.fullmatch(pattern, name) for pattern in patterns):
            continue
        if isinstance(module, Experts):
            for weight in ("w1", "w2", "w3"):
                experts, rows, columns = getattr(module, weight).shape
                for factor, shape in (("A", (lora.rank, columns)), ("B", (rows, lora.rank))):
                    yield Parameter(f"{name}.{weight}.{factor}", ADAPTER, (experts, *shape), "adamw")
        else:
            rows, columns = module.weight.shape
            if isinstance(module, nn.Embedding):
                rows, columns = columns, rows
            yield Parameter(f"{name}.A", ADAPTER, (lora.rank, columns), "adamw")
            yield Parameter(f"{name}.B", ADAPTER, (rows, lora.rank), "adamw")


def stored_bytes(shape: Sequence[int], packing: Packing | None) -> int:
    """Bytes of codes and scales of a matrix [rows, columns], or a stack of them; 0 without packing."""
    if packing is None:
        return 0
    *stack, rows, columns = shape
    sizes = (
        prod(packing.codes_shape(rows, columns)) * packing.codes.itemsize,
        prod(packing.scale_shape(rows, columns)),
    )
    return prod(stack) * sum(sizes)


def rank_items(layout: ParallelConfig, parameters: Iterable[Parameter]) -> Iterator[Item]:
    """Every parameter as one rank holds it."""
    ranks = layout.world_size
    for p in parameters:
        *stack, rows, columns = (1, *p.shape) if len(p.shape) == 1 else p.shape
        if len(p.shape) == 3:  # of routed experts
            units, copies = stack[0] // layout.expert_parallel, ranks // layout.expert_parallel
            kind = ADAPTER if p.part == ADAPTER else "experts"
            stored = stored_bytes((rows, columns), p.packing)
            yield Item(kind, p.method, units, rows * columns, copies, ((1, rows, columns),), stored)
        elif p.part == "Engram tables" or (layout.shard_embeddings and p.part in ("embedding", "head")):
            rows = ceil(rows / layout.table_shards)
            copies = ranks // layout.table_shards
            kind = "Engram tables" if p.part == "Engram tables" else "embedding and head"
            stored = stored_bytes((rows, columns), p.packing)
            yield Item(kind, p.method, 1, rows * columns, copies, ((1, rows, columns),), stored)
        else:
            spans = tuple((n, height, columns) for n, height in p.blocks or ((1, rows),))
            kind = ADAPTER if p.part == ADAPTER else "dense"
            stored = stored_bytes((rows, columns), p.packing)
            kept = ceil(rows / layout.dense_shards) * columns if p.divided and layout.dense_shards > 1 else 0
            yield Item(kind, p.method, 1, rows * columns, ranks, spans, stored, kept)


def owned(items: Sequence[Item]) -> list[Item]:
    """What the fullest rank updates and keeps the state of: each part of a parameter is owned by one of the ranks that
    hold it, chosen by ``optim.ownership.assign_owners``.

    Ranks that hold the same part of a parameter with c copies are strided: rank r has copy r * c // (number of ranks).
    """
    trained = [item for item in items if item.method]
    ranks = max((item.copies for item in trained), default=1)
    holds: dict[tuple[int, int], list[Item]] = {}
    for copies in {item.copies for item in trained}:
        held = [item for item in trained if item.copies == copies]
        for item, owner in zip(
            held, assign_owners([item.units * item.state_bytes for item in held], copies), strict=True
        ):
            holds.setdefault((copies, owner), []).append(item)

    def of(rank: int) -> list[Item]:
        return [item for (copies, owner), held in holds.items() if owner == rank * copies // ranks for item in held]

    loads = {key: sum(item.units * item.state_bytes for item in held) for key, held in holds.items()}
    kinds = {copies for copies, _ in holds}
    return of(max(range(ranks), key=lambda rank: sum(loads.get((c, rank * c // ranks), 0) for c in kinds)))


def update_flops(item: Item, iterations: int) -> float:
    """FLOPs of one update of one unit. Muon: three products per Newton-Schulz step and logical matrix. Sinkhorn, per
    element: momentum 7, norms and squares 3, update 4, and 2 for each of its `iterations`. AdamW: 15 per element.
    """
    if item.method == "muon":
        sides = [(n, min(rows, columns), max(rows, columns)) for n, rows, columns in item.spans]
        return sum(len(COEFFICIENTS) * n * (4 * small**2 * large + 2 * small**3) for n, small, large in sides)
    return (14.0 + 2 * iterations if item.method == "sinkhorn" else 15.0) * item.numel
