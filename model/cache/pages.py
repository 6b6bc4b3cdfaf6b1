"""The paged cache of many sequences, and the index of prompt prefixes that sequences share.

Compressed entries are stored in pages of `page_tokens` tokens each, so a sequence wastes less than one page. A page
holds a whole number of the indexer's candidate blocks, and no compression group extends over two pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from model.cache.store import Store, as_bytes
from model.config import TextConfig
from model.quantize import KV_INDEX, KV_WINDOW, main_kv_format
from model.rope import inverse_frequencies

PAGE_TOKENS = 64  # minimum tokens per page; rounded up to whole candidate blocks of every compression ratio


@dataclass
class CachedSequence:
    """The state of one cached sequence: the number of tokens processed, its pages, the first position stored in the
    window rings of encoder layers and of decoder layers, and its last tokens as pairs (token id, whether it is an image
    token).
    """

    length: int = 0
    pages: list[int] = field(default_factory=list)
    window_from: int = 0
    decoder_from: int = 0
    history: list[tuple[int, bool]] = field(default_factory=list)


class Cache:
    """Stores the attention state of many sequences. `open` returns a row number for a new sequence; `close` frees the
    row.

    kv_quant: whether main KV is stored packed as FP4; False is for models that run without `runtime.kv_quant`.
    prefix_tokens: how many tokens of finished prompts the prefix index may hold; later prompts with the same beginning
    reuse the main KV and index keys of these tokens.
    drafter_stages: the number of drafter stages whose context keys are cached too (0: no drafter).
    """

    def __init__(
        self,
        config: TextConfig,
        kv_quant: bool = True,
        prefix_tokens: int = 0,
        device: torch.device | str = "cpu",
        drafter_stages: int = 0,
    ):
        self.config, self.device = config, torch.device(device)
        layers = range(config.num_hidden_layers)
        self.ratios = sorted({config.ratio(layer) for layer in layers} - {0})
        self.group = math.lcm(*self.ratios)
        whole = config.candidate_block_size * self.group
        self.page_tokens = -(-PAGE_TOKENS // whole) * whole
        sources = config.kv_source_layer_ids
        self.main = {n: Store(main_kv_format(kv_quant), self.device) for n in sources}
        self.index = {n: Store(KV_INDEX, self.device) for n in sources}
        self.window = {n: Store(KV_WINDOW, self.device) for n in range(len(layers) + drafter_stages)}
        self.open_values = {n: Store(None, self.device) for n in sources if config.ratio(n) > 1}
        self.open_gates = {n: Store(None, self.device) for n in self.open_values}
        self.rows: list[CachedSequence | None] = []
        self.uses: list[int] = []  # for each page, the number of sequences that own it, plus 1 if the prefix index does
        self.free_pages: list[int] = []
        # (previous page or -1, tokens of the page) -> page; oldest first
        self.prefixes: dict[tuple[int, ...], int] = {}
        self.prefix_pages = prefix_tokens // self.page_tokens
        self.frequencies = {c: inverse_frequencies(config, compressed=c) for c in (False, True)}

    @property
    def pages(self) -> int:
        """The number of pages allocated so far."""
        return len(self.uses)

    def open(self) -> int:
        """Returns the number of an empty row for a new sequence."""
        if None not in self.rows:
            self.rows.append(None)
        row = self.rows.index(None)
        self.rows[row] = CachedSequence()
        return row

    def sequence(self, row: int) -> CachedSequence:
        """The sequence that is stored in an open row."""
        state = self.rows[row]
        assert state is not None, f"row {row} is not open"
        return state

    def close(self, row: int) -> None:
        for page in self.sequence(row).pages:
            self._release(page)
        self.rows[row] = None

    def copy_of_row(self, row: int) -> int:
        """Returns a new row with the same state as `row`. Full pages are shared; a partly filled last page, the window
        rings and the open groups are copied.
        """
        new, state = self.open(), self.sequence(row)
        copy = self.rows[new] = _row(vars(state))
        if state.length % self.page_tokens:
            copy.pages[-1] = self._copy_of(state.pages[-1])
        for page in state.pages[: state.length // self.page_tokens]:
            self.uses[page] += 1
        sizes = {n: self.config.sliding_window for n in self.window}
        groups = {n: self.config.ratio(n) for n in self.open_values}
        for stores, places in ((self.window, sizes), (self.open_values, groups), (self.open_gates, groups)):
            for layer, size in places.items():
                stores[layer].grow(len(self.rows) * size)
                for tensor in map(as_bytes, stores[layer].tensors):
                    tensor[new * size : (new + 1) * size] = tensor[row * size : (row + 1) * size]
        return new

    def reserve(self, row: int, length: int) -> None:
        """Make sure that a row owns enough pages for `length` tokens."""
        pages = self.sequence(row).pages
        while len(pages) * self.page_tokens < length:
            pages.append(self._new_page())

    def trim(self, row: int) -> None:
        """Free the pages at the end of a row that hold none of the row's tokens."""
        state = self.sequence(row)
        while (len(state.pages) - 1) * self.page_tokens >= state.length:
            self._release(state.pages.pop())

    def _new_page(self) -> int:
        if not self.free_pages:
            more = max(1, self.pages // 2)
            self.free_pages = list(range(self.pages, self.pages + more))
            self.uses += [0] * more
        page = self.free_pages.pop(0)
        self.uses[page] = 1
        return page

    def _release(self, page: int) -> None:
        self.uses[page] -= 1
        if not self.uses[page]:
            self.free_pages.append(page)

    def keep_prefix(self, row: int, tokens: Sequence[int]) -> None:
        """Add the full pages of a row to the prefix index; `tokens` are the tokens of the row. If the row itself reused
        a prefix, the pages that it computed afterwards are only approximate and are not added.
        """
        state, size = self.sequence(row), self.page_tokens
        if not self.prefix_pages or state.window_from:
            return
        before = -1
        for number in range(min(len(tokens), state.length) // size):
            key = (before, *tokens[number * size : (number + 1) * size])
            if key not in self.prefixes:
                self.prefixes[key] = state.pages[number]
                self.uses[state.pages[number]] += 1
            before = self.prefixes[key]
        self._touch(tokens)
        while len(self.prefixes) > self.prefix_pages:
            self._release(self.prefixes.pop(next(iter(self.prefixes))))

    def reuse_prefix(self, row: int, prompt: Sequence[int]) -> int:
        """Start a new row with the longest cached prefix of its prompt. Returns s, the number of prompt tokens that the
        model can skip.

        Only main KV and index keys are cached for prefixes, so the last `sliding_window` tokens of the cached prefix
        are processed again ("SWA bounded replay" in the V4.1 report). The row has no window keys before position s, and
        its entries from position s on are computed anew. The number s is rounded down to a common multiple of the
        compression ratios.
        """
        state, size = self.sequence(row), self.page_tokens
        hit = self._touch(prompt[:-1])
        start = max(0, len(hit) * size - self.config.sliding_window) // self.group * self.group
        state.pages = hit[: start // size]
        for page in state.pages:
            self.uses[page] += 1
        if start % size:
            state.pages.append(self._copy_of(hit[start // size]))
        state.length = state.window_from = state.decoder_from = start
        back = self.config.engram_max_ngram_size - 1
        state.history = [(token, False) for token in prompt[max(0, start - back) : start]]
        return start

    def _touch(self, tokens: Sequence[int]) -> list[int]:
        """Find the cached pages that hold the beginning of `tokens`, and mark these pages as recently used, the first
        page as the most recent.
        """
        keys, before, size = [], -1, self.page_tokens
        for at in range(0, len(tokens) - size + 1, size):
            key = (before, *tokens[at : at + size])
            if key not in self.prefixes:
                break
            keys.append(key)
            before = self.prefixes[key]
        pages = [self.prefixes[key] for key in keys]
        for key in reversed(keys):
            self.prefixes[key] = self.prefixes.pop(key)
        return pages

    def drop_prefixes(self) -> None:
        """Remove all pages from the prefix index, for example because the weights have changed."""
        for page in self.prefixes.values():
            self._release(page)
        self.prefixes.clear()

    def _copy_of(self, page: int) -> int:
        copy = self._new_page()
        for stores in (self.main, self.index):
            for layer, store in stores.items():
                size = self.page_tokens // self.config.ratio(layer)
                store.grow(self.pages * size)
                for tensor in map(as_bytes, store.tensors):
                    tensor[copy * size : (copy + 1) * size] = tensor[page * size : (page + 1) * size]
        return copy

    def stores(self) -> dict[str, Store]:
        """Returns all stores of the cache in a dictionary, with the names that `state_dict` uses as keys."""
        kinds = ("main", "index", "window", "open_values", "open_gates")
        return {f"{kind}.{layer}": store for kind in kinds for layer, store in getattr(self, kind).items()}

    def state_dict(self) -> dict[str, Any]:
        """A copy of the whole cache as tensors, lists and dictionaries."""
        rows = [row and vars(_row(vars(row))) for row in self.rows]
        tensors = {name: [t.clone() for t in store.tensors] for name, store in self.stores().items()}
        widths = {name: store.width for name, store in self.stores().items()}
        return {
            "rows": rows,
            "uses": list(self.uses),
            "free_pages": list(self.free_pages),
            "prefixes": [[list(key), page] for key, page in self.prefixes.items()],
            "tensors": tensors,
            "widths": widths,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the content of the cache by a state that `state_dict` returned."""
        self.rows = [row and _row(row) for row in state["rows"]]
        self.uses, self.free_pages = list(state["uses"]), list(state["free_pages"])
        self.prefixes = {tuple(key): page for key, page in state["prefixes"]}
        for name, store in self.stores().items():
            store.tensors = tuple(t.to(self.device, copy=True) for t in state["tensors"][name])
            store.width = state["widths"][name]

    def entry_bytes(self) -> int:
        """The size in bytes of main KV and index keys in all allocated pages. Only this storage grows with the context
        length.
        """
        return sum(store.nbytes for stores in (self.main, self.index) for store in stores.values())


def _row(state: dict[str, Any]) -> CachedSequence:
    """A `CachedSequence` with the given fields, in which lists are copied."""
    return CachedSequence(**{**state, "pages": list(state["pages"]), "history": list(state["history"])})
