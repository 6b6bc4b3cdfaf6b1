"""Splits the dense matrices of the blocks over sets of G ranks with PyTorch's FSDP2 (``fully_shard``).

Each rank holds ``1/G`` of the rows of each matrix, in fp32. The matrices of a block are gathered (in bf16, if matrix
products are computed in bf16) while the previous block computes, and freed after the block has run. In the backward
pass the matrices of a block are gathered again, and the gradients of a block are summed over the G ranks as soon as
they are complete. With several sets of G ranks, the gradients of a step are then summed over the sets.

DeepSpeed (``engine.py``) handles all other parameters: experts and tables, which are split over ranks in another way;
parameters that are small or used in fp32 (norms, routers, mixing weights of the residual streams, attention sinks); and
the vision tower, which runs only on ranks that have images.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from model import DeepseekV41
from model.attention import GroupedLinear
from model.parallel.ranks import RankGroup, row_shard

ENTRIES = ("prefill_kv",)  # methods of a block, besides `forward`, that use its matrices


def matrices(block: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the matrices of a block that are split over ranks: the weights of the projections in the block."""
    for module in block.modules():
        if isinstance(module, nn.Linear | GroupedLinear):
            yield cast(nn.Parameter, module.weight)


def shard_dense(model: DeepseekV41, mesh: DeviceMesh, ranks: RankGroup, bf16: bool) -> None:
    """Split the matrices of the blocks, in place, over ``ranks``: the ranks along the axis ``parts`` of ``mesh``.

    Each matrix becomes a ``DTensor`` with an attribute ``shard``. Call this function before the optimizer is built, on
    a model whose parameters have the same values on every rank.

    bf16: whether the gathered matrices are bf16. Gradients are summed in fp32 in any case.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in model.layers:
        kept = set(matrices(block))
        others = {parameter for parameter in block.parameters() if parameter not in kept}
        unit = fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=others)
        # FSDP2 would take the mean over the ranks; the losses are divided by the counts of the whole step already.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        for name in ENTRIES:
            register_fsdp_forward_method(block, name)
        for parameter in matrices(block):
            parameter.shard = row_shard(parameter.shape[0], ranks)  # type: ignore[attr-defined]
    # FSDP2 gathers nothing for the model itself. With the model as root, a block's gather starts in the block before.
    fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=set(model.parameters()))
    register_fsdp_forward_method(model, "run_backbone")
    # FSDP2 takes the first module that runs for the root; in generation that would be a block.
    fully_shard.state(model)._lazy_init()  # type: ignore[attr-defined]


def sum_between_sets(model: nn.Module, wanted: bool) -> None:
    """Set whether the next backward pass also sums gradients over the sets of ranks, not only inside each set.

    The last backward pass of a step must sum gradients over the sets.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(wanted)
