"""The losses of a drafter: the supervised slots of blocks, the weights of the slots, and the loss sums and denominators
of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from model.dspark.layout import Anchors
from model.layout import SequenceLayout

DECAY = 4.0  # slot i has the weight exp(-i / DECAY) in the loss
BINS = 10  # number of bins of the predicted acceptance, to measure its calibration


class DraftLoss(NamedTuple):
    """The training loss of a batch and its terms.

    The field loss = 0.1 ce + 0.9 l1 + bce is differentiable; each term is a mean over all slots of the batch, weighted
    by `weights`. tau: the expected number of tokens accepted per block (the backbone's token and the accepted drafts),
    averaged over blocks with a supervised slot. The following fields are detached, and their shape is the shape of the
    anchors plus a last axis of B slots: valid (bool, whether the slot is supervised), weights, alpha (the probability
    of acceptance, 0 where not valid) and confidence (logits). expert_load int64 [stages, 2, E] counts tokens per
    expert.
    """

    loss: Tensor
    ce: Tensor
    l1: Tensor
    bce: Tensor
    tau: Tensor
    valid: Tensor
    weights: Tensor
    alpha: Tensor
    confidence: Tensor
    expert_load: Tensor


@dataclass(frozen=True)
class DraftDenominators:
    """Token and slot counts of a whole optimizer step (all micro-batches, all ranks), by which the losses are divided.
    num_tokens: the number of non-padding tokens.
    valid: int64 [B], for each slot, the number of blocks in which this slot and all slots before it are supervised.
    """

    num_tokens: Tensor
    valid: Tensor

    @property
    def weight(self) -> Tensor:
        """The divisor of the step's losses: the sum of the weights of all slots, fp32 (1 if no slot is supervised)."""
        total = (self.valid * slot_weights(len(self.valid), self.valid.device).double()).sum().float()
        return total.where(total > 0, 1.0)

    def to_tensor(self) -> Tensor:
        """The counts as one tensor int64 [1 + B], for an all-reduce."""
        return torch.cat([self.num_tokens.reshape(1), self.valid])

    @classmethod
    def from_tensor(cls, flat: Tensor) -> DraftDenominators:
        return cls(flat[0], flat[1:])


class DraftLosses(NamedTuple):
    """The losses of one micro-batch. `total` is differentiable and already divided by the denominators of the whole
    step, so the totals of all micro-batches add up to the loss of the step.

    All other fields are detached sums.
    ce_sum, l1_sum, bce_sum: the weighted sums of the loss terms over slots.
    slots: int64 [B], the number of supervised slots at each index in a block.
    alpha_sum: [B], the sum of the acceptance probabilities of the supervised slots at each index in a block.
    accepted_sum: the expected number of accepted tokens of all blocks, including one token of the backbone per block.
    calibration: fp64 [BINS, 3], for each bin of predicted acceptance probability, the number of slots, the sum of
    predicted and the sum of true acceptance probabilities.
    expert_load: int64 [stages, 2, E], tokens per expert.
    """

    total: Tensor
    ce_sum: Tensor
    l1_sum: Tensor
    bce_sum: Tensor
    slots: Tensor
    alpha_sum: Tensor
    accepted_sum: Tensor
    calibration: Tensor
    expert_load: Tensor


class Terms(NamedTuple):
    """The weighted sums of the loss terms over slots, and values for each slot or block: valid, weights, alpha and
    confidence have shape [N, B], and accepted has shape [N].
    """

    ce_sum: Tensor
    l1_sum: Tensor
    bce_sum: Tensor
    where: Anchors
    valid: Tensor
    weights: Tensor
    alpha: Tensor
    accepted: Tensor
    confidence: Tensor
    expert_load: Tensor


class Slots(NamedTuple):
    """The slots of N blocks; every field is [N, B].
    before: int64, the id of the token before the slot.
    at: int64, the index of the token before the slot, from which the backbone predicts the slot's token (the last token
    of the document if the slot is after the end of the document).
    target: int64, the token to predict, or -100.
    valid: bool, whether this slot and all slots before it have a target.
    weights: fp32, the weight of the slot in the loss.
    """

    before: Tensor
    at: Tensor
    target: Tensor
    valid: Tensor
    weights: Tensor


def slots_of(where: Anchors, layout: SequenceLayout, input_ids: Tensor, labels: Tensor, block_size: int) -> Slots:
    """The targets and weights of all slots of a batch, computed without a forward pass. labels int64 [B, S] are not
    shifted.
    """
    ids, wanted = layout.flatten(input_ids), layout.flatten(labels)
    at = where.last[:, None] + 1 + torch.arange(block_size + 1, device=ids.device)
    document = layout.document.index_select(0, where.last)
    end = layout.document_start.index_select(0, where.last) + layout.document_lengths.index_select(0, document) - 1
    inside, at = at <= end[:, None], at.minimum(end[:, None])
    target = torch.where(inside, wanted[at], -100)[:, 1:]
    valid = (target >= 0).cumprod(1).bool()
    return Slots(ids[at[:, :-1]], at[:, :-1], target, valid, valid * slot_weights(block_size, ids.device))


def slot_weights(block_size: int, device: torch.device) -> Tensor:
    """The weight of each slot of a block in the loss, fp32 [B]."""
    return torch.exp(-torch.arange(block_size, device=device, dtype=torch.float32) / DECAY)
