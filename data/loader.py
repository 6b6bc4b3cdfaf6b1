"""Data loaders that yield batches of packed rows. The position of a loader can be saved and resumed exactly.

If the data are tokenised before training, all ranks iterate over the same rows in the same order (`data/rows.py`), and
each rank takes its slice of every batch. If some source is tokenised during training, each rank reads the lanes of its
own rows (`data/lanes.py`). In both cases a global batch has the same rows on any number of ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from data.collate import Batch, Collator
from data.lanes import LaneRows
from data.progress import progress
from data.rows import MixedRows, MixedStats, RowReader
from data.tokenizer import SpecialIds
from data.windows import PackingWindow, Stats, random_stream

Finished = TypeVar("Finished")
T = TypeVar("T")


class Once(Protocol):
    """A function that calls its argument in one process of the run and returns the result in every process. A call
    through `Once` keeps the processes from all reading the same data.
    """

    def __call__(self, make: Callable[[], T], /) -> T: ...


def in_this_process(make: Callable[[], T]) -> T:
    """Call `make` and return its result: the `Once` of a run that has a single process."""
    return make()


class _Place(NamedTuple):
    """A point in the training data: the position to save there, and the values that `sources` and `counts` return
    there.
    """

    position: dict[str, Any]
    progress: dict[str, dict[str, float]]
    counts: torch.Tensor | None


class TrainLoader:
    """An endless iterator over this rank's batches (see `Collator`), epoch after epoch.

    Args:
        rows: the iterator over packed rows of one source, or of a mixture of sources; or the lanes of this rank.
        batch_rows: number of rows that all row groups together take at a time (see `build_loaders`); this rank gets
            `batch_rows / row_groups` of them.
        fingerprint: the settings that must be unchanged for a saved position to be valid.
    """

    def __init__(
        self,
        rows: RowReader | MixedRows | LaneRows,
        collator: Collator,
        batch_rows: int,
        row_group: int,
        row_groups: int,
        fingerprint: dict[str, Any],
    ):
        self.rows, self.collator, self.fingerprint = rows, collator, fingerprint
        self.batch_rows, self.rows_per_group = batch_rows, batch_rows // row_groups
        self.row_group = row_group
        self._handed_out: _Place | None = None  # while `ahead` is used: the place behind the batch yielded last

    @property
    def epoch(self) -> int:
        return self.rows.epoch

    @property
    def seq_len(self) -> int:
        """Number of tokens in a row."""
        return self.collator.seq_len

    @property
    def stats(self) -> Stats | MixedStats:
        return self.rows.stats

    def sources(self, counts: torch.Tensor | None = None) -> dict[str, dict[str, float]]:
        """For each source of a mixture, the number of tokens, rows and epochs so far; empty without a mixture.

        counts: the sum over all ranks of what the method `counts` returns. If it is None, the numbers are those that
        this rank knows; they cover all ranks if the method `counts` returns None.
        """
        if counts is not None and isinstance(self.rows, LaneRows):
            return self.rows.progress(counts.numpy(force=True))
        return self._place().progress

    def counts(self) -> torch.Tensor | None:
        """The amount of data of each source of a mixture that this rank has used, float64 [sources, 4] (see
        `LaneRows.counts`), to be summed over ranks; None if there is no mixture, or if all ranks count the same rows.
        """
        counts = self._place().counts
        return None if counts is None else counts.clone()  # collectives change a tensor in place

    def __iter__(self) -> TrainLoader:
        return self

    def __next__(self) -> Batch:
        first = self.row_group * self.rows_per_group
        own = slice(first, first + self.rows_per_group)
        return self.collator.collate(self.rows.next_rows(self.batch_rows, own))

    def ahead(self, finish: Callable[[Batch], Finished], depth: int) -> Generator[Finished, None, None]:
        """Yield `finish(batch)` for each of the next batches. A background thread reads and finishes up to `depth`
        batches ahead, so that packing, decoding of images and `finish` run beside training. An error of the thread is
        raised in place of its batch.

        The position that `state_dict` saves and the numbers of `sources` are those of the batch that was yielded last.
        Until the generator is closed, do not iterate over the loader itself, and do not load a position.
        """
        self._handed_out = self._now()

        def read() -> tuple[Finished, _Place]:
            return finish(next(self)), self._now()

        thread = ThreadPoolExecutor(1, "batches")
        try:
            pending = deque(thread.submit(read) for _ in range(depth))
            while True:
                batch, self._handed_out = pending.popleft().result()
                pending.append(thread.submit(read))
                yield batch
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    def _place(self) -> _Place:
        return self._handed_out or self._now()

    def _now(self) -> _Place:
        """The point in the training data after the rows that were read last."""
        progress = self.rows.progress() if isinstance(self.rows, LaneRows | MixedRows) else {}
        counts = torch.from_numpy(self.rows.counts()) if isinstance(self.rows, LaneRows) and progress else None
        return _Place(self.rows.state_dict(), progress, counts)

    def state_dict(self) -> dict[str, Any]:
        """The position in the training data as JSON-compatible values; if there are several ranks,
        `data.lanes.merge_positions` combines those of all. A saved position remains valid if the batch size, the
        length of rows (`train_seq_len` of `build_loaders`) or the number of ranks changes.
        """
        return self._place().position | {"fingerprint": dict(self.fingerprint)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved position, so that the next batch is the one that followed when it was saved.

        Raises ValueError that lists every setting that has changed since the position was saved and makes it invalid.
        """
        saved = state["fingerprint"]
        changed = [
            f"data position: {key} was {saved.get(key)!r} when saved and is {self.fingerprint.get(key)!r} now; restore "
            "it or begin anew"
            for key in {**self.fingerprint, **saved}
            if saved.get(key) != self.fingerprint.get(key)
        ]
        if changed:
            raise ValueError("\n".join(changed))
        self.rows.load_state_dict(state)
        self._handed_out = None


class ValidationLoader:
    """The held-out batches (see `Collator`). The set of batches is finite, and is the same in every pass and for every
    training seed.

    The last batch may have fewer rows than the others. Rows of padding are added to it only as needed to give all ranks
    the same number of rows.

    Args:
        held_out: all held-out rows.
        limit: the number of held-out rows to use, which are drawn with a fixed seed. 0 means all.
        once: see `Once`.

    Attributes:
        target_tokens: the number of supervised tokens in the batches of all ranks.
        target_bytes: the number of bytes of source text of the supervised tokens.
    """

    def __init__(
        self,
        held_out: PackingWindow,
        collator: Collator,
        batch_rows: int,
        row_group: int,
        row_groups: int,
        limit: int = 0,
        once: Once = in_this_process,
    ):
        store, rows = held_out.store, held_out.rows
        rows = rows.reordered(random_stream(0).permutation(len(rows))[: limit or len(rows)])
        self.window, self.collator = replace(held_out, rows=rows), collator
        self.batch_rows, self.row_group, self.row_groups = batch_rows, row_group, row_groups
        self.stats = Stats()
        self.stats.add_store(store)
        self.stats.add_rows(rows, collator.seq_len)
        self.target_tokens, self.target_bytes = once(lambda: _targets(self.window, collator.special))

    @property
    def bytes_per_token(self) -> float:
        """Bytes of source text per supervised token, so that bits per byte = nats per token / ln 2 /
        bytes_per_token.
        """
        return self.target_bytes / self.target_tokens

    def __len__(self) -> int:
        return math.ceil(len(self.window.rows) / self.batch_rows)

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self.window.rows), self.batch_rows):
            numbers = list(range(first, min(first + self.batch_rows, len(self.window.rows))))
            numbers += [-1] * (-len(numbers) % self.row_groups)
            count = len(numbers) // self.row_groups
            mine = numbers[self.row_group * count : (self.row_group + 1) * count]
            yield self.collator.collate([(self.window, number) for number in mine])


class MixedValidation:
    """The held-out batches of a mixture, one source after another.

    Attributes:
        parts: the validation loader of each source, by the name of the source.
        current: the name of the source of the most recent batch.
    """

    def __init__(self, parts: dict[str, ValidationLoader]):
        self.parts, self.current = parts, ""
        self.stats = MixedStats({name: part.stats for name, part in parts.items()})

    @property
    def bytes_per_token(self) -> float:
        """Bytes of source text per supervised token, over all sources together."""
        return sum(p.target_bytes for p in self.parts.values()) / sum(p.target_tokens for p in self.parts.values())

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    def __iter__(self) -> Iterator[Batch]:
        for name, part in self.parts.items():
            for batch in part:
                self.current = name
                yield batch


def _targets(window: PackingWindow, special: SpecialIds) -> tuple[int, int]:
    """Returns the number of tokens with a label (see `Collator`) in the rows of a packing window, and the number of
    bytes of source text of these tokens.
    """
    store, rows = window.store, window.rows
    tokens = num_bytes = 0
    assert store.byte_counts is not None, "a validation store counts bytes"
    with progress("counting held-out tokens", len(rows.document), shared=True) as advance:
        for document, start, length in zip(rows.document, rows.start, rows.length, strict=True):
            first = int(store.offsets[document] + start)
            span = slice(first + 1, first + int(length))
            mask = store.loss_mask
            supervised = np.ones(int(length) - 1, np.bool_) if mask is None else np.array(mask[span])
            if document in store.pictures:
                supervised &= store.tokens[span] != special.image
            tokens += int(supervised.sum())
            num_bytes += int(store.byte_counts[span][supervised].sum(dtype=np.int64))
            advance(1)
    return tokens, num_bytes
