"""The ``dspark`` section of a run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from model import DraftObjective
from train.config.strict import STRICT

# The keys of model.text_config that describe a drafter.
SHAPE = (
    "num_nextn_predict_layers",
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
)


@dataclass(config=STRICT, frozen=True)
class DsparkConfig:
    """Which drafter is trained, and on what."""

    # A new drafter, by keys of model.text_config (SHAPE); null: the one that init_from holds is trained on, or, if it
    # holds none, a new one of the shape that its config.json names.
    drafter: dict[str, Any] | None
    tokens_per_anchor: PositiveInt  # one draft block for every so many supervised positions, drawn anew for every row
    ce: NonNegativeFloat  # weight of the cross-entropy of the true tokens
    l1: NonNegativeFloat  # weight of the L1 distance from the backbone's distribution
    confidence: NonNegativeFloat  # weight of the confidence's error
    detach_confidence: bool  # the confidence loss trains the confidence head only

    @property
    def objective(self) -> DraftObjective:
        return DraftObjective(self.ce, self.l1, self.confidence, self.detach_confidence)


def with_drafter(model: Mapping[str, Any], drafter: Mapping[str, Any]) -> dict[str, Any]:
    """The model configuration (released JSON layout) with its drafter keys replaced by `drafter`.

    Raises ValueError that names unknown keys.
    """
    if unknown := sorted(set(drafter) - set(SHAPE)):
        raise ValueError(f"no such key: {', '.join(unknown)}; known are {', '.join(SHAPE)}")
    text = {**model["text_config"], **drafter}
    layers, stages = text["num_hidden_layers"], text.get("num_nextn_predict_layers", 0)
    text["compress_ratios"] = [*text["compress_ratios"][:layers], *[0] * stages]  # drafter layers have only a window
    return {**model, "text_config": text}
