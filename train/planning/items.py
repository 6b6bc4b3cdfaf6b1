"""Lists the parameters of a run, and computes the bytes of weights, gradients and optimizer state on one rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod

from torch import nn

from model import DeepseekV41, count
from model.build import is_table
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
# Kinds of parameters; all parameters of a kind are split over ranks in the same way.
KINDS = ("dense", "experts", "Engram tables", "embedding and head", ADAPTER)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model, before the parameter is split over ranks.

    - part: a name in `model.count.PARTS`, or "adapter";
    - method: the optimizer method that updates the parameter; None if the parameter is not trained;
    - blocks: the matrices that Muon updates separately: a pair (n, rows) stands for n matrices with ``rows`` rows each;
    - packing: the packed format of a frozen weight in memory; None if the weight is not packed;
    - divided: whether the rows of the parameter are split over `parallel.dense_shards` ranks.
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
    """The part of a parameter that one rank holds: `units` matrices of equal size with `numel` elements each.

    - kind: an element of `KINDS`, which says how the parameter is split over ranks;
    - units: number of matrices that the rank holds: one per expert on the rank for a weight of routed experts,
      otherwise 1;
    - copies: number of ranks that hold the same matrices;
    - spans: (count, rows, columns) of the submatrices of one matrix that Muon updates separately;
    - stored: bytes of one matrix in its packed format; 0 if the matrix is stored in fp32;
    - kept: number of elements that a rank stores of a matrix whose rows are divided; 0 if the rows are not divided.
    """

    kind: str
    method: str | None  # optimizer method; None if the parameter is not trained
    units: int
    numel: int
    copies: int
    spans: tuple[tuple[int, int, int], ...]
    stored: int = 0
    kept: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of all matrices of this item together."""
        return self.units * (self.stored or FP32 * (self.kept or self.numel))

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the fp32 gradients of all matrices of this item together; 0 if the parameter is not trained."""
        return FP32 * self.units * (self.kept or self.numel) * (self.method is not None)

    @property
    def state_bytes(self) -> int:
        """Bytes of the fp32 optimizer state of one of the `units` matrices of this item; 0 if the parameter is not
        trained.
        """
        return FP32 * self.numel * len(STATE_KEYS[self.method]) if self.method else 0


def trained_parameters(model: nn.Module, optimizer: Optimizer) -> Iterator[Parameter]:
    """Yield every parameter of a model, first the trained ones in the order of the optimizer.

    The order matters, because the optimizer assigns parameters of equal size to owners in this order.
    """
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


def frozen_parameters(model: nn.Module, packed: bool, tables_on_host: bool = False) -> Iterator[Parameter]:
    """Yield every parameter of a frozen model that is in device memory. packed: whether the weights stay in the
    quantised formats of the released checkpoint. tables_on_host: whether Engram tables stay in host memory; if so, the
    tables are left out.
    """
    for name, parameter in model.named_parameters():
        if tables_on_host and is_table(name):
            continue
        packing = parameter_packing(name) if packed else None
        yield Parameter(name, count.part_of(name), tuple(parameter.shape), packing=packing)


def adapter_parameters(model: DeepseekV41, lora: LoraConfig) -> Iterator[Parameter]:
    """Yield the LoRA factors (fp32) that `train.lora.inject.add_adapter` would add to a model.

    A matrix [out, in] gets the factors A [rank, in] and B [out, rank], and so does each of the three matrices of an
    expert. An embedding [rows, dim] gets the factors A [rank, rows] and B [dim, rank].
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
    """Return the bytes of the codes and scales of a packed matrix [rows, columns] or of a stack of packed matrices [n,
    rows, columns]. Returns 0 if `packing` is None, for an unpacked weight.
    """
    if packing is None:
        return 0
    *stack, rows, columns = shape
    sizes = (
        prod(packing.codes_shape(rows, columns)) * packing.codes.itemsize,
        prod(packing.scale_shape(rows, columns)),
    )
    return prod(stack) * sum(sizes)


def rank_items(layout: ParallelConfig, parameters: Iterable[Parameter]) -> Iterator[Item]:
    """Yield, for every parameter, the `Item` that describes the part of the parameter that one rank holds."""
    ranks = layout.world_size
    for p in parameters:
        *stack, rows, columns = (1, *p.shape) if len(p.shape) == 1 else p.shape
        if len(p.shape) == 3:  # weights of routed experts
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
    """Return the items that the rank with the most optimizer state owns, and therefore updates.

    Each part of a parameter is owned by one of the ranks that hold it, chosen by ``optim.ownership.assign_owners``. If
    a part has c copies, rank r of R ranks holds copy number r * c // R.
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
    """Estimate the FLOPs of one optimizer update of one of the `units` matrices of an item.

    Muon takes three matrix products per Newton-Schulz iteration and matrix. Sinkhorn balancing takes, per element, 7
    FLOPs for momentum, 3 for norms and squares, 4 for the update, and 2 for each of its `iterations`. AdamW takes 15
    FLOPs per element.
    """
    if item.method == "muon":
        sides = [(n, min(rows, columns), max(rows, columns)) for n, rows, columns in item.spans]
        return sum(len(COEFFICIENTS) * n * (4 * small**2 * large + 2 * small**3) for n, small, large in sides)
    return (14.0 + 2 * iterations if item.method == "sinkhorn" else 15.0) * item.numel
