"""Computes the training losses of a micro-batch from the outputs of the blocks, and the loss denominators of a step.

In shapes, T is the number of tokens in the layout, K = `index_topk` and E the number of experts.
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
    """The token counts of a whole optimizer step (all micro-batches, all ranks) by which its losses are divided.

    supervised: the number of targets; num_tokens: the number of non-padding tokens; index_queries int64 [indexers]: for
    each indexer, the number of supervised queries that see at least one entry.
    """

    supervised: Tensor
    num_tokens: Tensor
    index_queries: Tensor

    def __add__(self, other: LossDenominators) -> LossDenominators:
        return LossDenominators.from_tensor(self.to_tensor() + other.to_tensor())

    def to_tensor(self) -> Tensor:
        """The counts as one tensor int64 [2 + indexers], for an all-reduce."""
        return torch.cat([self.supervised.reshape(1), self.num_tokens.reshape(1), self.index_queries])

    @classmethod
    def from_tensor(cls, flat: Tensor) -> LossDenominators:
        return cls(flat[0], flat[1], flat[2:])


class Losses(NamedTuple):
    """The losses of one micro-batch. `total` is differentiable and already divided by the denominators of the whole
    step, so the totals of all micro-batches add up to the loss of the step.

    All fields except `total` are detached: lm_sum, the language-model loss in nats summed over `supervised` targets;
    balance_sum, the balance loss summed over layers and tokens; index_kl_sum, the summed KL loss of each indexer;
    index_queries, the number of queries in each KL sum; expert_load int64 [layers, 2, E], the number of text tokens (0)
    and image tokens (1) of each expert.
    """

    total: Tensor
    lm_sum: Tensor
    supervised: Tensor
    balance_sum: Tensor
    index_kl_sum: Tensor
    index_queries: Tensor
    expert_load: Tensor


def count_denominators(config: TextConfig, layout: SequenceLayout, supervised: Tensor) -> LossDenominators:
    """The contribution of a micro-batch to the loss denominators of its step. supervised bool [T]: the tokens with a
    target.
    """
    queries = [
        (supervised & (layout.position + 1 >= config.ratio(layer))).sum() for layer in config.index_source_layer_ids
    ]
    return LossDenominators(
        supervised.sum(),
        supervised.new_full((), layout.tokens, dtype=torch.int64),
        torch.stack(queries) if queries else supervised.new_zeros(0, dtype=torch.int64),
    )


def compute_losses(
    lm_sum: Tensor,
    supervised: Tensor,
    routings: Sequence[Routing],
    indexers: Sequence[tuple[IndexerLossInputs, Tensor]],
    layout: SequenceLayout,
    weights: LossWeights,
    denominators: LossDenominators,
    train_indexer: bool,
) -> Losses:
    """Compute the losses of a micro-batch, divided by the loss denominators of its step.

    Args: lm_sum: the language-model loss, or an objective that replaces it, summed over the supervised tokens.
        supervised: bool [T], the tokens with a target. routings: the routing of every layer. indexers: for every
        indexer, the inputs of its loss, and the attention mass fp32 [T, K] on its selected entries, summed over the
        layers that use the selection. train_indexer: whether indexers are trained; if False, the gradients of the
        indexers are zero for any `weights`.
    """
    balance_sum = sequence_balance(routings, layout)
    train = train_indexer and weights.indexer_kl > 0
    kl_sum, queries = _indexer_losses(indexers, supervised, layout.supervised, train)
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
    indexers: Sequence[tuple[IndexerLossInputs, Tensor]], supervised: Tensor, rows: Tensor | None, train: bool
) -> tuple[Tensor, Tensor]:
    """For each indexer, the KL loss summed over its queries, fp32, and the number of its queries, int64, both
    [indexers]. If indexers are not trained, their parameters get zero gradients, so that every parameter has a
    gradient. rows: see `indexer_loss`.
    """
    if not indexers:
        return supervised.new_zeros(0, dtype=torch.float32), supervised.new_zeros(0, dtype=torch.int64)
    queries = [(supervised & (inputs.topk_indices >= 0).any(-1)).sum() for inputs, _ in indexers]
    if train:
        sums = [indexer_loss(inputs, mass, supervised, rows) for inputs, mass in indexers]
    else:
        sums = [0.0 * _touch(inputs) for inputs, _ in indexers]
    return torch.stack(sums), torch.stack(queries)


def _touch(inputs: IndexerLossInputs) -> Tensor:
    return (inputs.query.q.sum() + inputs.query.weights.sum() + inputs.keys.sum()).float()
