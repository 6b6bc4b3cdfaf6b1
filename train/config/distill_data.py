"""The ``distill_data`` section of a run's configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from train.config.strict import STRICT


@dataclass(config=STRICT, frozen=True)
class DistillDataConfig:
    """The teacher of task=distill_data, and how the student learns from the teacher.

    The loss of a token is (1 - weight) times the cross-entropy on the text plus weight times KL(teacher || student).
    """

    teacher: str  # checkpoint of the teacher, named as in init_from; its tokenizer must be the student's
    weight: Annotated[float, Field(ge=0, le=1)]  # weight of the teacher; 0: the text alone, for comparison
    # Compare only the teacher's likeliest k tokens, and all others together as one; null: the whole vocabulary.
    top_k: PositiveInt | None
