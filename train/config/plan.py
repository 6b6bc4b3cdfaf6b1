"""The ``plan`` section of the configuration: settings and assumptions of task=plan."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from train.config.strict import STRICT


@dataclass(config=STRICT, frozen=True)
class PlanConfig:
    """The kind of run for which task=plan computes memory and time, and the assumptions of the computation."""

    # The kind of run: train is task=pretrain or task=sft, with lora=... that of an adapter; distill is task=distill,
    # with its teacher; dspark is task=dspark, a drafter for a frozen model.
    job: Literal["train", "distill", "dspark"]
    # Also search other layouts: the one with the fewest GPUs (of parallel.gpu_memory_gib) that fits, and the fastest.
    search: bool
    max_gpus: PositiveInt  # largest number of GPUs in the layouts that search tries
    # Rows that a rank's experts receive in one layer, divided by the mean over ranks. Memory is planned for this load,
    # since no token is dropped.
    load_factor: Annotated[float, Field(ge=1)]
    reserve_gib: NonNegativeFloat  # memory in GiB that is left free on every GPU, for fragmentation and NCCL
