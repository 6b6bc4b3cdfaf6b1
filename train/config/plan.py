"""The ``plan`` section: what task=plan computes, and what it assumes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from train.config.strict import STRICT


@dataclass(config=STRICT, frozen=True)
class PlanConfig:
    """What task=plan computes, and what it assumes."""

    # Whose memory and time: train is pre-training, task=sft and, with lora=..., an adapter; distill adds the teacher of
    # task=distill; dspark is a drafter beside a frozen model.
    job: Literal["train", "distill", "dspark"]
    # Also try other layouts for this job: the fewest GPUs of parallel.gpu_memory_gib that it fits on, and the fastest.
    search: bool
    max_gpus: PositiveInt  # of the layouts that search tries
    # Rows that a rank's experts receive in one layer, over the mean of all ranks. Memory is planned for this many,
    # since no token is dropped.
    load_factor: Annotated[float, Field(ge=1)]
    reserve_gib: NonNegativeFloat  # kept free on every GPU for the allocator's gaps and the buffers of NCCL
