"""One forward pass over new tokens of cached sequences, and the interface of a layer to the cache during the pass.

A `Step` computes the sequence layout of the new tokens; attention layers read and write the cache only through
`LayerCache`. Some tokens of a tentative step may be rejected afterwards, such as a drafter's proposals. `Step.commit`
is told which tokens are kept, and leaves the cache as if the others had never been processed.

In shapes, T is the number of new tokens in a step, B the number of its sequences, W the window size, r the compression
ratio, D the head dimension, Di the indexer's head dimension, K the number of selected entries, and T' the number of
keys on the window axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from model.cache.pages import Cache
from model.cache.store import Store, as_bytes
from model.engram import engram_tables, hash_ids
from model.layout import Entries, SequenceLayout
from model.rope import rotations


class WindowAxis(NamedTuple):
    """The window keys of all sequences on one axis of length T': for each sequence, the earlier keys in its window
    ring, then the keys of its new tokens.

    source: int64 [T'], the row of each key in the concatenation of the ring buffers [B * W] and the new tokens [T].
    place: int64 [T], the index of each new token on the axis.
    start: int64 [T'], for each key, the index on the axis of the first key in the sliding window that ends at this key.
    """

    source: Tensor
    place: Tensor
    start: Tensor

    def spread(self, x: Tensor, fill: int) -> Tensor:
        """Copy the values x [T, ...] of the new tokens to the tokens' places on the axis. Returns [T', ...], with the
        value `fill` for earlier keys.
        """
        if len(self.source) == len(self.place):
            return x
        return x.new_full((len(self.source), *x.shape[1:]), fill).index_copy(0, self.place, x)


@dataclass
class Span:
    """The tokens of one sequence in a step. `past` is the number of tokens of the sequence before this step, and
    `history` contains the last of these tokens. There are no window keys before position `window_from`.
    """

    row: int
    tokens: list[int]
    image: list[bool]
    past: int
    window_from: int
    history: list[tuple[int, bool]]

    def cut(self, begin: int, end: int, window_from: int, back: int) -> Span:
        """Returns a span with the tokens from `begin` to `end` - 1. `back` is the number of tokens in its history."""
        history = (self.history + list(zip(self.tokens, self.image, strict=True))[:begin])[-back:]
        cut = slice(begin, end)
        return Span(self.row, self.tokens[cut], self.image[cut], self.past + begin, window_from, history)


Made = TypeVar("Made")


def once_a_ratio(make: Callable[[Step, int], Made]) -> Callable[[Step, int], Made]:
    """A decorator that caches the result of a `Step` method for each compression ratio, because all layers with the
    same ratio use the same result.
    """

    @wraps(make)
    def cached(step: Step, ratio: int) -> Made:
        key = (make.__name__, ratio)
        if key not in step.made:
            step.made[key] = make(step, ratio)
        return step.made[key]

    return cached


class Step:
    """One forward pass over new tokens of cached sequences. In `layout`, each sequence is one document with only the
    new tokens, but positions and visible entries count the cached tokens too.

    A step with one token per sequence is a decoding step: for each query, the W window keys and the K selected entries
    are gathered, and each query has its own range of entry slots. A tentative step (at most W tokens per sequence) also
    gathers keys and entries for each query, but the queries of one sequence share its entry slots.
    """

    def __init__(self, cache: Cache, spans: Sequence[Span], tentative: bool = False):
        self.cache, self.config, self.spans = cache, cache.config, spans
        self.counts = [len(span.tokens) for span in spans]
        self.tentative = tentative
        self._single = all(count == 1 for count in self.counts)
        self.decoding = self._single or tentative
        self._later: list[Callable[[], None]] = []
        self.made: dict[tuple[str, int], Any] = {}  # see `once_a_ratio`
        for span in spans:
            cache.reserve(span.row, span.past + len(span.tokens))
        self.row = torch.tensor([span.row for span in spans])
        self.window_from = torch.tensor([span.window_from for span in spans])
        self.host_past = past = torch.tensor([span.past for span in spans])
        self.host_count = self.host_kept = count = torch.tensor(self.counts)
        self.start = count.cumsum(0) - count
        self.document = torch.repeat_interleave(torch.arange(len(spans)), count)
        self.offset = torch.arange(len(self.document)) - self.start[self.document]
        self.position = past[self.document] + self.offset
        owned = [cache.sequence(span.row).pages for span in spans]
        depth = max(map(len, owned))
        self.pages = torch.tensor([pages + [0] * (depth - len(pages)) for pages in owned])
        self.ids = self.on_device(torch.tensor([token for span in spans for token in span.tokens]))
        self.layout = self._build_layout()

    @classmethod
    def after(
        cls,
        cache: Cache,
        rows: Sequence[int],
        tokens: Sequence[list[int]],
        images: Sequence[list[bool]] | None = None,
        tentative: bool = False,
    ) -> Step:
        """Make the step in which `tokens[i]` follow the cached tokens of row `rows[i]`; `images[i]` marks the image
        tokens among them.
        """
        spans = []
        for i, row in enumerate(rows):
            state = cache.sequence(row)
            image = images[i] if images else [False] * len(tokens[i])
            spans.append(Span(row, tokens[i], image, state.length, state.window_from, state.history))
        return cls(cache, spans, tentative)

    @cached_property
    def splits(self) -> bool:
        """Whether decoder layers have other tokens or other sliding windows than encoder layers in this step."""
        cache, window = self.cache, self.config.sliding_window
        pairs = [(span, cache.sequence(span.row).decoder_from) for span in self.spans]
        return any(span.window_from < begin and span.past - begin < window - 1 for span, begin in pairs)

    def split(self) -> tuple[StepPart | None, StepPart | None]:
        """Split the step for decoder layers into a part with the tokens before each row's `decoder_from`, and a part
        with the tokens from `decoder_from` on. A part without tokens is None.
        """
        early, late = [], []
        back = self.config.engram_max_ngram_size - 1
        for span in self.spans:
            begin = self.cache.sequence(span.row).decoder_from
            at = min(max(0, begin - span.past), len(span.tokens))
            early.append(span.cut(0, at, span.window_from, back))
            late.append(span.cut(at, len(span.tokens), begin, back))
        is_late = self.offset >= torch.tensor([len(span.tokens) for span in early])[self.document]
        parts = []
        for spans, mine in ((early, ~is_late), (late, is_late)):
            spans = [span for span in spans if span.tokens]
            parts.append(StepPart(Step(self.cache, spans), self.on_device(mine.nonzero().flatten())) if spans else None)
        return parts[0], parts[1]

    def on_device(self, x: Tensor) -> Tensor:
        return x.to(self.cache.device, non_blocking=True)

    def _build_layout(self) -> SequenceLayout:
        frequencies = self.cache.frequencies
        position = self.on_device(self.position)
        start = self.on_device(self.start[self.document])
        return SequenceLayout(
            rows=1,
            row_length=len(self.document),
            gather=None,
            document=self.on_device(self.document),
            document_start=start,
            document_lengths=self.on_device(self.host_count),
            window_start=start,  # not used in a step, whose windows are given by `WindowAxis`
            decoder_window_start=start,
            position=position,
            image=self._image(),
            phasors=rotations(position, frequencies[False]),
            phasors_yarn=rotations(position, frequencies[True]),
            entries={r: self._entries(r) for r in self.cache.ratios},
        )

    def _image(self) -> Tensor | None:
        flags = [flag for span in self.spans for flag in span.image]
        return self.on_device(torch.tensor(flags)) if any(flags) else None

    def _entries(self, ratio: int) -> Entries:
        """The `Entries` of one compression ratio. The fields `phasors` and `members` describe new entries only;
        `members` are row numbers in the concatenation of open groups [B * r] and new tokens [T]. Each query gets the
        range of slots that it sees. Every sequence has the same number of slots (`own` in the code), and the slots of
        sequence b follow the slots of sequence b - 1.
        """
        own = self.pages.shape[1] * self.cache.page_tokens // ratio
        owner, number = self._new_entries(ratio)
        token = number[:, None] * ratio + torch.arange(ratio) - self.host_past[owner, None]  # < 0: before this step
        open_token = owner[:, None] * ratio + token + self.host_past[owner, None] % ratio
        new_token = len(self.spans) * ratio * (ratio > 1) + self.start[owner, None] + token
        first = self.document * own
        last = first + (self.position + 1) // ratio
        return Entries(
            ratio=ratio,
            slots=len(self.spans) * own,
            members=self.on_device(torch.where(token < 0, open_token, new_token)),
            phasors=rotations(self.on_device(number * ratio), self.cache.frequencies[True]),
            visible_from=self.on_device(first),
            visible_to=self.on_device(last),
            host_from=first.numpy(),
            host_to=last.numpy(),
            own=own if self._single else None,
        )

    def _new_entries(self, ratio: int) -> tuple[Tensor, Tensor]:
        """Returns two numbers for each entry that this step completes: the index of its sequence in the step, and the
        number of the entry in the sequence.
        """
        closing = (self.position + 1) % ratio == 0
        return self.document[closing], self.position[closing] // ratio

    def layer(self, number: int) -> LayerCache:
        return LayerCache(self, number)

    @cached_property
    def engram_axis(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """The history of each sequence followed by its new tokens, as a tuple (token ids; for each token the position
        where its sequence starts; image flags, or None if there are no images; positions of the new tokens).
        """
        ids: list[int] = []
        image: list[bool] = []
        start: list[int] = []
        place: list[int] = []
        for span in self.spans:
            begin, new = len(ids), len(ids) + len(span.history)
            ids += [token for token, _ in span.history] + span.tokens
            image += [flag for _, flag in span.history] + span.image
            start += [begin] * (len(ids) - begin)
            place += range(new, len(ids))
        masked = self.on_device(torch.tensor(image)) if any(image) else None
        tokens, starts, places = (self.on_device(torch.tensor(x)) for x in (ids, start, place))
        return tokens, starts, masked, places

    def engram_rows(self, layer: int, token_map: Tensor) -> Tensor:
        """The table rows int64 [T, G] that the Engram of backbone layer `layer` looks up for the new tokens."""
        config = self.config
        ids, start, masked, place = self.engram_axis
        number = config.engram_layer_ids.index(layer)
        found = hash_ids(engram_tables(config), number, token_map, config.engram_pad_token_id, ids, start, masked)
        return found.index_select(0, place)

    def commit(self, kept: Sequence[int] | None = None) -> None:
        """Record the tokens of the step as processed. In a tentative step, only the first `kept[i]` tokens of each
        sequence i are recorded, and the others are discarded. Call this method after all layers have run.
        """
        if kept is not None:
            self.host_kept = torch.tensor(kept)
        for write in self._later:
            write()
        back = self.config.engram_max_ngram_size - 1
        for span, end in zip(self.spans, self.host_kept.tolist(), strict=True):
            state = self.cache.sequence(span.row)
            state.length += end
            state.history = span.cut(end, end, 0, back).history
            if self.tentative:
                self.cache.trim(span.row)

    def when_kept(self, write: Callable[[], None]) -> None:
        """Call `write`, which stores only the kept tokens: immediately in an ordinary step, and during `commit` in a
        tentative step.
        """
        if self.tentative:
            self._later.append(write)
        else:
            write()

    # --- index tensors that several layers share

    @cached_property
    def ring_rows(self) -> Tensor:
        """The row numbers int64 [B, W] of the sequences' window rings in a window store."""
        return self.on_device(self.row[:, None] * self.config.sliding_window + torch.arange(self.config.sliding_window))

    @cached_property
    def ring_writes(self) -> tuple[Tensor, Tensor]:
        """The new tokens to store in the window rings (the last W kept tokens of each sequence), and the rows of the
        window store where they go.
        """
        window = self.config.sliding_window
        end = self.host_kept[self.document]
        kept = ((self.offset < end) & (self.offset >= end - window)).nonzero().flatten()
        place = self.row[self.document[kept]] * window + self.position[kept] % window
        return self.on_device(kept), self.on_device(place)

    @cached_property
    def ring_hidden(self) -> Tensor:
        """Returns a mask, bool [B, W], that is true for each row of a window ring without a key of the current window,
        after the step's token has been added.
        """
        window = self.config.sliding_window
        age = (self.position[:, None] - torch.arange(window)) % window
        return self.on_device(self.position[:, None] - age < self.window_from[:, None])

    @cached_property
    def windows(self) -> tuple[Tensor, Tensor]:
        """The W window keys of each query of a tentative step, as two tensors. The first, int64 [T, W], gives the row
        of each key in the concatenation of ring rows [B * W] and new tokens [T]. The second, bool [T, W], is true where
        the window has no key.
        """
        window = self.config.sliding_window
        position = self.position[:, None] - torch.arange(window - 1, -1, -1)
        new = position - self.host_past[self.document, None]
        ring = self.document[:, None] * window + position % window
        source = torch.where(new < 0, ring, len(self.spans) * window + self.start[self.document, None] + new)
        return self.on_device(source), self.on_device(position < self.window_from[self.document, None])

    @cached_property
    def axis(self) -> WindowAxis:
        window, sequences = self.config.sliding_window, len(self.spans)
        kept = (self.host_past - self.window_from).clamp(max=window - 1)  # number of earlier keys that some query sees
        total = kept + self.host_count
        start = total.cumsum(0) - total
        owner = torch.repeat_interleave(torch.arange(sequences), total)
        index = torch.arange(len(owner))
        token = index - start[owner] - kept[owner]  # < 0: before this step
        ring = owner * window + (self.host_past[owner] + token) % window
        source = torch.where(token < 0, ring, sequences * window + self.start[owner] + token)
        place = start[self.document] + kept[self.document] + self.offset
        begin = torch.maximum(start[owner], index - (window - 1))
        return WindowAxis(*(self.on_device(x) for x in (source, place, begin)))

    @once_a_ratio
    def open_places(self, ratio: int) -> Tensor:
        """The row numbers int64 [B * r] of the sequences' open compression groups in the store of open groups."""
        return self.on_device(self.row[:, None] * ratio + torch.arange(ratio)).flatten()

    @once_a_ratio
    def open_writes(self, ratio: int) -> tuple[Tensor, Tensor]:
        """The new tokens whose compression groups are still incomplete after this step, and the rows of the cache's
        store of open groups into which they are written. A token's row depends on its number in its group, so the
        tokens of completed groups are overwritten later and never read.
        """
        end = (self.host_past + self.host_kept)[self.document]
        kept = ((self.position < end) & (self.position >= end // ratio * ratio)).nonzero().flatten()
        place = self.row[self.document[kept]] * ratio + self.position[kept] % ratio
        return self.on_device(kept), self.on_device(place)

    @once_a_ratio
    def dropped_entries(self, ratio: int) -> Tensor:
        """Returns the int64 indices of the new entries that were computed from at least one rejected token."""
        owner, number = self._new_entries(ratio)
        kept = (self.host_past + self.host_kept)[owner]
        return self.on_device(((number + 1) * ratio > kept).nonzero().flatten())

    @once_a_ratio
    def entry_places(self, ratio: int) -> Tensor:
        """The row numbers of the new entries in the stores of compression ratio `ratio`."""
        owner, number = self._new_entries(ratio)
        size = self.cache.page_tokens // ratio
        return self.on_device(self.pages[owner, number // size] * size + number % size)

    @cached_property
    def device_pages(self) -> Tensor:
        """The page numbers of all sequences, int64 [B * pages per sequence]."""
        return self.on_device(self.pages.flatten())


class StepPart(NamedTuple):
    """A step over some tokens of another step; `tokens` int64 holds the indices of these tokens."""

    step: Step
    tokens: Tensor


class LayerCache:
    """The interface through which one layer reads and writes the cache in one step."""

    def __init__(self, step: Step, layer: int):
        self.step, self.cache, self.layer = step, step.cache, layer
        self.decoding = step.decoding
        self.ratio = step.config.ratio(layer) if layer < step.config.num_hidden_layers else 0

    def open_groups(self, values: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Concatenate the cached values and gates of open compression groups [B * r, D] with those of the new tokens
        [T, D], and store the values and gates of those new tokens whose group is still incomplete.
        """
        if self.ratio == 1:
            return values, gates
        step, ratio = self.step, self.ratio
        places = step.open_places(ratio)
        pairs = ((self.cache.open_values[self.layer], values), (self.cache.open_gates[self.layer], gates))
        joined = []
        for store, new in pairs:
            store.fit(len(self.cache.rows) * ratio, new)
            joined.append(torch.cat([store.read(places, new.dtype), new]))

        def keep() -> None:
            kept, target = step.open_writes(ratio)
            for store, new in pairs:
                store.write(target, new.index_select(0, kept))

        step.when_kept(keep)
        return joined[0], joined[1]

    def entries(self, kv: Tensor, keys: Tensor) -> tuple[Tensor | None, Tensor]:
        """Store the main KV [N, D] (not rounded yet) and index keys [N, Di] of the new entries. Returns the main KV and
        index keys of all entries of the step's sequences, in the order of the slots in `layout.entries`. In a decoding
        step the returned main KV is None, because `selected` gathers the few entries that are needed.
        """
        size = self.cache.page_tokens // self.ratio
        places = self.step.entry_places(self.ratio)
        main, index = self.cache.main[self.layer], self.cache.index[self.layer]
        for store, new in ((main, kv), (index, keys)):
            store.fit(self.cache.pages * size, new)
            if self.step.tentative:
                self.step.when_kept(partial(self._undo, store, places, store.stored(places)))
            store.write(places, new)
        pages = self.step.device_pages
        return None if self.decoding else main.read(pages, kv.dtype, size), index.read(pages, keys.dtype, size)

    def _undo(self, store: Store, places: Tensor, before: tuple[Tensor, ...]) -> None:
        """Restore the rows of the store that entries of rejected tokens have overwritten; `before` is the rows' old
        content.
        """
        dropped = self.step.dropped_entries(self.ratio)
        parts = tuple(as_bytes(part).index_select(0, dropped).view(part.dtype) for part in before)
        store.put(places.index_select(0, dropped), parts)

    def selected(self, topk_indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Read the main KV [B, K, D] of the selected entry slots int32 [B, K]; the values are arbitrary where the slot
        is -1.
        """
        step = self.step
        size = self.cache.page_tokens // self.ratio
        slot = topk_indices.clamp(min=0).long()
        page = step.device_pages[slot // size]
        return self.cache.main[step.config.kv_source(self.layer)].read(page * size + slot % size, dtype)

    def window_of_each(self, window_kv: Tensor) -> tuple[Tensor, Tensor]:
        """Add the window keys [T, D] of the new tokens to the ring buffers, in a decoding or tentative step. Returns
        the window keys of each query [T, W, D], and a bool mask [B, W] or [T, W] that is true for keys the query must
        not see.
        """
        step, ring = self.step, self._ring(window_kv)
        if step.tentative:
            source, hidden = step.windows
            past = ring.read(step.ring_rows.flatten(), window_kv.dtype)
            self.keep(window_kv)
            keys = torch.cat([past, window_kv]).index_select(0, source.flatten())
            return keys.view(*source.shape, -1), hidden
        self.keep(window_kv)
        return ring.read(step.ring_rows, window_kv.dtype), step.ring_hidden

    def window_axis(self, window_kv: Tensor) -> tuple[Tensor, WindowAxis]:
        """Add the window keys [T, D] of the new tokens to the rings, and return all keys [T', D] of the step with their
        `WindowAxis`.
        """
        axis, keys, ring = self.step.axis, window_kv, self._ring(window_kv)
        if len(axis.source) > len(axis.place):
            past = ring.read(self.step.ring_rows.flatten(), window_kv.dtype)
            keys = torch.cat([past, window_kv]).index_select(0, axis.source)
        self.keep(window_kv)
        return keys, axis

    def _ring(self, window_kv: Tensor) -> Store:
        ring = self.cache.window[self.layer]
        ring.fit(len(self.cache.rows) * self.step.config.sliding_window, window_kv)
        return ring

    def keep(self, window_kv: Tensor) -> None:
        """Add the window keys [T, D] of the new tokens to the rings."""
        ring = self._ring(window_kv)

        def write() -> None:
            kept, places = self.step.ring_writes
            ring.write(places, window_kv.index_select(0, kept))

        self.step.when_kept(write)
