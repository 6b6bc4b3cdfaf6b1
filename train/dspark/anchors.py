"""Draws the anchors: the random positions in each row at which the drafter's training blocks begin."""

from __future__ import annotations

import numpy as np
import torch

from train.build import Batch

FIRST = 2  # first position in a document, since the released inference code drafts only after two processed tokens
TRAINED, HELD_OUT = 0, 1


def with_anchors(batch: Batch, seed: int, first_row: int, tokens_per_anchor: int, split: int = TRAINED) -> Batch:
    """Add ``anchors`` to a batch: int64 [B, A], ascending in each row and padded with -1.

    The anchors of a row depend only on the seed and the number of the row, not on the batch or process it is in.

    Args:
        first_row: index of the batch's first row among all rows of its split; the other rows of the batch follow it.
        tokens_per_anchor: one anchor is drawn per ``tokens_per_anchor`` possible positions.
        split: TRAINED or HELD_OUT, which makes the anchors of the two kinds of rows independent.
    """
    rows = []
    for number, (labels, lengths) in enumerate(zip(batch["labels"].cpu(), batch["seq_lens"].tolist(), strict=True)):
        places = candidates(labels.numpy(), lengths)
        count = -(-len(places) // tokens_per_anchor)
        random = np.random.default_rng((seed, split, first_row + number))
        rows.append(np.sort(random.choice(places, count, replace=False)))
    anchors = np.full((len(rows), max(1, *map(len, rows))), -1, np.int64)
    for row, places in zip(anchors, rows, strict=True):
        row[: len(places)] = places
    return {**batch, "anchors": torch.from_numpy(anchors)}


def candidates(labels: np.ndarray, lengths: list[int]) -> np.ndarray:
    """Return the positions (int64) of a row at which a draft block may begin.

    The token at such a position and the next token must be supervised and belong to the same document.

    Args:
        labels: token ids [S], not shifted; -100 marks tokens that are not supervised.
        lengths: lengths of the documents in the row.
    """
    taught = np.flatnonzero((labels[:-1] >= 0) & (labels[1:] >= 0))
    ends = np.cumsum(lengths)
    document = np.searchsorted(ends, taught, side="right")
    inside = document < len(lengths)
    taught, document = taught[inside], document[inside]
    start = ends[document] - np.asarray(lengths)[document]
    return taught[(taught - start >= FIRST) & (taught + 1 < ends[document])]
