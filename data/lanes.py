"""Divides streamed sources into lanes, so that every rank reads and tokenises only the data that it trains on.

A lane is an independent sequence of rows: lane l of n reads share l of n of every source (see `SharedSource`), and
packs and shuffles the documents of this share by itself. Row n of an optimizer step always comes from lane n, and a
rank has the lanes of its rows. A step therefore has the same rows on any number of ranks.

A saved position has the reading position of every lane. If a run continues with another number of rows per step or
another row length, the rest of the epoch is distributed over new lanes: each old lane that has not finished the epoch
is assigned to a new lane, which first reads the old lane to its end, so that every document of the epoch is still read
exactly once. The next epoch is divided among the new lanes in the usual way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from data.document import Share
from data.rows import MixedRows, MixedStats, Row, RowReader
from data.windows import Stats

MakeReader = Callable[[Share, int], RowReader]  # of a share, in windows that are sized for rows of some length
MIN_WINDOW_ROWS = 16  # the packing window of a lane has room for so many rows, unless `data.window_tokens` has not
OPEN_LANES = 64  # a rank with more lanes closes the files of each lane between two packing windows


def window_tokens(whole: int, lanes: int, seq_len: int) -> int:
    """The size of a lane's packing window in tokens. The packing windows of all lanes together have `whole` tokens, but
    each packing window has at least MIN_WINDOW_ROWS rows (or `whole` tokens, if that is less).
    """
    return whole if lanes == 1 else max(whole // lanes, min(whole, MIN_WINDOW_ROWS * seq_len))


class Lane:
    """The rows of one source in one lane.

    make: opens a share of the source. share: the index of this lane, and the number of lanes. seq_len: number of tokens
    in a row.

    Attributes:
        inherited: old lanes that this lane finishes first. Each old lane is a `RowReader` position with three more
            keys: `share` (the share that the old lane reads), `sized` (the row length for which the size of its packing
            windows was chosen) and `until` (the last epoch that is read from the old lane).
    """

    def __init__(self, make: MakeReader, share: Share, seq_len: int):
        self.make, self.own, self.seq_len = make, make(share, seq_len).load_first(), seq_len
        self.inherited: list[dict[str, Any]] = []
        self._finishing: RowReader | None = None  # reads the first inherited lane

    @property
    def epoch(self) -> int:
        return min([self.own.epoch, *(old["epoch"] for old in self.inherited)])

    @property
    def stats(self) -> Stats:
        return self.own.stats

    def next_row(self) -> Row:
        while self.inherited:
            old = self.inherited[0]
            if self._finishing is None:
                self._finishing = self.make(tuple(old["share"]), old.get("sized", self.seq_len))
                self._finishing.load_state_dict(old)
            row = self._finishing.next_until(old["until"])
            if row is not None:
                return row
            self._finishing = None
            self.inherited.pop(0)
        return self.own.next_row()

    def state_dict(self) -> dict[str, Any]:
        inherited = [dict(old) for old in self.inherited]
        if self._finishing is not None:
            inherited[0] |= self._finishing.state_dict()
        return self.own.state_dict() | {"inherited": inherited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own.load_state_dict(state)
        self.inherited, self._finishing = [dict(old) for old in state.get("inherited", ())], None


class LaneRows:
    """Iterates over the rows of this rank, each from its own lane, with the interface that `TrainLoader` needs.

    Args:
        readers: for each source, the function that opens a share of it.
        weights: the relative share of tokens of each source; every lane keeps to these weights by itself.
        step_rows: number of rows of an optimizer step over all ranks, which is the number of lanes.
        own: the indices of the lanes of this rank.
        seq_len: number of tokens in a row.

    Raises `DataError` if a lane has no document.
    """

    def __init__(
        self,
        readers: Mapping[str, MakeReader],
        weights: dict[str, float],
        step_rows: int,
        own: Iterable[int],
        seq_len: int,
    ):
        self.count, self._turn, self.seq_len = step_rows, 0, seq_len
        self.lanes = {
            lane: MixedRows({name: Lane(make, (lane, step_rows), seq_len) for name, make in readers.items()}, weights)
            for lane in own
        }
        self._any = next(iter(self.lanes.values()))

    @property
    def epoch(self) -> int:
        """The smallest epoch among the lanes of this rank."""
        return min(lane.epoch for lane in self.lanes.values())

    @property
    def stats(self) -> Stats | MixedStats:
        """The statistics of what this rank has read."""
        stats = self._any.stats
        return stats if len(stats.stats) > 1 else next(iter(stats.stats.values()))

    def next_rows(self, count: int, own: slice) -> list[Row]:
        """Advance by `count` rows of the step, and return only the rows that the slice `own` selects."""
        turns = range(self._turn, self._turn + count)[own]
        self._turn = (self._turn + count) % self.count
        return [self.lanes[turn % self.count].next_row() for turn in turns]

    def counts(self) -> np.ndarray:
        """Returns float64 [sources, 4]: for each source the tokens, rows and epochs, summed over the lanes of this
        rank, and the number of these lanes. The sum of this array over all ranks is the argument of `progress`.
        """
        found = np.zeros((len(self._any.readers), 4))
        for lane in self.lanes.values():
            for number, name in enumerate(lane.readers):
                found[number] += lane.tokens[name], lane.rows[name], lane.readers[name].epoch, 1
        return found

    def progress(self, counts: np.ndarray | None = None) -> dict[str, dict[str, float]]:
        """For each source of a mixture, the number of tokens and rows so far, and of complete epochs (the mean over
        lanes); empty for a single source.

        counts: the sum over all ranks of what the method `counts` returns; None means the counts of this rank alone.
        """
        table = self.counts() if counts is None else counts
        names = list(self._any.readers)
        return {
            name: {"tokens": int(tokens), "rows": int(rows), "epochs": epochs / lanes}
            for name, (tokens, rows, epochs, lanes) in zip(names, table.tolist(), strict=True)
            if len(names) > 1
        }

    def state_dict(self) -> dict[str, Any]:
        """The position of the lanes of this rank; `merged` combines the positions of all ranks."""
        positions = {str(lane): rows.state_dict() for lane, rows in self.lanes.items()}
        return {"lanes": self.count, "seq_len": self.seq_len, "turn": self._turn, "positions": positions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the reading position of all lanes. If the number of lanes or the row length has changed since it
        was saved, the remaining documents are distributed over the lanes again (see `deal_anew`).
        """
        state = state if "lanes" in state else _of_one_lane(state)
        positions = [state["positions"][str(lane)] for lane in range(state["lanes"])]
        self._turn = state["turn"]
        length = state.get("seq_len", self.seq_len)
        if (len(positions), length) != (self.count, self.seq_len):
            positions, self._turn = deal_anew(positions, self.count, length), 0
        for lane, rows in self.lanes.items():
            rows.load_state_dict(positions[lane])


def merge_positions(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The position that every rank can resume from, given the `TrainLoader.state_dict` of every rank."""
    if "lanes" not in states[0]:
        return states[0]
    positions = {lane: position for state in states for lane, position in state["positions"].items()}
    return states[0] | {"positions": dict(sorted(positions.items(), key=lambda item: int(item[0])))}


def _of_one_lane(state: dict[str, Any]) -> dict[str, Any]:
    """Convert the position of a run without lanes to the position of a run with one lane, which reads its sources in
    the same way.
    """
    own = {key: value for key, value in state.items() if key != "fingerprint"}
    if "sources" not in own:
        own = {"sources": {"": own}, "tokens": {"": 0}, "rows": {"": 0}}
    return {"lanes": 1, "turn": 0, "positions": {"0": own}}


def deal_anew(positions: list[dict[str, Any]], count: int, seq_len: int) -> list[dict[str, Any]]:
    """Returns the positions of `count` new lanes. The new lanes together first finish every epoch that some old lane
    has begun, reading only what the old lanes have not read yet, and then go on to the next epoch. The counts of tokens
    and rows used so far are divided evenly among the new lanes.

    seq_len: number of tokens in a row of the old lanes.
    """
    names = list(positions[0]["sources"])
    made: list[dict[str, Any]] = [{"sources": {}, "tokens": {}, "rows": {}} for _ in range(count)]
    for name in names:
        old = [position["sources"][name] for position in positions]
        begun = max(lane["epoch"] - _untouched(lane) for lane in old)
        waiting = [entry for lane in old for entry in lane.get("inherited", ())]
        for index, lane in enumerate(old):
            if lane["epoch"] <= begun:
                own = {key: value for key, value in lane.items() if key != "inherited"}
                waiting.append(own | {"share": [index, len(old)], "sized": seq_len, "until": begun})
        for index, lane in enumerate(made):
            start = {"epoch": begun + 1, "window": 0, "start": None, "row": 0}
            lane["sources"][name] = start | {"inherited": waiting[index::count]}
        for key in ("tokens", "rows"):
            total = sum(position[key][name] for position in positions)
            for index, lane in enumerate(made):
                lane[key][name] = total * (index + 1) // count - total * index // count
    return made


def _untouched(lane: dict[str, Any]) -> bool:
    """Whether nothing of the lane's epoch has been read."""
    return not lane["window"] and not lane["row"] and lane["start"] is None
