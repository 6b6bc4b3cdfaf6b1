"""Loaders: batches of packed rows, with a position that can be saved and resumed exactly.

The order of rows is a pure function of seed and epoch. A position is the epoch, the number of the window in it, where
the window begins in the source, and how many of its rows have been used; resuming packs one window again. All ranks go
through the same rows in the same order, and each takes its slice of every batch, so a global batch does not depend on
the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from data.collate import Batch, Collator
from data.errors import DataError
from data.tokenizer import SpecialIds
from data.windows import PackingWindow, Stats, Windows, random_stream


class TrainLoader:
    """An endless iterator over the batches (see `Collator`) of this rank, epoch after epoch.

    Args:
        windows: the rows, window by window.
        batch_size: rows of a batch over all ranks; this rank gets `batch_size / world_size` of them.
        fingerprint: the settings under which a saved position is valid.
        prefetch: whether a thread loads the next window while the rows of this one are used.
    """

    def __init__(
        self,
        windows: Windows,
        collator: Collator,
        batch_size: int,
        rank: int,
        world_size: int,
        fingerprint: dict[str, Any],
        prefetch: bool,
    ):
        self.windows, self.collator, self.fingerprint = windows, collator, fingerprint
        self.batch_size, self.per_rank_batch = batch_size, batch_size // world_size
        self.rank = rank
        self.epoch = 0
        self._number, self._start, self._row = 0, None, 0
        self._window: PackingWindow | None = None
        self._reader = ThreadPoolExecutor(1, "data") if prefetch else None
        self._prefetched: tuple[Any, Future[PackingWindow]] | None = None  # arguments of `load`, and its result
        self._first_window()

    @property
    def stats(self) -> Stats:
        return self.windows.stats

    def __iter__(self) -> TrainLoader:
        return self

    def __next__(self) -> Batch:
        chosen = [self._next_row() for _ in range(self.batch_size)]
        first = self.rank * self.per_rank_batch
        return self.collator.collate(chosen[first : first + self.per_rank_batch])

    def state_dict(self) -> dict[str, Any]:
        """The position, in types that JSON has. It is valid for any batch size and number of ranks."""
        position = {"epoch": self.epoch, "window": self._number, "start": self._start, "row": self._row}
        return position | {"fingerprint": dict(self.fingerprint)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position, so that the next batch is the one that would have followed.

        Raises ValueError naming every setting that has changed and makes the position meaningless.
        """
        saved = state["fingerprint"]
        changed = [
            f"data position: {key} was {saved.get(key)!r} when saved and is {value!r} now; restore it or begin anew"
            for key, value in self.fingerprint.items()
            if saved.get(key) != value
        ]
        if changed:
            raise ValueError("\n".join(changed))
        self.epoch, self._number, self._row = state["epoch"], state["window"], state["row"]
        self._start, self._window = state["start"], None

    def _first_window(self) -> None:
        """Load the first window with rows now, so that bad or empty data fails before the first step."""
        self._window = self._load()
        while not len(self._window.rows):
            if self._window.after is None:
                raise DataError("training split", 0, "no documents", "every record was skipped or held out")
            self._go_to_next_window()
            self._window = self._load()

    def _next_row(self) -> tuple[PackingWindow, int]:
        while True:
            if self._window is None:
                self._window = self._load()
            if self._row < len(self._window.rows):
                self._row += 1
                return self._window, self._row - 1
            self._go_to_next_window()

    def _go_to_next_window(self) -> None:
        assert self._window is not None
        after = self._window.after
        if after is None:
            self.epoch, self._number = self.epoch + 1, 0
        else:
            self._number += 1
        self._start, self._row, self._window = after, 0, None

    def _load(self) -> PackingWindow:
        """The window at the current position, prefetched or not; then prefetch the one after it."""
        wanted = self.epoch, self._number, self._start
        if self._reader is None:
            return self.windows.load(*wanted)
        found, future = self._prefetched or (None, None)
        self._prefetched = None  # if loading fails, there is nothing to fall back on
        if future is None or found != wanted:
            if future is not None:
                future.cancel()
            future = self._reader.submit(self.windows.load, *wanted)
        window = future.result()
        following = (self.epoch + 1, 0, None) if window.after is None else (self.epoch, self._number + 1, window.after)
        self._prefetched = following, self._reader.submit(self.windows.load, *following)
        return window


class ValidationLoader:
    """The held-out batches (see `Collator`): a finite number, the same in every pass and for every training seed.

    The last batch may have fewer rows than the others. Rows of padding are added to it only so that all ranks get the
    same number.

    Args:
        held_out: all held-out rows.
        limit: how many of them to use; they are drawn with a fixed seed. 0 means all.

    Attributes:
        target_tokens, target_bytes: the supervised tokens of all batches and ranks, and the source bytes behind them.
    """

    def __init__(
        self, held_out: PackingWindow, collator: Collator, batch_size: int, rank: int, world_size: int, limit: int = 0
    ):
        store, rows = held_out.store, held_out.rows
        rows = rows.reordered(random_stream(0).permutation(len(rows))[: limit or len(rows)])
        self.window, self.collator = PackingWindow(store, rows, None), collator
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.stats = Stats()
        self.stats.add_store(store)
        self.stats.add_rows(rows, collator.seq_len)
        self.target_tokens, self.target_bytes = _targets(self.window, collator.special)

    @property
    def bytes_per_token(self) -> float:
        """Source bytes per supervised token: bits per byte = nats per token / ln 2 / bytes_per_token."""
        return self.target_bytes / self.target_tokens

    def __len__(self) -> int:
        return math.ceil(len(self.window.rows) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self.window.rows), self.batch_size):
            numbers = list(range(first, min(first + self.batch_size, len(self.window.rows))))
            numbers += [-1] * (-len(numbers) % self.world_size)
            count = len(numbers) // self.world_size
            mine = numbers[self.rank * count : (self.rank + 1) * count]
            yield self.collator.collate([(self.window, number) for number in mine])


def _targets(window: PackingWindow, special: SpecialIds) -> tuple[int, int]:
    """How many tokens of the rows have a label (see `Collator`), and how many source bytes are behind them."""
    store, rows = window.store, window.rows
    tokens = num_bytes = 0
    assert store.byte_counts is not None, "a validation store counts bytes"
    for document, start, length in zip(rows.document, rows.start, rows.length, strict=True):
        first = int(store.offsets[document] + start)
        span = slice(first + 1, first + int(length))
        supervised = np.ones(int(length) - 1, np.bool_) if store.loss_mask is None else np.array(store.loss_mask[span])
        if document in store.pictures:
            supervised &= store.tokens[span] != special.image
        tokens += int(supervised.sum())
        num_bytes += int(store.byte_counts[span][supervised].sum(dtype=np.int64))
    return tokens, num_bytes
