"""Direct preference optimisation (Rafailov et al., 2023, arXiv 2305.18290): the loss of a micro-batch of pairs.

For a prompt with a chosen and a rejected answer, log pi(answer) is the sum of the log-probabilities of the answer's
supervised tokens. The reward of an answer is r = beta (log pi(answer) - log pi_ref(answer)), the margin of a pair is
m = r_chosen - r_rejected, and its loss is -log sigmoid(m). With label smoothing s, the assumed share of pairs whose
labels are swapped, the loss is -(1 - s) log sigmoid(m) - s log sigmoid(-m).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from model import token_log_probs
from model.parallel.context import sum_of_parts
from model.parallel.ranks import ONE_RANK, RankGroup
from train.config.dpo import DpoConfig


def answer_numbers(seq_lens: Tensor, row_length: int) -> Tensor:
    """Return, for each token of a batch, the index of the answer that the token belongs to, int64 [B, S].

    The chosen answer of pair p has index 2 p, and the rejected answer 2 p + 1. Padding tokens have index 0; they are
    never supervised.

    seq_lens: int64 [B, documents], the lengths of the conversations in each row, chosen and rejected alternating, then
    zeros.
    """
    numbers = torch.zeros(len(seq_lens), row_length, dtype=torch.int64)
    count = 0
    for row, lengths in enumerate(seq_lens.tolist()):
        at = 0
        for length in filter(None, lengths):
            numbers[row, at : at + length] = count
            at, count = at + length, count + 1
    return numbers


def pair_count(seq_lens: Tensor) -> int:
    """Return the number of pairs in a batch. A batch of padding has one conversation and no pair."""
    return int((seq_lens > 0).sum()) // 2


class PreferenceObjective:
    """Computes the DPO loss of one micro-batch, summed over its pairs, in the form that ``model.losses`` takes.

    Args:
        answer: index of the answer that each token belongs to, int64 [B, S], from ``answer_numbers``.
        reference: log-probability of every supervised token under the reference policy, fp32 [B, S].
        pairs: number of pairs in the micro-batch.
        context: the ranks that share the batch under context parallelism, each with its own tokens. Every rank of
            ``context`` computes the loss of whole answers; only the first rank counts it.

    Attributes:
        sums: sums over the pairs (detached, fp64): loss, number of pairs with a positive margin, margin, both rewards.
    """

    NAMES = ("loss", "accuracy", "margin", "reward_chosen", "reward_rejected")

    def __init__(self, dpo: DpoConfig, answer: Tensor, reference: Tensor, pairs: int, context: RankGroup = ONE_RANK):
        self.context = context
        self.dpo, self.answer, self.reference, self.pairs = dpo, answer, reference, pairs
        self.sums = {name: torch.zeros((), dtype=torch.float64, device=answer.device) for name in self.NAMES}

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, places: Tensor) -> Tensor:
        log_probs, _ = token_log_probs(hidden, weight, targets)
        answer, reference = self.answer.flatten()[places], self.reference.flatten()[places]
        ratio = log_probs.new_zeros(2 * self.pairs).index_add(0, answer, log_probs - reference)
        ratio = sum_of_parts(ratio, self.context)
        rewards = self.dpo.beta * ratio.view(-1, 2)
        margin = rewards[:, 0] - rewards[:, 1]
        smoothing = self.dpo.label_smoothing
        loss = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
        found = (loss, margin > 0, margin, rewards[:, 0], rewards[:, 1])
        self.sums = {name: value.detach().double().sum() for name, value in zip(self.NAMES, found, strict=True)}
        if self.context.rank == 0:
            return loss.sum()
        self.sums = {name: torch.zeros_like(value) for name, value in self.sums.items()}
        return loss.sum() - loss.sum().detach()  # the value is 0, the gradient is that of this rank's tokens
