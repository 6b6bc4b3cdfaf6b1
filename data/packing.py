"""Best-fit packing: which piece of which document goes into which row. Works on lengths alone.

Documents stand in a row one directly after another, whatever their lengths. A document that fits a row is never cut. A
longer one is cut into whole rows and a remainder, and lends whole rows to gaps that best fit leaves open: it is cut
anyway, and a row spread over the gaps is a row of padding less. Nothing is dropped and nothing repeated. The first
token of a piece that continues a document has no predecessor in its row, so that it is no target there.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

MIN_PIECE = 16  # a gap of fewer tokens is left as padding: a cut so short teaches nothing and costs a target


@dataclass(frozen=True)
class Rows:
    """Packed rows. Piece p is `length[p]` tokens of document `document[p]` from `start[p]` on (all int64 [pieces]);
    row r holds the pieces `offsets[r]:offsets[r + 1]` in that order (int64 [rows + 1])."""

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def reordered(self, order: np.ndarray) -> Rows:
        """The rows `order` (any selection and order of row numbers) as a new set."""
        counts = np.diff(self.offsets)[order]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        pieces = np.repeat(self.offsets[:-1][order] - offsets[:-1], counts) + np.arange(offsets[-1])
        return Rows(self.document[pieces], self.start[pieces], self.length[pieces], offsets)


def pack(lengths: np.ndarray, seq_len: int) -> Rows:
    """Pack documents of these lengths (int64 [documents], all positive) into rows of `seq_len` tokens.

    Deterministic; the rules are in the module's description.
    """
    chunks, remainders = np.divmod(lengths, seq_len)
    bins = _best_fit_decreasing(remainders, chunks * seq_len, seq_len)
    whole = [(doc, chunk * seq_len) for doc in np.flatnonzero(chunks).tolist() for chunk in range(int(chunks[doc]))]
    long_documents = lengths > seq_len  # a document of exactly one row is whole: it lends nothing
    donors = [(doc, start) for doc, start in whole if long_documents[doc]]
    used = _fill_gaps(bins, donors, seq_len)
    rows = [b.pieces for b in bins]
    rows += [[(doc, start, seq_len)] for doc, start in whole if (doc, start) not in used]
    pieces = np.array([p for row in rows for p in row], dtype=np.int64).reshape(-1, 3)
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
    return Rows(pieces[:, 0], pieces[:, 1], pieces[:, 2], offsets)


@dataclass
class _Bin:
    """A row being filled: its pieces (document, start, length) and the tokens still free."""

    pieces: list[tuple[int, int, int]]
    free: int


def _best_fit_decreasing(sizes: np.ndarray, starts: np.ndarray, seq_len: int) -> list[_Bin]:
    """Longest item first, each into the fullest row that takes it. Item i is sizes[i] tokens from starts[i] on."""
    bins: list[_Bin] = []
    by_free: list[list[_Bin]] = [[] for _ in range(seq_len + 1)]
    occupied = np.zeros(seq_len + 1, dtype=bool)  # occupied[f]: some row has exactly f free tokens
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        if not size:
            break
        free = size + int(occupied[size:].argmax())
        if occupied[free]:
            best = by_free[free].pop()
            occupied[free] = bool(by_free[free])
        else:
            best = _Bin([], seq_len)
            bins.append(best)
        best.pieces.append((item, int(starts[item]), size))
        best.free -= size
        by_free[best.free].append(best)
        occupied[best.free] = True
    return bins


def _fill_gaps(bins: list[_Bin], donors: list[tuple[int, int]], seq_len: int) -> set[tuple[int, int]]:
    """Spread whole-row donors over the widest gaps while the gaps hold at least a row; returns the donors used up."""
    gaps = [(-b.free, index) for index, b in enumerate(bins) if b.free >= MIN_PIECE]
    heapq.heapify(gaps)
    room = -sum(free for free, _ in gaps)
    used = set()
    for document, start in donors:
        if room < seq_len:
            break
        used.add((document, start))
        end = start + seq_len
        while start < end:
            index = heapq.heappop(gaps)[1]
            target = bins[index]
            size = min(target.free, end - start)
            target.pieces.append((document, start, size))
            target.free -= size
            start += size
            if target.free >= MIN_PIECE:
                heapq.heappush(gaps, (-target.free, index))
        room = -sum(free for free, _ in gaps)
    return used
