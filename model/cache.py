"""The packed cache: what a sequence leaves behind for its next token, for many sequences of unequal length.

Kept of every sequence (released sizes: 890 bytes a token of what grows, V4.1 report):
  main KV      each entry of a Full layer as FP4 values with E4M3 scales (in the compute dtype when QAT is off)
  index keys   each entry of a Full layer as FP4 values with UE8M0 scales
  window       the last W window KVs of every layer as FP8 values with UE8M0 scales, in a ring
  open groups  projected values and gates of the tokens whose compression group is not complete
  history      the last token ids that Engram looks back at
What is read back equals, bit for bit, what the training forward's fake quantisers give.

Entries lie in pages of `page_tokens` tokens that sequences own: a sequence wastes less than a page, a page is a whole
number of candidate blocks, and no group is open at its end.

A `Step` lays out one pass over new tokens of some sequences; `LayerCache` is a layer's view of it, all that attention
sees. Shapes: T new tokens of a step, B its sequences, W window, r ratio, D head dim, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.config import TextConfig
from model.engram import engram_tables, hash_ids
from model.pack import Entries, Pack
from model.quantize import KV_INDEX, KV_MAIN, KV_WINDOW, KVFormat
from model.rope import inverse_frequencies, rotations

PAGE_TOKENS = 64  # at least; rounded up to whole candidate blocks of every ratio


@dataclass
class Row:
    """One sequence: tokens passed, its pages, the first position its window ring holds, and (token id, is image) of its
    last tokens.
    """

    length: int = 0
    pages: list[int] = field(default_factory=list)
    window_from: int = 0
    history: list[tuple[int, bool]] = field(default_factory=list)


class Store:
    """Rows of one kind of state, [places, width] each, packed by `format` or plain; grows, keeping what it holds."""

    def __init__(self, format: KVFormat | None, device: torch.device):
        self.format, self.device = format, device
        self.tensors: tuple[Tensor, ...] = ()
        self.width = 0

    def fit(self, capacity: int, like: Tensor) -> None:
        """Make room for `capacity` places of rows like those of `like` [N, width]."""
        if self.tensors and self.tensors[0].shape[0] >= capacity:
            return
        self.width = like.shape[1]
        parts = self._parts(like[:0])
        kept = self.tensors or parts
        self.tensors = tuple(_enlarged(old, capacity, part) for old, part in zip(kept, parts, strict=True))

    def write(self, places: Tensor, x: Tensor) -> None:
        """x [N, width] to int64 places [N]."""
        for tensor, part in zip(self.tensors, self._parts(x), strict=True):
            _bytes(tensor).index_copy_(0, places, _bytes(part))

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.format.pack(x) if self.format else (x,)

    def read(self, places: Tensor, dtype: torch.dtype, unit: int = 1) -> Tensor:
        """[..., width] at int64 places [...]; with `unit`, places count runs of so many rows: [... * unit, width]."""
        parts = []
        for tensor in self.tensors:
            raw = _bytes(tensor)
            found = raw.view(-1, unit * raw.shape[1]).index_select(0, places.flatten())
            shape = (*places.shape, -1) if unit == 1 else (places.numel() * unit, raw.shape[1])
            parts.append(found.view(shape).view(tensor.dtype))
        return self.format.unpack(*parts, self.width, dtype) if self.format else parts[0].to(dtype)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


def _bytes(tensor: Tensor) -> Tensor:
    """As bytes where the type is too narrow for indexing operations."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _enlarged(old: Tensor, capacity: int, like: Tensor) -> Tensor:
    """Zeros behind: places that nobody has written are read (and masked) too, and must be numbers."""
    new = torch.zeros(capacity, *_bytes(like).shape[1:], dtype=_bytes(like).dtype, device=like.device)
    new[: old.shape[0]] = _bytes(old)
    return new.view(like.dtype)


class Cache:
    """State of many sequences. `open` gives a row number, `close` frees it for another sequence.

    kv_quant: main KV packed as FP4; False keeps it plain, for models run without `runtime.kv_quant`.
    """

    def __init__(self, config: TextConfig, kv_quant: bool = True, device: torch.device | str = "cpu"):
        self.config, self.device = config, torch.device(device)
        layers = range(config.num_hidden_layers)
        self.ratios = sorted({config.ratio(layer) for layer in layers} - {0})
        whole = config.candidate_block_size * math.lcm(*self.ratios)
        self.page_tokens = -(-PAGE_TOKENS // whole) * whole
        sources = config.kv_source_layer_ids
        self.main = {n: Store(KV_MAIN if kv_quant else None, self.device) for n in sources}
        self.index = {n: Store(KV_INDEX, self.device) for n in sources}
        self.window = {n: Store(KV_WINDOW, self.device) for n in layers}
        self.open_values = {n: Store(None, self.device) for n in sources if config.ratio(n) > 1}
        self.open_gates = {n: Store(None, self.device) for n in self.open_values}
        self.rows: list[Row | None] = []
        self.pages = 0  # made so far
        self.free_pages: list[int] = []
        self.frequencies = {c: inverse_frequencies(config, compressed=c) for c in (False, True)}

    def open(self) -> int:
        """A row for a new sequence."""
        if None not in self.rows:
            self.rows.append(None)
        row = self.rows.index(None)
        self.rows[row] = Row()
        return row

    def close(self, row: int) -> None:
        self.free_pages += self.rows[row].pages
        self.rows[row] = None

    def reserve(self, row: int, length: int) -> None:
        """Give a row the pages that `length` tokens need."""
        pages = self.rows[row].pages
        while len(pages) * self.page_tokens < length:
            if not self.free_pages:
                grown = max(1, self.pages // 2)
                self.free_pages = list(range(self.pages, self.pages + grown))
                self.pages += grown
            pages.append(self.free_pages.pop(0))

    def stores(self) -> dict[str, Store]:
        """Every store under the name it is saved by."""
        kinds = ("main", "index", "window", "open_values", "open_gates")
        return {f"{kind}.{layer}": store for kind in kinds for layer, store in getattr(self, kind).items()}

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain containers, copies of what the cache holds now."""
        rows = [row and {**vars(row), "pages": list(row.pages), "history": list(row.history)} for row in self.rows]
        tensors = {name: [t.clone() for t in store.tensors] for name, store in self.stores().items()}
        widths = {name: store.width for name, store in self.stores().items()}
        return {
            "rows": rows,
            "pages": self.pages,
            "free_pages": list(self.free_pages),
            "tensors": tensors,
            "widths": widths,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.rows = [row and Row(**{**row, "pages": list(row["pages"])}) for row in state["rows"]]
        self.pages, self.free_pages = state["pages"], list(state["free_pages"])
        for name, store in self.stores().items():
            store.tensors = tuple(t.to(self.device, copy=True) for t in state["tensors"][name])
            store.width = state["widths"][name]

    def entry_bytes(self) -> int:
        """Bytes of the storage that grows with the context: main KV and index keys, of all pages made."""
        return sum(store.nbytes for stores in (self.main, self.index) for store in stores.values())


class WindowAxis(NamedTuple):
    """A key axis of T' tokens: of every sequence, what its window remembers, then its new tokens.

    source int64 [T']: row of (ring rows of the step's sequences, new tokens); place int64 [T]: where the new tokens
    lie; start int64 [T']: first token in the window of each.
    """

    source: Tensor
    place: Tensor
    start: Tensor

    def spread(self, x: Tensor, fill: int) -> Tensor:
        """[T, ...] of the new tokens -> [T', ...]."""
        if len(self.source) == len(self.place):
            return x
        return x.new_full((len(self.source), *x.shape[1:]), fill).index_copy(0, self.place, x)


class Step:
    """One pass over new tokens. `pack` holds the new tokens only, a document for each sequence, with positions and
    visible entries that count what is cached. A step in which every sequence has one token decodes: each query then
    has its own range of slots and brings its own keys.
    """

    def __init__(self, cache: Cache, rows: Sequence[int], tokens: Sequence[Sequence[int]], image: Tensor | None = None):
        """`tokens[i]` follow what row `rows[i]` holds; image bool [T] marks image positions."""
        self.cache, self.config = cache, cache.config
        self.states = [cache.rows[row] for row in rows]
        self.past = [state.length for state in self.states]
        self.counts = [len(t) for t in tokens]
        self.decoding = all(count == 1 for count in self.counts)
        for row, past, count in zip(rows, self.past, self.counts, strict=True):
            cache.reserve(row, past + count)
        self.row = torch.tensor(rows)
        count, past = torch.tensor(self.counts), torch.tensor(self.past)
        self.start = count.cumsum(0) - count
        self.document = torch.repeat_interleave(torch.arange(len(rows)), count)
        self.offset = torch.arange(len(self.document)) - self.start[self.document]
        self.position = past[self.document] + self.offset
        self.host_past, self.host_count = past, count
        depth = max(len(state.pages) for state in self.states)
        self.pages = torch.tensor([state.pages + [0] * (depth - len(state.pages)) for state in self.states])
        self.ids = torch.tensor([token for part in tokens for token in part])
        self.image = None if image is None else image.cpu()
        self.pack = self._pack()

    def on_device(self, x: Tensor) -> Tensor:
        return x.to(self.cache.device, non_blocking=True)

    def _pack(self) -> Pack:
        device, frequencies = self.cache.device, self.cache.frequencies
        position = self.on_device(self.position)
        start = self.on_device(self.start[self.document])
        return Pack(
            rows=1,
            row_length=len(self.document),
            gather=None,
            document=self.on_device(self.document),
            document_start=start,
            document_lengths=self.on_device(self.host_count),
            window_start=start,  # unused: see `window_axis`
            position=position,
            image=None if self.image is None else self.image.to(device),
            phasors=rotations(position, frequencies[False]),
            phasors_yarn=rotations(position, frequencies[True]),
            entries={r: self._entries(r) for r in self.cache.ratios},
        )

    def _entries(self, ratio: int) -> Entries:
        """Of the new entries: members in (open group of each sequence, new tokens) and phasors; of the queries: what
        they see in a layout where sequence b has the slots of its pages from b * own on.
        """
        own = self.pages.shape[1] * self.cache.page_tokens // ratio
        owner, number = self._new_entries(ratio)
        token = number[:, None] * ratio + torch.arange(ratio) - self.host_past[owner, None]  # < 0: before this step
        open_token = owner[:, None] * ratio + token + self.host_past[owner, None] % ratio
        new_token = len(self.states) * ratio * (ratio > 1) + self.start[owner, None] + token
        first = self.document * own
        last = first + (self.position + 1) // ratio
        return Entries(
            ratio=ratio,
            slots=len(self.states) * own,
            members=self.on_device(torch.where(token < 0, open_token, new_token)),
            phasors=rotations(self.on_device(number * ratio), self.cache.frequencies[True]),
            visible_from=self.on_device(first),
            visible_to=self.on_device(last),
            host_from=first,
            host_to=last,
            own=own if self.decoding else None,
        )

    def _new_entries(self, ratio: int) -> tuple[Tensor, Tensor]:
        """(sequence of the step, number in it) of every entry that this step completes."""
        closing = (self.position + 1) % ratio == 0
        return self.document[closing], self.position[closing] // ratio

    def layer(self, number: int) -> LayerCache:
        return LayerCache(self, number)

    @cached_property
    def engram_axis(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """(tokens, start of each one's sequence, image or None, place of the new tokens) with the history in front."""
        ids, start, image, place = [], [], [], []
        masks = self.image.tolist() if self.image is not None else None
        at = 0
        for state, first, count in zip(self.states, self.start.tolist(), self.counts, strict=True):
            begin, history = len(ids), state.history
            ids += [token for token, _ in history] + self.ids[first : first + count].tolist()
            image += [m for _, m in history] + (masks[first : first + count] if masks else [False] * count)
            start += [begin] * (len(ids) - begin)
            place += range(len(ids) - count, len(ids))
            at += count
        masked = self.on_device(torch.tensor(image)) if any(image) else None
        return *(self.on_device(torch.tensor(x)) for x in (ids, start)), masked, self.on_device(torch.tensor(place))

    def engram_rows(self, layer: int, token_map: Tensor) -> Tensor:
        """Rows int64 [T, G] of Engram layer `layer` (a backbone layer id) for the new tokens."""
        config = self.config
        ids, start, masked, place = self.engram_axis
        number = config.engram_layer_ids.index(layer)
        found = hash_ids(engram_tables(config), number, token_map, config.engram_pad_token_id, ids, start, masked)
        return found.index_select(0, place)

    def commit(self) -> None:
        """Count the step's tokens as passed; every layer has stored its part by then."""
        back = self.config.engram_max_ngram_size - 1
        masks = self.image.tolist() if self.image is not None else [False] * len(self.document)
        seen = list(zip(self.ids.tolist(), masks, strict=True))
        for state, first, count in zip(self.states, self.start.tolist(), self.counts, strict=True):
            state.length += count
            state.history = (state.history + seen[first : first + count])[-back:]

    # --- layouts that several layers share

    @cached_property
    def ring_rows(self) -> Tensor:
        """Places int64 [B, W] of the sequences' window rings."""
        return self.on_device(self.row[:, None] * self.config.sliding_window + torch.arange(self.config.sliding_window))

    @cached_property
    def ring_writes(self) -> tuple[Tensor, Tensor]:
        """(new tokens that the ring keeps, their places): the last W of each sequence."""
        window = self.config.sliding_window
        kept = (self.offset >= self.host_count[self.document] - window).nonzero().flatten()
        place = self.row[self.document[kept]] * window + self.position[kept] % window
        return self.on_device(kept), self.on_device(place)

    @cached_property
    def ring_hidden(self) -> Tensor:
        """bool [B, W]: ring places that hold nothing of the sequence's window, after this step's token."""
        window = self.config.sliding_window
        age = (self.position[:, None] - torch.arange(window)) % window
        first = torch.tensor([state.window_from for state in self.states])
        return self.on_device(self.position[:, None] - age < first[:, None])

    @cached_property
    def axis(self) -> WindowAxis:
        window, sequences = self.config.sliding_window, len(self.states)
        first = torch.tensor([state.window_from for state in self.states])
        kept = (self.host_past - first).clamp(max=window - 1)  # past keys that some query sees
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

    def entry_places(self, ratio: int) -> Tensor:
        """Places of the new entries in the stores of ratio `ratio`."""
        owner, number = self._new_entries(ratio)
        size = self.cache.page_tokens // ratio
        return self.on_device(self.pages[owner, number // size] * size + number % size)

    @cached_property
    def device_pages(self) -> Tensor:
        return self.on_device(self.pages)


class LayerCache:
    """What one layer reads from and writes to the cache in one step."""

    def __init__(self, step: Step, layer: int):
        self.step, self.cache, self.layer = step, step.cache, layer
        self.decoding = step.decoding
        self.ratio = step.config.ratio(layer)

    def open_groups(self, values: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Put the open groups' values and gates [B * r, D] in front of those of the new tokens [T, D], and keep what
        the new tokens leave open.
        """
        if self.ratio == 1:
            return values, gates
        step, ratio = self.step, self.ratio
        places = step.on_device(step.row[:, None] * ratio + torch.arange(ratio)).flatten()
        # a token's place is its number in its group; tokens of complete groups are never read
        end = step.host_past + step.host_count
        kept = (step.position >= (end // ratio * ratio)[step.document]).nonzero().flatten()
        target = step.on_device(step.row[step.document[kept]] * ratio + step.position[kept] % ratio)
        kept, joined = step.on_device(kept), []
        for store, new in ((self.cache.open_values[self.layer], values), (self.cache.open_gates[self.layer], gates)):
            store.fit(len(self.cache.rows) * ratio, new)
            joined.append(torch.cat([store.read(places, new.dtype), new]))
            store.write(target, new.index_select(0, kept))
        return joined[0], joined[1]

    def entries(self, kv: Tensor, keys: Tensor) -> tuple[Tensor | None, Tensor]:
        """Store the new entries' main KV [N, D] (not rounded yet) and index keys [N, Di]. Returns all entries of the
        step's sequences in the slots of `pack.entries`; no main KV when decoding.
        """
        size = self.cache.page_tokens // self.ratio
        places = self.step.entry_places(self.ratio)
        main, index = self.cache.main[self.layer], self.cache.index[self.layer]
        for store, new in ((main, kv), (index, keys)):
            store.fit(self.cache.pages * size, new)
            store.write(places, new)
        pages = self.step.device_pages.flatten()
        return None if self.decoding else main.read(pages, kv.dtype, size), index.read(pages, keys.dtype, size)

    def chosen(self, topk_indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Main KV [B, K, D] of the selected slots int32 [B, K]; anything where none is selected."""
        step = self.step
        size = self.cache.page_tokens // self.ratio
        slot = topk_indices.clamp(min=0).long()
        page = step.device_pages.flatten()[slot // size]
        return self.cache.main[step.config.kv_source(self.layer)].read(page * size + slot % size, dtype)

    def window_of_each(self, window_kv: Tensor) -> tuple[Tensor, Tensor]:
        """Decoding: add the new tokens' [B, D] to the rings; all window keys [B, W, D] and which of them are hidden."""
        ring = self._ring(window_kv)
        self._keep(window_kv)
        return ring.read(self.step.ring_rows, window_kv.dtype), self.step.ring_hidden

    def window_axis(self, window_kv: Tensor) -> tuple[Tensor, WindowAxis]:
        """Keys [T', D] on the step's window axis; the new tokens' [T, D] are added to the rings."""
        axis, keys, ring = self.step.axis, window_kv, self._ring(window_kv)
        if len(axis.source) > len(axis.place):
            past = ring.read(self.step.ring_rows.flatten(), window_kv.dtype)
            keys = torch.cat([past, window_kv]).index_select(0, axis.source)
        self._keep(window_kv)
        return keys, axis

    def _ring(self, window_kv: Tensor) -> Store:
        ring = self.cache.window[self.layer]
        ring.fit(len(self.cache.rows) * self.step.config.sliding_window, window_kv)
        return ring

    def _keep(self, window_kv: Tensor) -> None:
        kept, places = self.step.ring_writes
        self.cache.window[self.layer].write(places, window_kv.index_select(0, kept))
