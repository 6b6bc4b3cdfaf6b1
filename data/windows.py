"""Packing windows: consecutive groups of documents, each of which is packed into rows and shuffled.

A packing window consists of the next documents of a source, up to `data.window_tokens` tokens. Each window is packed
and shuffled independently of the others, so the place in the source where it begins is enough to make it again. (For
streams this is often called a shuffle buffer.)
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from data.document import WHOLE, Position, Reading, Share, Source
from data.errors import BadRecordPolicy
from data.packing import PackedRows, pack_rows, repack_rows
from data.progress import progress
from data.tokens import Encoded, Encoder, TokenStore, collect

# The number of documents of a stream that are tokenised at once. A window can be up to READ_AHEAD - 1 documents longer
# than requested.
READ_AHEAD = 16


@dataclass
class Stats:
    """Statistics of a split of the data and its packing; for a stream they cover what has been read so far.

    Attributes:
        documents, tokens, bytes: number of documents, tokens and bytes of UTF-8 source text in the split.
        rows: number of rows packed so far.
        positions: number of token positions in the packed rows.
        padding: number of token positions that are padding.
        split_documents: number of documents packed so far that were cut into several pieces.
        skipped: for each reason, the number of records that were left out.
        repaired: for each reason, the number of records that were repaired.
        formats: for each format, the number of records recognised in it.
        unused: for each unused key, the number of records that have it.
    """

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    rows: int = 0
    positions: int = 0
    padding: int = 0
    split_documents: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    repaired: dict[str, int] = field(default_factory=dict)
    formats: dict[str, int] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)

    @property
    def padding_share(self) -> float:
        """The fraction of padding in the packed rows."""
        return self.padding / self.positions if self.positions else 0.0

    def add_store(self, store: TokenStore) -> None:
        self.documents += len(store)
        self.tokens += int(store.offsets[-1])
        self.bytes += store.num_bytes
        self.skipped, self.repaired = dict(store.skipped), dict(store.repaired)
        self.formats, self.unused = dict(store.formats), dict(store.unused)

    def add_rows(self, rows: PackedRows, seq_len: int) -> None:
        self.rows += len(rows)
        self.positions += len(rows) * seq_len
        self.padding += len(rows) * seq_len - int(rows.length.sum())
        self.split_documents += int((np.unique(rows.document, return_counts=True)[1] > 1).sum())

    def __str__(self) -> str:
        counts = [f"skipped {n} x {reason}" for reason, n in sorted(self.skipped.items())]
        counts += [f"repaired {n} x {reason}" for reason, n in sorted(self.repaired.items())]
        known = [f"read as {name}: {n} records" for name, n in sorted(self.formats.items())]
        known += [f"keys not used: {', '.join(sorted(self.unused))}"] if self.unused else []
        return (
            f"documents {self.documents} tokens {self.tokens} bytes {self.bytes} rows {self.rows} "
            f"padding {self.padding_share:.1e} split {self.split_documents} {', '.join(counts) or 'skipped none'}"
            + "".join(f"; {text}" for text in known)
        )


@dataclass(frozen=True)
class PackingWindow:
    """Packed and shuffled rows of documents in `store`, and the position where the next window begins (None at the end
    of the epoch). `documents`: int64, the indices in `store` of the packed documents, in the order in which they were
    packed.
    """

    store: TokenStore
    rows: PackedRows
    after: Position
    documents: np.ndarray


class Windows(Protocol):
    """The interface of an object that loads the packing windows of every epoch.

    stats: statistics of the data loaded so far. seq_len: number of tokens in a row. seed, share: determine the order of
    rows (with seed None, rows are not shuffled).
    """

    stats: Stats
    seq_len: int
    seed: int | None
    share: Share

    def load(self, epoch: int, number: int, start: Position) -> PackingWindow:
        """Load window `number` of an epoch, which begins at the position `start`, where the previous window ended (None
        for the first window).
        """
        ...


def random_stream(*key: int) -> np.random.RandomState:
    """A random number generator seeded by a key. The generator is a RandomState because NumPy guarantees its numbers to
    be the same in all versions.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=4).digest()
    return np.random.RandomState(int.from_bytes(digest, "little"))


class StoredWindows:
    """The packing windows of a token store that holds the whole split. All documents of an epoch are shuffled; with
    seed None nothing is shuffled.

    share: which documents of each epoch are used, by their index in the epoch's order. stats: is updated if given, so
    that several shares can be counted together; otherwise new statistics of the store are created.
    """

    def __init__(
        self,
        store: TokenStore,
        seq_len: int,
        window_tokens: int,
        seed: int | None,
        share: Share = WHOLE,
        stats: Stats | None = None,
    ):
        self.store, self.seq_len, self.window_tokens, self.seed = store, seq_len, window_tokens, seed
        self.share = share
        if stats is None:
            stats = Stats()
            stats.add_store(store)
        self.stats = stats
        self._epoch = -1
        self._order = self._ends = np.zeros(0, np.int64)

    def load(self, epoch: int, number: int, start: Position) -> PackingWindow:
        if epoch != self._epoch:
            self._epoch, count = epoch, len(self.store)
            order = np.arange(count) if self.seed is None else random_stream(self.seed, epoch).permutation(count)
            self._order = order[self.share[0] :: self.share[1]]
            self._ends = np.cumsum(self.store.lengths[self._order])
        start = start or 0
        last_token = self.window_tokens + (int(self._ends[start - 1]) if start else 0)
        end = int(np.searchsorted(self._ends, last_token)) + 1
        documents = self._order[start:end]
        rows = pack_rows(self.store.lengths[documents], self.seq_len)
        self.stats.add_rows(rows, self.seq_len)
        rows = PackedRows(documents[rows.document], rows.start, rows.length, rows.offsets)
        after = None if end >= len(self._order) else end
        return PackingWindow(self.store, _shuffled(rows, self.seed, epoch, number, self.share), after, documents)


class StreamedWindows:
    """The packing windows of a source that is tokenised while it is read. Documents stay in the order of the source,
    and only the packed rows of a window are shuffled; with seed None nothing is shuffled.

    share: which share of a stream `source` is; shares of one stream are shuffled differently. stats: is updated if
    given, so that several shares can be counted together; in this case all of them must have the same `policy`.
    keep_open: whether files stay open between two windows; if not, every window opens them again at its position.
    seq_len: number of tokens in a row; None means the `seq_len` of the encoder.
    """

    def __init__(
        self,
        source: Source,
        encoder: Encoder,
        policy: BadRecordPolicy,
        window_tokens: int,
        seed: int | None,
        share: Share = WHOLE,
        stats: Stats | None = None,
        keep_open: bool = True,
        seq_len: int | None = None,
    ):
        self.source, self.encoder, self.policy = source, encoder, policy
        self.seq_len = encoder.seq_len if seq_len is None else seq_len
        self.window_tokens, self.seed, self.share = window_tokens, seed, share
        self.stats, self.keep_open = Stats() if stats is None else stats, keep_open
        self._reading: Reading = iter(())
        self._reached: Position = None

    def load(self, epoch: int, number: int, start: Position) -> PackingWindow:
        if start is None or start != self._reached:  # otherwise the open reader continues where the last window ended
            self._reading = self.source.read(self.policy, start)
        encoded: list[Encoded] = []
        total, after = 0, start
        while total < self.window_tokens and (batch := list(itertools.islice(self._reading, READ_AHEAD))):
            after = batch[-1][1]()
            for item in self.encoder.encode([document for document, _ in batch], self.policy):
                encoded.append(item)
                total += len(item.ids)
        reached = after if total >= self.window_tokens else None
        self._reached = reached
        if not self.keep_open:
            self._reading, self._reached = iter(()), None
        store = collect(encoded, self.policy)
        rows = pack_rows(store.lengths, self.seq_len)
        self.stats.add_store(store)
        self.stats.add_rows(rows, self.seq_len)
        rows = _shuffled(rows, self.seed, epoch, number, self.share)
        return PackingWindow(store, rows, reached, np.arange(len(store)))


def repacked(
    windows: Windows, window: PackingWindow, used: int, seq_len: int, epoch: int, number: int
) -> PackingWindow:
    """Packing window `number` of an epoch, with its rows from index `used` on repacked to `seq_len` tokens each."""
    rows = repack_rows(window.rows, used, window.documents, seq_len)
    return replace(window, rows=_shuffled(rows, windows.seed, epoch, number, windows.share))


def whole_split(store: TokenStore, seq_len: int) -> PackingWindow:
    """All documents of a token store as one packing window, not shuffled. A long packing shows its progress."""
    with progress("packing the held-out data", len(store), shared=True) as advance:
        return PackingWindow(store, pack_rows(store.lengths, seq_len, advance), None, np.arange(len(store)))


def _shuffled(rows: PackedRows, seed: int | None, epoch: int, number: int, share: Share) -> PackedRows:
    key = () if share == WHOLE else share
    return rows if seed is None else rows.reordered(random_stream(seed, epoch, number, *key).permutation(len(rows)))
