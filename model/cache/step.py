"""One forward pass over new tokens of cached sequences, and a layer's view of it.

A `Step` lays out the new tokens; attention reads and writes the cache through `LayerCache` only. A tentative step
processes tokens of which some may be rejected afterwards, such as a drafter's proposals: `Step.commit` says which ones
are kept, and leaves the cache as if the others had never been processed.

Shapes: T new tokens of a step, B its sequences, W window, r ratio, D head dim, Di index head dim, K top-k, T' keys on
the window axis.
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
    """An axis of T' window keys: for every sequence, the earlier keys in its window ring, then its new tokens.

    source int64 [T']: where each key comes from, as a row of the concatenation of the sequences' ring rows [B * W] and
    the new tokens [T]; place int64 [T]: where each new token is on the axis; start int64 [T']: for each key, taken as a
    query, the first key in its window.
    """

    source: Tensor
    place: Tensor
    start: Tensor

    def spread(self, x: Tensor, fill: int) -> Tensor:
        """Values [T, ...] of the new tokens -> [T', ...], with `fill` at the earlier keys."""
        if len(self.source) == len(self.place):
            return x
        return x.new_full((len(self.source), *x.shape[1:]), fill).index_copy(0, self.place, x)


@dataclass
class Span:
    """A sequence's part of a step. `past` tokens were processed before, the last of which are in `history`. No window
    key exists before position `window_from`.
    """

    row: int
    tokens: list[int]
    image: list[bool]
    past: int
    window_from: int
    history: list[tuple[int, bool]]

    def cut(self, begin: int, end: int, window_from: int, back: int) -> Span:
        """The span of tokens begin to end - 1 alone; `back` is the number of tokens in its history."""
        history = (self.history + list(zip(self.tokens, self.image, strict=True))[:begin])[-back:]
        cut = slice(begin, end)
        return Span(self.row, self.tokens[cut], self.image[cut], self.past + begin, window_from, history)


Made = TypeVar("Made")


def once_a_ratio(make: Callable[[Step, int], Made]) -> Callable[[Step, int], Made]:
    """Decorator: computes a method of `Step` once for each compression ratio, since all layers of one ratio share the
    result.
    """

    @wraps(make)
    def cached(step: Step, ratio: int) -> Made:
        key = (make.__name__, ratio)
        if key not in step.made:
            step.made[key] = make(step, ratio)
        return step.made[key]

    return cached


class Step:
    """One forward pass over new tokens. `layout` holds the new tokens only, one document for each sequence; its
    positions and visible entries include the cached tokens.

    A step with one token for every sequence is a decoding step: the W window keys and the K selected entries are
    gathered for each query, and each query has its own range of entry slots. A tentative step (at most W tokens a
    sequence) works in the same way, except that the queries of a sequence share its slots.
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
        """The step in which `tokens[i]` follow the cached tokens of row `rows[i]`; `images[i]` marks image tokens."""
        spans = []
        for i, row in enumerate(rows):
            state = cache.sequence(row)
            image = images[i] if images else [False] * len(tokens[i])
            spans.append(Span(row, tokens[i], image, state.length, state.window_from, state.history))
        return cls(cache, spans, tentative)

    @cached_property
    def splits(self) -> bool:
        """Whether the decoder's layers process other tokens in this step than the encoder's, or see another window."""
        cache, window = self.cache, self.config.sliding_window
        pairs = [(span, cache.sequence(span.row).decoder_from) for span in self.spans]
        return any(span.window_from < begin and span.past - begin < window - 1 for span, begin in pairs)

    def split(self) -> tuple[StepPart | None, StepPart | None]:
        """For the decoder's layers: a part with the tokens before each row's `decoder_from`, and a part with the tokens
        from there on. A part without tokens is None.
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
            window_start=start,  # not used in a step: `WindowAxis` says what the window is
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
        """The entries of one compression ratio. For the new entries: their phasors, and their members as rows of the
        concatenation of open groups [B * r] and new tokens [T]. For the queries: the range of slots they see, where
        the pages of sequence b occupy the slots from b * own on.
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
        """For every entry that this step completes: (index of its sequence in the step, number of the entry in it)."""
        closing = (self.position + 1) % ratio == 0
        return self.document[closing], self.position[closing] // ratio

    def layer(self, number: int) -> LayerCache:
        return LayerCache(self, number)

    @cached_property
    def engram_axis(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """The history of each sequence followed by its new tokens: (token ids, for each the place where its sequence
        starts, image flags or None if there are none, places of the new tokens).
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
        """Table rows int64 [T, G] that Engram layer `layer` (a backbone layer id) looks up for the new tokens."""
        config = self.config
        ids, start, masked, place = self.engram_axis
        number = config.engram_layer_ids.index(layer)
        found = hash_ids(engram_tables(config), number, token_map, config.engram_pad_token_id, ids, start, masked)
        return found.index_select(0, place)

    def commit(self, kept: Sequence[int] | None = None) -> None:
        """Count the step's tokens as processed; in a tentative step only the first `kept[i]` of sequence i. Call it
        after all layers have run.
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
        """Call `write`, which needs to know which tokens are kept: now, or in `commit` for a tentative step."""
        if self.tentative:
            self._later.append(write)
        else:
            write()

    # --- layouts that several layers share

    @cached_property
    def ring_rows(self) -> Tensor:
        """Places int64 [B, W] of the sequences' window rings."""
        return self.on_device(self.row[:, None] * self.config.sliding_window + torch.arange(self.config.sliding_window))

    @cached_property
    def ring_writes(self) -> tuple[Tensor, Tensor]:
        """(new tokens to store in the rings, their places in the rings): the last W kept tokens of each sequence."""
        window = self.config.sliding_window
        end = self.host_kept[self.document]
        kept = ((self.offset < end) & (self.offset >= end - window)).nonzero().flatten()
        place = self.row[self.document[kept]] * window + self.position[kept] % window
        return self.on_device(kept), self.on_device(place)

    @cached_property
    def ring_hidden(self) -> Tensor:
        """bool [B, W]: places of a ring that hold no key of the window, once this step's token has been added."""
        window = self.config.sliding_window
        age = (self.position[:, None] - torch.arange(window)) % window
        return self.on_device(self.position[:, None] - age < self.window_from[:, None])

    @cached_property
    def windows(self) -> tuple[Tensor, Tensor]:
        """The W window keys of each query of a tentative step. int64 [T, W]: the key as a row of the concatenation of
        ring rows [B * W] and new tokens [T]; bool [T, W]: true where the window has no key.
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
        """Places int64 [B * r] of the sequences' open groups."""
        return self.on_device(self.row[:, None] * ratio + torch.arange(ratio)).flatten()

    @once_a_ratio
    def open_writes(self, ratio: int) -> tuple[Tensor, Tensor]:
        """(new tokens in groups that stay open, their places). A token's place is its number in its group; what the
        store still holds of complete groups is never read.
        """
        end = (self.host_past + self.host_kept)[self.document]
        kept = ((self.position < end) & (self.position >= end // ratio * ratio)).nonzero().flatten()
        place = self.row[self.document[kept]] * ratio + self.position[kept] % ratio
        return self.on_device(kept), self.on_device(place)

    @once_a_ratio
    def dropped_entries(self, ratio: int) -> Tensor:
        """int64: numbers of the new entries that were computed from a rejected token."""
        owner, number = self._new_entries(ratio)
        kept = (self.host_past + self.host_kept)[owner]
        return self.on_device(((number + 1) * ratio > kept).nonzero().flatten())

    @once_a_ratio
    def entry_places(self, ratio: int) -> Tensor:
        """Places of the new entries in the stores of ratio `ratio`."""
        owner, number = self._new_entries(ratio)
        size = self.cache.page_tokens // ratio
        return self.on_device(self.pages[owner, number // size] * size + number % size)

    @cached_property
    def device_pages(self) -> Tensor:
        """The sequences' pages, int64 [B * pages each]."""
        return self.on_device(self.pages.flatten())


class StepPart(NamedTuple):
    """A step over some tokens of another step; `tokens` int64 says which ones."""

    step: Step
    tokens: Tensor


class LayerCache:
    """What one layer reads from and writes to the cache in one step."""

    def __init__(self, step: Step, layer: int):
        self.step, self.cache, self.layer = step, step.cache, layer
        self.decoding = step.decoding
        self.ratio = step.config.ratio(layer) if layer < step.config.num_hidden_layers else 0

    def open_groups(self, values: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Concatenate the cached values and gates of open groups [B * r, D] and those of the new tokens [T, D]. Stores
        the new tokens of groups that stay open.
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
        """Store the new entries' main KV [N, D] (not rounded yet) and index keys [N, Di]. Returns main KV and index
        keys of all entries of the step's sequences, in the slots of `layout.entries`. In a decoding step main KV is
        None, since `selected` gathers the few entries that are needed.
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
        """Restore the previous content of the places where entries from rejected tokens were written."""
        dropped = self.step.dropped_entries(self.ratio)
        parts = tuple(as_bytes(part).index_select(0, dropped).view(part.dtype) for part in before)
        store.put(places.index_select(0, dropped), parts)

    def selected(self, topk_indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Main KV [B, K, D] of the selected slots int32 [B, K]; arbitrary values where the slot is -1."""
        step = self.step
        size = self.cache.page_tokens // self.ratio
        slot = topk_indices.clamp(min=0).long()
        page = step.device_pages[slot // size]
        return self.cache.main[step.config.kv_source(self.layer)].read(page * size + slot % size, dtype)

    def window_of_each(self, window_kv: Tensor) -> tuple[Tensor, Tensor]:
        """In a decoding step: add the new tokens' keys [T, D] to the rings. Returns the window keys of each query
        [T, W, D], and bool [B, W] or [T, W]: which of them it must not see.
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
        """The keys [T', D] of the step's `WindowAxis`. Adds the new tokens' keys [T, D] to the rings."""
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
        """Add window keys [T, D] of the new tokens to the rings."""
        ring = self._ring(window_kv)

        def write() -> None:
            kept, places = self.step.ring_writes
            ring.write(places, window_kv.index_select(0, kept))

        self.step.when_kept(write)
