"""Where a drafter's training blocks begin: random positions in every row, determined by the seed and the row's
number.
"""

from __future__ import annotations

import numpy as np
import torch

from train.build import Batch

FIRST = 2  # earliest position in a document; the released inference code drafts only after two processed tokens
TRAINED, HELD_OUT = 0, 1


def with_anchors(batch: Batch, seed: int, first_row: int, tokens_per_anchor: int, split: int = TRAINED) -> Batch:
    """The batch with ``anchors`` int64 [B, A] added, ascending in each row and padded with -1. ``first_row`` is the
    number of the batch's first row within its ``split``; the others follow. A row's anchors depend on the seed and its
    number only, not on the batch or process that it is in.
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
    """The positions (int64) at which a block of drafts may begin: the token there and the next one are supervised and
    in the same document. ``labels`` [S] are not shifted, -100 is not supervised; ``lengths`` of the row's documents.
    """
    taught = np.flatnonzero((labels[:-1] >= 0) & (labels[1:] >= 0))
    ends = np.cumsum(lengths)
    document = np.searchsorted(ends, taught, side="right")
    inside = document < len(lengths)
    taught, document = taught[inside], document[inside]
    start = ends[document] - np.asarray(lengths)[document]
    return taught[(taught - start >= FIRST) & (taught + 1 < ends[document])]
