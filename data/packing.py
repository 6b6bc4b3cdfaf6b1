"""Best-fit packing: decides which piece of which document goes into which row. It needs only the lengths of the
documents.

Inside a row, documents follow each other without padding between them. A document that fits into a row is never cut. A
longer document is cut into full rows and a remainder, and the remainder is packed like a short document. Best-fit
packing leaves gaps at the ends of rows. To fill these gaps, some full rows of long documents are cut into pieces: a
long document is cut anyway, and each full row that moves into gaps saves one row of padding. No token is dropped or
repeated. The first token of a piece that continues a document cannot be a target, because its predecessor is in another
row.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from data.progress import Advance

ADVANCE_EVERY = 1024  # documents between two calls of `advance`
MIN_PIECE = 16  # smaller gaps stay padding, because every cut loses one target and a shorter piece trains little


@dataclass(frozen=True)
class PackedRows:
    """Packed rows, each of which is a list of pieces of documents.

    Piece p consists of the `length[p]` tokens of document `document[p]` that begin at its token `start[p]` (all int64
    [pieces]). Row r consists of the pieces from `offsets[r]` up to but not including `offsets[r + 1]`, in this order
    (int64 [rows + 1]).
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def reordered(self, order: np.ndarray) -> PackedRows:
        """Returns a new `PackedRows` with the rows whose indices are in `order`, which can be any selection of rows in
        any order.
        """
        counts = np.diff(self.offsets)[order]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        pieces = np.repeat(self.offsets[:-1][order] - offsets[:-1], counts) + np.arange(offsets[-1])
        return PackedRows(self.document[pieces], self.start[pieces], self.length[pieces], offsets)


def pack_rows(lengths: np.ndarray, seq_len: int, advance: Advance = lambda amount: None) -> PackedRows:
    """Pack documents of these lengths (int64 [documents], all positive) into rows of `seq_len` tokens. advance: a
    function that is called several times, each time with the number of documents packed since the last call.

    The result is deterministic; the docstring of this file gives the rules. The time is nearly linear in the number of
    documents and rows.
    """
    full_rows, remainders = np.divmod(lengths, seq_len)
    bins = _best_fit_decreasing(remainders, full_rows * seq_len, seq_len, advance)
    full = [(doc, row * seq_len) for doc in np.flatnonzero(full_rows).tolist() for row in range(int(full_rows[doc]))]
    # A document of exactly one row is not cut into full rows, so it must not be cut to fill gaps either
    cut = lengths > seq_len
    spread = _fill_gaps(bins, [(doc, start) for doc, start in full if cut[doc]], seq_len)
    rows = [b.pieces for b in bins]
    rows += [[(doc, start, seq_len)] for doc, start in full if (doc, start) not in spread]
    pieces = np.array([p for row in rows for p in row], dtype=np.int64).reshape(-1, 3)
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
    return PackedRows(pieces[:, 0], pieces[:, 1], pieces[:, 2], offsets)


def repack_rows(rows: PackedRows, used: int, documents: np.ndarray, seq_len: int) -> PackedRows:
    """Pack the pieces of `rows` from row index `used` on into rows of `seq_len` tokens. No token is dropped or
    repeated.

    Pieces that continue each other in a document are joined first. If no row was used, the result is therefore the same
    as if the documents had been packed into rows of `seq_len` tokens from the start.

    documents: the indices of all documents in `rows`, in the order in which the documents were packed.
    """
    first = rows.offsets[used]
    document, start, length = rows.document[first:], rows.start[first:], rows.length[first:]
    by_number = np.argsort(documents)
    place = by_number[np.searchsorted(documents, document, sorter=by_number)]
    order = np.lexsort((start, place))
    document, start, length = document[order], start[order], length[order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (document[1:] != document[:-1]) | (start[1:] != start[:-1] + length[:-1])
    at = np.flatnonzero(begins)
    packed = pack_rows(np.add.reduceat(length, at) if len(at) else length, seq_len)
    item = at[packed.document]
    return PackedRows(document[item], start[item] + packed.start, packed.length, packed.offsets)


@dataclass
class _Bin:
    """A row that is being filled: its pieces (document, start, length) and the number of free tokens."""

    pieces: list[tuple[int, int, int]]
    free: int


def _best_fit_decreasing(sizes: np.ndarray, starts: np.ndarray, seq_len: int, advance: Advance) -> list[_Bin]:
    """Pack items into rows, longest item first, each into the fullest row that has room for it. Item i consists of the
    `sizes[i]` tokens of document i that begin at token `starts[i]`.
    """
    bins: list[_Bin] = []
    by_free: list[list[_Bin]] = [[] for _ in range(seq_len + 1)]
    occupied = np.zeros(seq_len + 1, dtype=bool)  # occupied[f]: some row has exactly f free tokens
    for number, item in enumerate(np.argsort(-sizes, kind="stable").tolist(), 1):
        if not number % ADVANCE_EVERY:
            advance(ADVANCE_EVERY)
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


def _fill_gaps(bins: list[_Bin], full_rows: list[tuple[int, int]], seq_len: int) -> set[tuple[int, int]]:
    """Cut full rows, given as (document, start), into pieces that fill the gaps of other rows, widest gap first, until
    the gaps together have less room than a row. Returns the rows that were cut.
    """
    gaps = [(-b.free, index) for index, b in enumerate(bins) if b.free >= MIN_PIECE]
    heapq.heapify(gaps)
    room = -sum(free for free, _ in gaps)  # free tokens of all gaps on the heap
    spread = set()
    for document, start in full_rows:
        if room < seq_len:
            break
        spread.add((document, start))
        end = start + seq_len
        while start < end:
            free, index = heapq.heappop(gaps)
            target = bins[index]
            size = min(target.free, end - start)
            target.pieces.append((document, start, size))
            target.free -= size
            start += size
            room += free
            if target.free >= MIN_PIECE:
                heapq.heappush(gaps, (-target.free, index))
                room += target.free
    return spread
