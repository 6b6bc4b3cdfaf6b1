"""Computes the plan of one layout: memory for each term, bytes sent, FLOPs and seconds of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import cast

from model import DeepseekV41
from optim.optimizer import STATE_KEYS
from train.config.schema import Config, ParallelConfig
from train.planning.items import KINDS, Item, owned, rank_items, update_flops
from train.planning.job import Job, as_planned, job_of, settings
from train.planning.memory import (
    host_bytes,
    micro_batches,
    optimizer_working_bytes,
    tokens_per_pass,
    working_bytes,
)
from train.planning.traffic import Sent, StepTime, sent_in_step, step_time

GIB = 2**30
RESERVE = "reserve"


@dataclass(frozen=True)
class ResourcePlan:
    """The results of a plan. Bytes and FLOPs are those of one optimizer step on the rank that needs the most memory."""

    config: Config
    job: Job
    weights: dict[str, int]
    gradients: dict[str, int]
    state: dict[str, int]  # bytes of optimizer state, by optimizer method
    working: dict[str, float]  # needed in the backward pass, but not during the update
    optimizer_working: float  # needed during the update only
    sent: dict[str, Sent]  # bytes that a rank sends in a step
    useful_flops: float  # FLOPs of a rank in a step, without recomputation
    again_flops: float
    optimizer_flops: dict[str, float]  # FLOPs of the update, by optimizer method

    @property
    def model(self) -> DeepseekV41:
        return self.job.model

    @property
    def traffic(self) -> dict[str, float]:
        """Bytes that a rank sends in a step, by kind of data."""
        return {kind: part.size for kind, part in self.sent.items()}

    @property
    def held(self) -> int:
        """Bytes of weights, gradients and optimizer state, which are in memory at all times, on the rank that needs the
        most memory.
        """
        return sum(map(sum, (part.values() for part in (self.weights, self.gradients, self.state))))

    @property
    def reserve(self) -> float:
        """Bytes that are left free for fragmentation of the allocator and for NCCL."""
        return settings(self.config).reserve_gib * GIB

    @cached_property
    def terms(self) -> dict[str, float]:
        """Peak memory in bytes of the rank that needs the most memory, for each kind of memory."""
        fixed: dict[str, float] = {f"weights: {k}": v for k, v in self.weights.items()}
        fixed |= {f"gradients: {k}": v for k, v in self.gradients.items()}
        fixed |= {f"optimizer state: {k}": v for k, v in self.state.items()}
        if sum(self.working.values()) >= self.optimizer_working:
            fixed |= self.working
        else:
            fixed |= {"optimizer's working copies": self.optimizer_working}
        return fixed | {f"{RESERVE}: allocator, NCCL": self.reserve}

    @property
    def host(self) -> float:
        """Bytes of host memory that ``runtime.offload`` uses on each rank."""
        return host_bytes(self.config, self.job)

    @property
    def total(self) -> float:
        return sum(self.terms.values())

    @property
    def step_flops(self) -> float:
        """FLOPs that a rank computes for the model in a step."""
        return self.useful_flops + self.again_flops

    @property
    def step_tokens(self) -> int:
        """Number of tokens that all ranks train on in a step."""
        return self.config.task.seq_len * cast(int, self.config.task.global_batch_rows)

    @cached_property
    def time(self) -> StepTime:
        flops = self.step_flops + sum(self.optimizer_flops.values())
        offloaded = self.host * micro_batches(self.config)
        return step_time(flops, self.sent, offloaded, self.config.parallel.hardware)

    def tokens_per_second(self, seconds: float) -> float:
        """Return the tokens per second of all GPUs together if a step takes ``seconds``."""
        return self.step_tokens / seconds

    def mfu(self, seconds: float) -> float:
        """Return the model FLOPs utilisation if a step takes ``seconds``.

        The utilisation is the useful FLOPs of a step divided by the FLOPs that a GPU can compute in ``seconds`` at its
        peak rate (``parallel.hardware.peak_tflops``).
        """
        return self.useful_flops / (seconds * self.config.parallel.hardware.peak_tflops * 1e12)

    @property
    def fits(self) -> bool:
        room = self.config.parallel.gpu_memory_gib
        return room is None or self.total <= room * GIB


@dataclass(frozen=True)
class Holdings:
    """The fields of a ``ResourcePlan`` that do not depend on the number of tokens in a step, and the items that a rank
    holds.
    """

    items: list[Item]
    weights: dict[str, int]
    gradients: dict[str, int]
    state: dict[str, int]
    optimizer_working: float
    optimizer_flops: dict[str, float]


@lru_cache(maxsize=64)
def holdings(layout: ParallelConfig, job: Job, iterations: int) -> Holdings:
    """Compute the ``Holdings`` of a rank for a layout. ``iterations``: number of Sinkhorn iterations in an optimizer
    update.
    """
    items = list(rank_items(layout, job.parameters))
    weights, gradients = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    for item in items:
        weights[item.kind] += item.weight_bytes
        gradients[item.kind] += item.gradient_bytes
    if job.teacher_bytes:
        weights["teacher"] = job.teacher_bytes
    mine = owned(items)
    state, flops = dict.fromkeys(STATE_KEYS, 0), dict.fromkeys(STATE_KEYS, 0.0)
    for item in mine:
        assert item.method is not None, "a parameter with an owner must be trained"
        state[item.method] += item.units * item.state_bytes
        flops[item.method] += item.units * update_flops(item, iterations)
    return Holdings(items, weights, gradients, state, optimizer_working_bytes(mine), flops)


def plan(config: Config, job: Job | None = None) -> ResourcePlan:
    """Compute the plan for the model, the optimizer, the task sizes and the section ``parallel`` of ``config``.
    ``job``: the result of ``job_of`` for this configuration, or for one that differs only in the layout; if None, the
    job is built here.
    """
    config = as_planned(config)
    job = job or job_of(config)
    found = holdings(replace(config.parallel, context_parallel=1), job, config.optim.settings.sinkhorn.iterations)
    local = tokens_per_pass(config) * micro_batches(config)
    again = sum(cost.recomputed for cost in job.costs.values()) * config.runtime.recompute
    return ResourcePlan(
        config=config,
        job=job,
        weights=found.weights,
        gradients=found.gradients,
        state=found.state,
        working=working_bytes(config, job),
        optimizer_working=found.optimizer_working,
        sent=sent_in_step(config, job, found.items),
        useful_flops=local * sum(cost.step for cost in job.costs.values()),
        again_flops=local * again,
        optimizer_flops=found.optimizer_flops,
    )
