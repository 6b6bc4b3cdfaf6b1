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
    """Which drafter is trained for speculative decoding, and with which losses."""

    # Shape of a new drafter, as keys of model.text_config (SHAPE). Null: continue training the drafter in init_from, or
    # if that holds none, train a new one of the shape that its config.json gives.
    drafter: dict[str, Any] | None
    tokens_per_anchor: PositiveInt  # one draft block per this many supervised positions; drawn anew for each row
    ce: NonNegativeFloat  # weight of the drafter's cross-entropy on the true tokens
    l1: NonNegativeFloat  # weight of the L1 distance between the drafter's and the backbone's token distribution
    confidence: NonNegativeFloat  # weight of the loss of the confidence head, which predicts acceptance
    detach_confidence: bool  # let the confidence loss train only the confidence head, not the rest of the drafter
    # With data.answers=own: the most tokens of a generated answer, the temperature of its draws, and how many answers a
    # process generates at once.
    answer_tokens: PositiveInt
    answer_temperature: NonNegativeFloat
    answer_batch: PositiveInt

    @property
    def objective(self) -> DraftObjective:
        return DraftObjective(self.ce, self.l1, self.confidence, self.detach_confidence)


def with_drafter(model: Mapping[str, Any], drafter: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model configuration (released JSON layout) with its drafter keys replaced by `drafter`.

    Raises:
        ValueError: `drafter` has unknown keys; the message names them.
    """
    if unknown := sorted(set(drafter) - set(SHAPE)):
        raise ValueError(f"unknown keys: {', '.join(unknown)}; the known keys are {', '.join(SHAPE)}")
    text = {**model["text_config"], **drafter}
    layers, stages = text["num_hidden_layers"], text.get("num_nextn_predict_layers", 0)
    text["compress_ratios"] = [*text["compress_ratios"][:layers], *[0] * stages]  # drafter layers have only a window
    return {**model, "text_config": text}
