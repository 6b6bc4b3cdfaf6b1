"""Exact match on held-out conversations: whether greedy decoding would write exactly the given answer.

Greedy decoding writes the answer if each token of the answer, EOS included, is the most likely token after all tokens
before that token. Exact match can therefore be computed by one forward pass over the conversations, without generating
any text.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from model.loss import cross_entropy_sum, is_likeliest
from model.parallel.context import sum_over
from model.parallel.ranks import ONE_RANK, RankGroup


class ExactMatch:
    """Computes the cross-entropy and records at which positions greedy decoding would choose the right token.

    This class is an objective (see `model.loss.Objective`) for a single batch, without gradients.
    """

    def __init__(self) -> None:
        self.places = self.hits = torch.zeros(0, dtype=torch.int64)

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, places: Tensor) -> Tensor:
        self.places, self.hits = places, is_likeliest(hidden, weight, targets).long()
        return cross_entropy_sum(hidden, weight, targets)

    def count(self, seq_lens: Tensor, row_length: int, context: RankGroup = ONE_RANK) -> Tensor:
        """Count the conversations whose supervised tokens are all right, and those with at least one supervised token.

        seq_lens: lengths of the conversations in each row of `row_length` tokens, int [B, conversations]. Returns the
        two counts as int64 [2]. The ranks of `context` share the rows of a batch and count together; only the first
        rank of `context` returns the numbers, the other ranks return zeros.
        """
        starts = torch.arange(len(seq_lens), device=seq_lens.device)[:, None] * row_length
        ends = (starts + seq_lens.cumsum(1)).flatten()  # sorted; empty conversations repeat a value
        document = torch.searchsorted(ends, self.places, right=True)
        taught = torch.zeros_like(ends).index_add_(0, document, torch.ones_like(document))
        right = torch.zeros_like(ends).index_add_(0, document, self.hits)
        taught, right = sum_over(torch.stack([taught, right]), context)
        return torch.stack([((taught > 0) & (right == taught)).sum(), (taught > 0).sum()]) * (context.rank == 0)


def most_frequent(loader: Any) -> tuple[float, Tensor]:
    """Return the share of held-out conversations that have the most frequent answer, and the tokens of that answer.

    This share is the exact-match score of a model that always gives the same answer.
    """
    store, rows = loader.window.store, loader.window.rows
    answers: Counter[tuple[int, ...]] = Counter()
    for document in set(rows.document.tolist()):
        span = slice(store.offsets[document], store.offsets[document + 1])
        answers[tuple(store.tokens[span][store.loss_mask[span]].tolist())] += 1
    answer, count = answers.most_common(1)[0]
    return count / answers.total(), torch.tensor(answer)
