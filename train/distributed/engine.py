"""Gradients and updates of a step over all processes. The only importer of DeepSpeed.

A single process computes as if this file did not exist, and imports no DeepSpeed. Several processes form a DeepSpeed
engine at ZeRO stage 0 (for its gradient sums over the ranks that hold the same parameter) with our own optimizer, whose
state is divided among them.
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

from model.packed import packed_weights_aside
from model.parallel.ranks import RankGroup
from train.distributed.launchers import ProcessInfo
from train.distributed.world import World


class Engine:
    """Gradients of a step: call ``backward`` once per micro-batch, then ``reduce``; ``step`` updates and clears
    them.
    """

    def __init__(self, world: World, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.world, self.optimizer = world, optimizer
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.deepspeed = _wrap(model, optimizer) if world.size > 1 else None

    def backward(self, loss: Tensor) -> None:
        """Add this rank's gradients. Nothing is sent, except what the model itself exchanges."""
        if self.deepspeed is None:
            loss.backward()
        else:
            self.deepspeed.backward(loss, scale_wrt_gas=False)

    def reduce(self) -> None:
        """Sum the gradients over the ranks that hold the same parameter. A parameter without a gradient on every rank
        stays without one; where only some ranks lack it, it counts as zero there.
        """
        if self.deepspeed is None:
            return
        present = torch.tensor([parameter.grad is not None for parameter in self.parameters], dtype=torch.int32)
        self.world.sum_(present)
        self.deepspeed.allreduce_gradients()
        for parameter, count in zip(self.parameters, present.tolist(), strict=True):
            if not count:
                parameter.grad = None
            elif parameter.grad is None:  # DeepSpeed skips a part without rows; its owner still steps
                parameter.grad = torch.zeros_like(parameter)

    def step(self) -> None:
        """Let the optimizer update, then clear the gradients."""
        if self.deepspeed is None:
            self.optimizer.step()
        else:
            self.deepspeed.step()
        self.optimizer.zero_grad(set_to_none=True)


def init_distributed(backend: str, device: str, timeout: timedelta) -> None:
    """Form the process group, as the environment variables of torchrun describe it."""
    deepspeed = _import_deepspeed(device)
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)


def make_groups(parts: int, process: ProcessInfo) -> tuple[RankGroup, RankGroup]:
    """(ranks among which a parameter with that many parts is split, ranks that hold the same part)."""
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
    """DeepSpeed's name for the ranks among which a parameter with that many parts is split."""
    return f"ep_size_{parts}"


def _import_deepspeed(device: str) -> Any:
    """DeepSpeed, without log output and compiled operators: none is used, and building them takes a minute."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    return deepspeed


def _wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """The DeepSpeed engine: it sums gradients (not averages), clips nothing, and knows which parameters are split."""
    import deepspeed

    split = [parameter for parameter in model.parameters() if hasattr(parameter, "shard")]
    for parameter in split:
        vars(parameter).update(allreduce=False, group_name=group_name(parameter.shard.ranks.size))
    config = {
        "train_micro_batch_size_per_gpu": 1,  # a placeholder; the engine only uses it for counting
        "gradient_accumulation_steps": 1,
        "gradient_allreduce_op": "sum",
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 0},
        "steps_per_print": 2**62,
    }
    with packed_weights_aside(model):  # the engine broadcasts every parameter; these come from the same files anyway
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    # Only DeepSpeed's own MoE layer sets this; without it the engine fails on a split parameter.
    engine.has_moe_layers = bool(split)
    engine.enable_backward_allreduce = False  # `Engine.reduce` does that, once a step
    return engine
