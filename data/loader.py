"""Batches: packed rows in a shuffled order that is a pure function of the seed, with a position that can be saved.

The rows of an epoch come in windows. A window is the next `window_tokens` tokens of documents; it is packed, and its
rows are shuffled, on its own. So the position of a loader is three numbers and a place in the source: epoch, window,
rows of it already used, and where the window begins; to resume, one window is packed again.

All ranks see the same rows in the same order and each takes its slice of every batch, so that a global batch does not
depend on how many ranks share it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from data.document import Picture, Position, Reading, Source
from data.errors import DataError, Policy
from data.images import TEXT, VisionSettings, preprocess
from data.packing import PackedRows, pack_rows
from data.tokenizer import SpecialIds
from data.tokens import Encoded, Encoder, TokenStore, collect

Batch = dict[str, torch.Tensor]
IGNORE = -100
READ_AHEAD = 16  # documents of a stream tokenised at once: a window is longer than asked by less than so many


@dataclass
class Stats:
    """Documents, tokens and bytes of a split (of a streaming source: what was read so far), and how it packs.

    rows, padding (tokens) and split_documents (documents cut into pieces) cover the windows packed so far.
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

    @property
    def padding_share(self) -> float:
        """Padding among all positions of the packed rows."""
        return self.padding / self.positions if self.positions else 0.0

    def add_store(self, store: TokenStore) -> None:
        self.documents += len(store)
        self.tokens += int(store.offsets[-1])
        self.bytes += store.num_bytes
        self.skipped, self.repaired = dict(store.skipped), dict(store.repaired)

    def add_rows(self, rows: PackedRows, seq_len: int) -> None:
        self.rows += len(rows)
        self.positions += len(rows) * seq_len
        self.padding += len(rows) * seq_len - int(rows.length.sum())
        self.split_documents += int((np.unique(rows.document, return_counts=True)[1] > 1).sum())

    def __str__(self) -> str:
        counts = [f"skipped {n} x {reason}" for reason, n in sorted(self.skipped.items())]
        counts += [f"repaired {n} x {reason}" for reason, n in sorted(self.repaired.items())]
        return (
            f"documents {self.documents} tokens {self.tokens} bytes {self.bytes} rows {self.rows} "
            f"padding {self.padding_share:.1e} split {self.split_documents} {', '.join(counts) or 'skipped none'}"
        )


@dataclass(frozen=True)
class Window:
    """Packed rows over a store, and where the next window begins (None: the epoch ends here)."""

    store: TokenStore
    rows: PackedRows
    after: Position


class Windows(Protocol):
    """The windows of an epoch, each from the place where the one before it ended (None: the beginning)."""

    stats: Stats

    def load(self, epoch: int, number: int, start: Position) -> Window: ...


def random_stream(*key: int) -> np.random.RandomState:
    """Random numbers of their own for every key. RandomState, since NumPy promises its numbers for all versions."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=4).digest()
    return np.random.RandomState(int.from_bytes(digest, "little"))


class StoredWindows:
    """Windows over a finished store, its documents shuffled over the whole epoch (seed None: in their order)."""

    def __init__(self, store: TokenStore, seq_len: int, window_tokens: int, seed: int | None):
        self.store, self.seq_len, self.window_tokens, self.seed = store, seq_len, window_tokens, seed
        self.stats = Stats()
        self.stats.add_store(store)
        self._epoch = -1
        self._order = self._ends = np.zeros(0, np.int64)

    def load(self, epoch: int, number: int, start: Position) -> Window:
        if epoch != self._epoch:
            self._epoch, count = epoch, len(self.store)
            self._order = np.arange(count) if self.seed is None else random_stream(self.seed, epoch).permutation(count)
            self._ends = np.cumsum(self.store.lengths[self._order])
        start = start or 0
        reach = self.window_tokens + (int(self._ends[start - 1]) if start else 0)
        end = int(np.searchsorted(self._ends, reach)) + 1
        documents = self._order[start:end]
        rows = pack_rows(self.store.lengths[documents], self.seq_len)
        self.stats.add_rows(rows, self.seq_len)
        rows = PackedRows(documents[rows.document], rows.start, rows.length, rows.offsets)
        return Window(self.store, _shuffled(rows, self.seed, epoch, number), None if end >= len(self.store) else end)


class StreamedWindows:
    """Windows over a source that is tokenised as it is read, its documents in the order of the source."""

    def __init__(self, source: Source, encoder: Encoder, policy: Policy, window_tokens: int, seed: int | None):
        self.source, self.encoder, self.policy = source, encoder, policy
        self.window_tokens, self.seed = window_tokens, seed
        self.stats = Stats()
        self._reading: Reading = iter(())
        self._reached: Position = None

    def load(self, epoch: int, number: int, start: Position) -> Window:
        if start is None or start != self._reached:  # otherwise go on where the last window ended
            self._reading = self.source.read(self.policy, start)
        encoded: list[Encoded] = []
        total, after = 0, start
        while total < self.window_tokens and (batch := list(itertools.islice(self._reading, READ_AHEAD))):
            after = batch[-1][1]()
            for item in self.encoder.encode([document for document, _ in batch], self.policy):
                encoded.append(item)
                total += len(item.ids)
        self._reached = after if total >= self.window_tokens else None
        store = collect(encoded, self.policy)
        rows = pack_rows(store.lengths, self.encoder.seq_len)
        self.stats.add_store(store)
        self.stats.add_rows(rows, self.encoder.seq_len)
        return Window(store, _shuffled(rows, self.seed, epoch, number), self._reached)


def whole(store: TokenStore, seq_len: int) -> Window:
    """A store as one window, its rows in the order of packing."""
    return Window(store, pack_rows(store.lengths, seq_len), None)


def _shuffled(rows: PackedRows, seed: int | None, epoch: int, number: int) -> PackedRows:
    return rows if seed is None else rows.reordered(random_stream(seed, epoch, number).permutation(len(rows)))


class Assembler:
    """Gathers rows into the tensors of a batch (see `TrainLoader`)."""

    def __init__(self, seq_len: int, special: SpecialIds, vision: VisionSettings | None):
        self.seq_len, self.special, self.vision = seq_len, special, vision

    def batch(self, chosen: list[tuple[Window, int]]) -> Batch:
        """The chosen (window, row number) as a batch; a row number of -1 gives a row of padding."""
        shape = len(chosen), self.seq_len
        ids = np.full(shape, self.special.pad, np.int64)
        labels = np.full(shape, IGNORE, np.int64)
        pictures: list[tuple[int, int, Picture]] = []  # row, first position of its document, picture
        lengths: list[list[int]] = []
        for i, (window, row) in enumerate(chosen):
            store, rows, at = window.store, window.rows, 0
            pieces = range(rows.offsets[row], rows.offsets[row + 1]) if row >= 0 else ()
            lengths.append([int(rows.length[piece]) for piece in pieces])
            for piece in pieces:
                document, length = int(rows.document[piece]), int(rows.length[piece])
                first = int(store.offsets[document] + rows.start[piece])
                ids[i, at : at + length] = store.tokens[first : first + length]
                targets = ids[i, at + 1 : at + length]  # the first token is nobody's target
                if store.taught is not None:
                    targets = np.where(store.taught[first + 1 : first + length], targets, IGNORE)
                labels[i, at + 1 : at + length] = targets
                pictures += [(i, at, picture) for picture in store.pictures.get(document, ())]
                at += length
        width = max(1, *map(len, lengths)) if lengths else 1
        seq_lens = np.array([row + [0] * (width - len(row)) for row in lengths], np.int64)
        batch = {"input_ids": ids, "labels": labels, "seq_lens": seq_lens}
        if self.vision is not None:
            batch |= self._images(ids, pictures)
            labels[batch["vision_token_types"] != TEXT] = IGNORE
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def _images(self, ids: np.ndarray, pictures: list[tuple[int, int, Picture]]) -> dict[str, np.ndarray]:
        size = self.vision.patch_size
        types = np.full(ids.shape, TEXT, np.int64)
        patches, grids = [np.zeros((0, 3, size, size), np.float32)], []
        for row, first, picture in pictures:
            pixels, grid = preprocess(picture.open(), self.vision)
            open_places = (ids[row, first:] == self.special.image) & (types[row, first:] == TEXT)
            begin = first + int(open_places.argmax())
            types[row, begin : begin + grid.num_tokens] = grid.token_types()
            patches.append(pixels.numpy())
            grids.append(grid.patches)
        return {
            "vision_token_types": types,
            "image_grid_hws": np.array(grids, np.int64).reshape(-1, 2),
            "pixel_values": np.concatenate(patches),
        }


class TrainLoader:
    """An endless iterator of batches, epoch after epoch, whose position is exact to the row.

    A batch (CPU tensors): input_ids int64 [B, S]; labels int64 [B, S], unshifted, -100 at padding, at image tokens, at
    the first token of every piece and at what a conversation does not teach; seq_lens int64 [B, pieces], zero-padded.
    From a source with images also pixel_values float32 [patches, 3, p, p], image_grid_hws int64 [images, 2] (h, w in
    patches), vision_token_types int64 [B, S].

    B is `batch_size / world_size`: this rank's slice of the rows of a batch over all ranks.
    """

    def __init__(
        self,
        windows: Windows,
        assembler: Assembler,
        batch_size: int,
        rank: int,
        world_size: int,
        fingerprint: dict[str, Any],
        ahead: bool,
    ):
        self.windows, self.assembler, self.fingerprint = windows, assembler, fingerprint
        self.batch_size, self.share = batch_size, batch_size // world_size
        self.rank = rank
        self.epoch = 0
        self._number, self._start, self._row = 0, None, 0
        self._window: Window | None = None
        # Streamed windows are read and tokenised by a thread while the rows of the window before are used up.
        self._reader = ThreadPoolExecutor(1, "data") if ahead else None
        self._coming: tuple[Any, Future[Window]] | None = None
        self._first_window()

    @property
    def stats(self) -> Stats:
        return self.windows.stats

    def __iter__(self) -> TrainLoader:
        return self

    def __next__(self) -> Batch:
        chosen = [self._next_row() for _ in range(self.batch_size)]
        return self.assembler.batch(chosen[self.rank * self.share : (self.rank + 1) * self.share])

    def state_dict(self) -> dict[str, Any]:
        """The position, JSON-able. Valid for any batch size and number of ranks."""
        position = {"epoch": self.epoch, "window": self._number, "start": self._start, "row": self._row}
        return position | {"fingerprint": dict(self.fingerprint)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position: the next batch is the one that would have followed it.

        Raises ValueError naming every setting under which the position would mean something else.
        """
        saved = state["fingerprint"]
        changed = [
            f"data position: {key} was {saved.get(key)!r} when saved and is {value!r} now; restore it or start anew"
            for key, value in self.fingerprint.items()
            if saved.get(key) != value
        ]
        if changed:
            raise ValueError("\n".join(changed))
        self.epoch, self._number, self._row = state["epoch"], state["window"], state["row"]
        self._start, self._window = state["start"], None

    def _first_window(self) -> None:
        """Load the first rows now, so that bad or empty data fails before the first step."""
        self._window = self._load()
        while not len(self._window.rows):
            if self._window.after is None:
                raise DataError("train split", 0, "no documents", "every record was skipped or held out")
            self._turn()
            self._window = self._load()

    def _next_row(self) -> tuple[Window, int]:
        while True:
            if self._window is None:
                self._window = self._load()
            if self._row < len(self._window.rows):
                self._row += 1
                return self._window, self._row - 1
            self._turn()

    def _turn(self) -> None:
        if self._window.after is None:
            self.epoch, self._number = self.epoch + 1, 0
        else:
            self._number += 1
        self._start, self._row, self._window = self._window.after, 0, None

    def _load(self) -> Window:
        place = self.epoch, self._number, self._start
        if self._reader is None:
            return self.windows.load(*place)
        coming, self._coming = self._coming, None
        expected, future = coming or (None, None)
        if expected != place:
            if future is not None:
                future.cancel()
            future = self._reader.submit(self.windows.load, *place)
        window = future.result()
        following = (self.epoch + 1, 0, None) if window.after is None else (self.epoch, self._number + 1, window.after)
        self._coming = following, self._reader.submit(self.windows.load, *following)
        return window


class ValidationLoader:
    """The held-out batches: finite, and the same in every pass, for every training seed.

    held_out: the rows there are; of more than `limit` (0: all) so many are drawn by a fixed seed. The last batch may
    have fewer rows; it is filled with rows of padding only as far as the ranks need equal shares. target_tokens and
    target_bytes are the supervised tokens of all batches and ranks, and the source bytes behind them.
    """

    def __init__(
        self, held_out: Window, assembler: Assembler, batch_size: int, rank: int, world_size: int, limit: int = 0
    ):
        store, rows = held_out.store, held_out.rows
        rows = rows.reordered(random_stream(0).permutation(len(rows))[: limit or len(rows)])
        self.window, self.assembler = Window(store, rows, None), assembler
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.stats = Stats()
        self.stats.add_store(store)
        self.stats.add_rows(rows, assembler.seq_len)
        self.target_tokens, self.target_bytes = _targets(self.window, assembler.special)

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
            share = len(numbers) // self.world_size
            mine = numbers[self.rank * share : (self.rank + 1) * share]
            yield self.assembler.batch([(self.window, number) for number in mine])


def _targets(window: Window, special: SpecialIds) -> tuple[int, int]:
    """Supervised tokens of the rows and the bytes they stand for: all but each piece's first token, image tokens and
    what a conversation does not teach."""
    store, rows = window.store, window.rows
    tokens = num_bytes = 0
    for document, start, length in zip(rows.document, rows.start, rows.length, strict=True):
        first = int(store.offsets[document] + start)
        span = slice(first + 1, first + int(length))
        taught = np.ones(int(length) - 1, np.bool_) if store.taught is None else np.array(store.taught[span])
        if document in store.pictures:
            taught &= store.tokens[span] != special.image
        tokens += int(taught.sum())
        num_bytes += int(store.byte_counts[span][taught].sum(dtype=np.int64))
    return tokens, num_bytes
