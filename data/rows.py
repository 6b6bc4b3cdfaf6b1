"""Iterates over packed rows in training order, from one source or from several weighted sources, with a position to
resume from.

The order of rows is a pure function of the seed and the epoch. With several sources it also depends on their weights:
the next row comes from the source that is furthest behind its share of the tokens. This choice is not random, so a
saved position needs only the number of tokens and the position of each source.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor, Future
from typing import Any, Protocol

from data.errors import DataError
from data.windows import PackingWindow, Stats, Windows, repacked

Row = tuple[PackingWindow, int]  # a packing window, and the number of a row in it


class RowReader:
    """Iterates over the packed rows of one source, epoch after epoch.

    A position consists of the epoch, the number of the packing window in the epoch, the place in the source where this
    window begins, the length of rows, and the number of rows that have been used. Resuming packs this one window again.
    A position with rows of another length can be loaded: the tokens of its window that are in none of the rows used so
    far are packed into rows of the reader's length. Until this window ends, the position also stores each earlier row
    length, with the number of rows of that length that were used.

    prefetch: the thread that loads the next window while the rows of the current window are used, or None.
    """

    def __init__(self, windows: Windows, prefetch: Executor | None = None):
        self.windows = windows
        self.epoch = 0
        self._number, self._start, self._row = 0, None, 0
        self._earlier: list[tuple[int, int]] = []  # (length, rows used) of the earlier lengths in this window
        self._window: PackingWindow | None = None
        self._reader = prefetch
        self._prefetched: tuple[Any, Future[PackingWindow]] | None = (
            None  # the arguments of `Windows.load`, and its future result
        )

    @property
    def stats(self) -> Stats:
        return self.windows.stats

    def next_row(self) -> Row:
        row = self.next_until(None)
        assert row is not None
        return row

    def next_until(self, epoch: int | None) -> Row | None:
        """The next row, or None if it belongs to an epoch after `epoch`."""
        while True:
            if epoch is not None and self.epoch > epoch:
                return None
            if self._window is None:
                self._window = self._load()
            if self._row < len(self._window.rows):
                self._row += 1
                return self._window, self._row - 1
            self._go_to_next_window()

    def next_rows(self, count: int, own: slice) -> list[Row]:
        """Take `count` rows, and return those of them that `own` selects."""
        return [self.next_row() for _ in range(count)][own]

    def state_dict(self) -> dict[str, Any]:
        position = {"epoch": self.epoch, "window": self._number, "start": self._start, "row": self._row}
        return position | {"seq_len": self.windows.seq_len, "earlier": [list(used) for used in self._earlier]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self._number, self._row = state["epoch"], state["window"], state["row"]
        self._start, self._window = state["start"], None
        self._earlier = [(length, used) for length, used in state.get("earlier", ())]
        length = state.get("seq_len", self.windows.seq_len)
        if length != self.windows.seq_len:
            self._earlier.append((length, self._row))
            self._row = 0

    def load_first(self) -> RowReader:
        """Load the first window that has rows, so that bad or empty data raises an error before the first training
        step. Returns the reader itself.
        """
        self._window = self._load()
        while not len(self._window.rows):
            if self._window.after is None:
                raise DataError("training split", 0, "no documents", "every record was skipped or held out")
            self._go_to_next_window()
            self._window = self._load()
        return self

    def _go_to_next_window(self) -> None:
        assert self._window is not None
        after = self._window.after
        if after is None:
            self.epoch, self._number = self.epoch + 1, 0
        else:
            self._number += 1
        self._start, self._row, self._window, self._earlier = after, 0, None, []

    def _load(self) -> PackingWindow:
        """Return the packing window at the current position, without the tokens that were already used in rows of
        earlier lengths.
        """
        window = self._at_position()
        lengths = [*(length for length, _ in self._earlier), self.windows.seq_len]
        used = [0, *(rows for _, rows in self._earlier)]
        if self._earlier:
            for rows, length in zip(used, lengths, strict=True):
                window = repacked(self.windows, window, rows, length, self.epoch, self._number)
        return window

    def _at_position(self) -> PackingWindow:
        """Return the whole packing window at the current position, which may have been prefetched, and start to
        prefetch the next window.
        """
        wanted = self.epoch, self._number, self._start
        if self._reader is None:
            return self.windows.load(*wanted)
        found, future = self._prefetched or (None, None)
        self._prefetched = None  # so that a failed load is not used again
        if future is None or found != wanted:
            if future is not None:
                future.cancel()
            future = self._reader.submit(self.windows.load, *wanted)
        window = future.result()
        following = (self.epoch + 1, 0, None) if window.after is None else (self.epoch, self._number + 1, window.after)
        self._prefetched = following, self._reader.submit(self.windows.load, *following)
        return window


class Rows(Protocol):
    """The interface of iterators over the rows of one source; `RowReader` and `Lane` implement it."""

    @property
    def epoch(self) -> int: ...

    @property
    def stats(self) -> Stats: ...

    def next_row(self) -> Row: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class MixedStats:
    """The statistics of every source of a mixture."""

    def __init__(self, stats: dict[str, Stats]):
        self.stats = stats

    def __str__(self) -> str:
        return "; ".join(f"{name}: {stats}" for name, stats in self.stats.items())


class MixedRows:
    """Iterates over the packed rows of several sources, so that each source gets its share of the tokens.

    Args:
        readers: the reader of each source, by the name of the source.
        weights: the relative share of tokens of each source: with weights 7 and 1, seven of eight tokens come from the
            first source.
    """

    def __init__(self, readers: Mapping[str, Rows], weights: dict[str, float]):
        self.readers, self.weights = readers, weights
        self.tokens = dict.fromkeys(readers, 0)  # number of tokens used so far, without padding
        self.rows = dict.fromkeys(readers, 0)

    @property
    def epoch(self) -> int:
        """The smallest epoch among all sources."""
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

    def next_rows(self, count: int, own: slice) -> list[Row]:
        """Take `count` rows, and return those of them that `own` selects."""
        return [self.next_row() for _ in range(count)][own]

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
        """For each source, the number of tokens, rows and epochs so far."""
        made = {}
        for name, reader in self.readers.items():
            whole = reader.stats.tokens
            epochs = self.tokens[name] / whole if whole else float(reader.epoch)
            made[name] = {"tokens": self.tokens[name], "rows": self.rows[name], "epochs": epochs}
        return made
