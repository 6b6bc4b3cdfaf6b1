"""The training losses of a micro-batch from what the blocks report, and the counts that a step divides them by.

Shapes: T tokens of the layout, K `index_topk`, E experts, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from model.config import LossWeights, TextConfig
from model.indexer import IndexerLossInputs, indexer_loss
from model.layout import SequenceLayout
from model.moe import Routing, sequence_balance


@dataclass(frozen=True)
class LossDenominators:
    """Counts over a whole optimizer step (all micro-batches, all ranks) that its losses are divided by.

    supervised: targets; num_tokens: non-padding tokens; index_queries int64 [index sources]: supervised queries that
    see an entry.
    """

    supervised: Tensor
    num_tokens: Tensor
    index_queries: Tensor

    def __add__(self, other: LossDenominators) -> LossDenominators:
        return LossDenominators.from_tensor(self.to_tensor() + other.to_tensor())

    def to_tensor(self) -> Tensor:
        """int64 [2 + index sources], for an all-reduce."""
        return torch.cat([self.supervised.reshape(1), self.num_tokens.reshape(1), self.index_queries])

    @classmethod
    def from_tensor(cls, flat: Tensor) -> LossDenominators:
        return cls(flat[0], flat[1], flat[2:])


class Losses(NamedTuple):
    """One micro-batch's share of a step. `total` is differentiable and already divided by the step's denominators:
    micro-batches add up.

    The rest is detached: lm_sum (nats over `supervised` targets), balance_sum (over layers and tokens), index_kl_sum
    and index_queries per index source, expert_load int64 [layers, 2, E] (text, image).
    """

    total: Tensor
    lm_sum: Tensor
    supervised: Tensor
    balance_sum: Tensor
    index_kl_sum: Tensor
    index_queries: Tensor
    expert_load: Tensor


def count_denominators(config: TextConfig, layout: SequenceLayout, supervised: Tensor) -> LossDenominators:
    """What a batch adds to its step's denominators. supervised bool [T]: the tokens with a target."""
    queries = [
        (supervised & (layout.position + 1 >= config.ratio(layer))).sum() for layer in config.index_source_layer_ids
    ]
    return LossDenominators(
        supervised.sum(),
        supervised.new_full((), layout.tokens, dtype=torch.int64),
        torch.stack(queries) if queries else supervised.new_zeros(0, dtype=torch.int64),
    )


def training_losses(
    lm_sum: Tensor,
    supervised: Tensor,
    routings: Sequence[Routing],
    indexers: Sequence[tuple[IndexerLossInputs, Tensor]],
    layout: SequenceLayout,
    weights: LossWeights,
    denominators: LossDenominators,
    train_indexer: bool,
) -> Losses:
    """The losses of a micro-batch, divided by the denominators of its step.

    Args:
        lm_sum: the language-model loss (or what takes its place), summed over the supervised tokens.
        supervised: bool [T].
        routings: of all layers.
        indexers: of every index source, what its loss needs and the attention mass fp32 [T, K] that the layers which
            use its selection put on it.
        train_indexer: else the indexers get no gradient, whatever `weights` says.
    """
    balance_sum = sequence_balance(routings, layout)
    kl_sum, queries = _indexer_losses(indexers, supervised, train_indexer and weights.indexer_kl > 0)
    total = lm_sum / denominators.supervised.clamp(min=1)
    total = total + weights.router_balance * balance_sum / denominators.num_tokens.clamp(min=1)
    total = total + weights.indexer_kl * (kl_sum / denominators.index_queries.clamp(min=1)).sum()
    return Losses(
        total=total,
        lm_sum=lm_sum.detach(),
        supervised=supervised.sum(),
        balance_sum=balance_sum.detach(),
        index_kl_sum=kl_sum.detach(),
        index_queries=queries,
        expert_load=torch.stack([routing.load for routing in routings]),
    )


def _indexer_losses(
    indexers: Sequence[tuple[IndexerLossInputs, Tensor]], supervised: Tensor, train: bool
) -> tuple[Tensor, Tensor]:
    """(KL summed over queries, queries int64), each [index sources]. Untrained indexers get zeros as gradients, so that
    every parameter has one.
    """
    if not indexers:
        return supervised.new_zeros(0, dtype=torch.float32), supervised.new_zeros(0, dtype=torch.int64)
    queries = [(supervised & (inputs.topk_indices >= 0).any(-1)).sum() for inputs, _ in indexers]
    if train:
        sums = [indexer_loss(inputs, mass, supervised) for inputs, mass in indexers]
    else:
        sums = [0.0 * _touch(inputs) for inputs, _ in indexers]
    return torch.stack(sums), torch.stack(queries)


def _touch(inputs: IndexerLossInputs) -> Tensor:
    return (inputs.query.q.sum() + inputs.query.weights.sum() + inputs.keys.sum()).float()
