"""Rows in the order of training, with a position to resume from: of one source, or of several by weight.

The order is a pure function of seed and epoch, and of several sources also of their weights: the next row comes from
the source that is furthest behind its share of the tokens. No number is drawn for that, so a position needs only what
each source has given.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from data.errors import DataError
from data.windows import PackingWindow, Stats, Windows

Row = tuple[PackingWindow, int]  # a window, and the number of a row in it


class RowReader:
    """The rows of one source, epoch after epoch.

    A position is the epoch, the number of the window in it, where the window begins in the source, and how many of its
    rows have been used; resuming packs one window again.

    prefetch: whether a thread loads the next window while the rows of this one are used.
    """

    def __init__(self, windows: Windows, prefetch: bool):
        self.windows = windows
        self.epoch = 0
        self._number, self._start, self._row = 0, None, 0
        self._window: PackingWindow | None = None
        self._reader = ThreadPoolExecutor(1, "data") if prefetch else None
        self._prefetched: tuple[Any, Future[PackingWindow]] | None = None  # arguments of `load`, and its result
        self._first_window()

    @property
    def stats(self) -> Stats:
        return self.windows.stats

    def next_row(self) -> Row:
        while True:
            if self._window is None:
                self._window = self._load()
            if self._row < len(self._window.rows):
                self._row += 1
                return self._window, self._row - 1
            self._go_to_next_window()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "window": self._number, "start": self._start, "row": self._row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
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


class MixedStats:
    """The statistics of every source of a mixture."""

    def __init__(self, stats: dict[str, Stats]):
        self.stats = stats

    def __str__(self) -> str:
        return "; ".join(f"{name}: {stats}" for name, stats in self.stats.items())


class MixedRows:
    """The rows of several sources, each with its share of the tokens.

    Args:
        readers: by name.
        weights: of each, in tokens: with 7 and 1, seven of eight tokens are of the first. Only their ratios count.
    """

    def __init__(self, readers: dict[str, RowReader], weights: dict[str, float]):
        self.readers, self.weights = readers, weights
        self.tokens = dict.fromkeys(readers, 0)  # given so far, without padding
        self.rows = dict.fromkeys(readers, 0)

    @property
    def epoch(self) -> int:
        """Of the source that has been gone through least often."""
        return min(reader.epoch for reader in self.readers.values())

    @property
    def stats(self) -> MixedStats:
        return MixedStats({name: reader.stats for name, reader in self.readers.items()})

    def next_row(self) -> Row:
        name = min(self.readers, key=lambda name: self.tokens[name] / self.weights[name])
        window, row = self.readers[name].next_row()
        first, last = window.rows.offsets[row], window.rows.offsets[row + 1]
        self.tokens[name] += int(window.rows.length[first:last].sum())
        self.rows[name] += 1
        return window, row

    def state_dict(self) -> dict[str, Any]:
        return {
            "sources": {name: reader.state_dict() for name, reader in self.readers.items()},
            "tokens": dict(self.tokens),
            "rows": dict(self.rows),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, reader in self.readers.items():
            reader.load_state_dict(state["sources"][name])
        self.tokens, self.rows = dict(state["tokens"]), dict(state["rows"])

    def progress(self) -> dict[str, dict[str, float]]:
        """Of each source: tokens and rows given so far, and how often it has been gone through (of a stream in whole
        numbers)."""
        made = {}
        for name, reader in self.readers.items():
            whole = reader.stats.tokens
            epochs = float(reader.epoch) if reader._reader is not None or not whole else self.tokens[name] / whole
            made[name] = {"tokens": self.tokens[name], "rows": self.rows[name], "epochs": epochs}
        return made
