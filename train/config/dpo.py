"""The ``dpo`` section of a run's configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass

from train.config.strict import STRICT


@dataclass(config=STRICT, frozen=True)
class DpoConfig:
    """The objective of task=dpo (Rafailov et al., 2023, arXiv 2305.18290)."""

    beta: PositiveFloat  # scale of the log-probability ratios in the loss; a larger value keeps the policy nearer
    # Assumed share of pairs whose chosen and rejected answer are swapped (conservative DPO); 0: none.
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)]
