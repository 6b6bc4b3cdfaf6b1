"""Tables whose rows may lie on several ranks: the token embedding, the Engram tables, the head."""

from __future__ import annotations

from torch import nn

from model.parallel import Ranks, row_shard


class Table(nn.Embedding):
    """This rank's rows of an embedding of `rows` rows."""

    def __init__(self, rows: int, dim: int, ranks: Ranks):
        shard = row_shard(rows, ranks)
        super().__init__(len(shard), dim)
        self.shard = shard


class Head(nn.Linear):
    """This rank's rows of a head that scores `rows` tokens."""

    def __init__(self, dim: int, rows: int, ranks: Ranks):
        shard = row_shard(rows, ranks)
        super().__init__(dim, len(shard), bias=False)
        self.shard = shard
