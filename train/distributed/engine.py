"""Computes the gradients and the update of an optimizer step over all processes. Only this file imports DeepSpeed.

A single process does not use DeepSpeed. Several processes use a DeepSpeed engine at ZeRO stage 0, which sums gradients
over the ranks that hold the same parameter. The optimizer of the package ``optim`` divides its state among the
processes without DeepSpeed.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from model.packed import packed_weights_aside
from model.parallel.ranks import RankGroup
from optim import Optimizer
from train.distributed.dense import sum_between_sets
from train.distributed.launchers import ProcessInfo
from train.distributed.world import World


class Engine:
    """Computes the gradients of a step: ``backward`` once per micro-batch, then ``reduce`` once, then ``step``."""

    def __init__(self, world: World, model: nn.Module, optimizer: Optimizer):
        self.world, self.model, self.optimizer = world, model, optimizer
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        self.parameters = [parameter for parameter in trained if not isinstance(parameter, DTensor)]
        self.deepspeed = _wrap(model, optimizer) if world.size > 1 else None

    def backward(self, loss: Tensor, last: bool) -> None:
        """Compute the gradients of a micro-batch on this rank and add them to the gradients of the step. ``last``:
        whether this is the last micro-batch of the step. This method does not exchange gradients between ranks, except
        the gradients of matrices whose rows are divided (``dense.py``).
        """
        if self.deepspeed is None:
            loss.backward()
        else:
            sum_between_sets(self.model, last)
            self.deepspeed.backward(loss, scale_wrt_gas=False)

    def present(self) -> Tensor:
        """Return int64 [parameters], on the parameters' device: 1 for each parameter that has a gradient on this rank,
        otherwise 0. The caller sums this tensor over all ranks together with other numbers and passes the sum to
        ``reduce``.
        """
        device = self.parameters[0].device if self.parameters else None
        return torch.tensor([parameter.grad is not None for parameter in self.parameters], dtype=torch.int64).to(device)

    def reduce(self, present: Tensor) -> None:
        """Sum the gradient of each parameter over the ranks that hold the parameter.

        present: the sum of ``present()`` over all ranks.

        If a parameter has a gradient on only some ranks, its gradient counts as zero on the other ranks. A parameter
        that has a gradient on no rank still has no gradient afterwards. The gradient of a matrix whose rows are divided
        is sent to the rank that owns the matrix.
        """
        if self.deepspeed is None:
            return
        self.deepspeed.allreduce_gradients()
        for parameter, count in zip(self.parameters, present.tolist(), strict=True):
            if not count:
                parameter.grad = None
            elif parameter.grad is None:  # DeepSpeed skips parts without rows; the optimizer does not
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.collect_gradients()

    def step(self) -> None:
        """Update the parameters with the optimizer, then delete the gradients."""
        if self.deepspeed is None:
            self.optimizer.step()
        else:
            self.deepspeed.step()
        self.optimizer.zero_grad(set_to_none=True)


def init_distributed(backend: str, device: str, timeout: timedelta) -> None:
    """Create the default process group from the environment variables that torchrun sets (RANK, WORLD_SIZE, ...)."""
    deepspeed = _import_deepspeed(device)
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)


def make_groups(parts: int, process: ProcessInfo) -> tuple[RankGroup, RankGroup]:
    """Create the process groups for parameters that are split into ``parts`` parts.

    Returns two groups of ranks: the ranks that hold the different parts of a split parameter, and the ranks that hold
    the same part as this rank.
    """
    from deepspeed.utils import groups

    if parts == 1:
        return RankGroup(), RankGroup(cast(dist.ProcessGroup, dist.group.WORLD), process.rank, process.size)
    name = group_name(parts)
    groups._create_expert_and_data_parallel(parts)
    return (
        RankGroup(groups._get_expert_parallel_group(name), process.rank % parts, parts),
        RankGroup(groups._get_expert_data_parallel_group(name), process.rank // parts, process.size // parts),
    )


def group_name(parts: int) -> str:
    """Return DeepSpeed's name for the process group of parameters that are split into ``parts`` parts."""
    return f"ep_size_{parts}"


def _import_deepspeed(device: str) -> Any:
    """Import DeepSpeed without its log output and its compiled operators, which would take a minute to build."""
    os.environ["DS_ACCELERATOR"] = device  # the run decides, whatever a shell has left there
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    return deepspeed


def _wrap(model: nn.Module, optimizer: Optimizer) -> Any:
    """Create the DeepSpeed engine, which sums the gradients of all parameters without averaging or clipping."""
    import deepspeed

    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        # FSDP2 sums the gradients of divided matrices, and DeepSpeed's engine fails on a model with modules of FSDP2.
        model = nn.ParameterList(p for p in model.parameters() if not isinstance(p, DTensor))
    split = [parameter for parameter in model.parameters() if hasattr(parameter, "shard")]
    for parameter in split:
        vars(parameter).update(allreduce=False, group_name=group_name(parameter.shard.ranks.size))
    config = {
        "train_micro_batch_size_per_gpu": 1,  # required by DeepSpeed, which uses it only for its own counters
        "gradient_accumulation_steps": 1,
        "gradient_allreduce_op": "sum",
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 0},
        "steps_per_print": 2**62,
    }
    # DeepSpeed broadcasts every parameter from rank 0. Packed weights need no broadcast: all ranks read the same files.
    with packed_weights_aside(model):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    # Normally DeepSpeed's own MoE layer sets this flag; without it the engine fails on a split parameter.
    engine.has_moe_layers = bool(split)
    engine.enable_backward_allreduce = False  # `Engine.reduce` sums the gradients once a step
    return engine
