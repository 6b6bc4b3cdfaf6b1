"""Tokenised documents: in memory for one window of a stream, memory-mapped from the cache for everything else."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tokenizers import Encoding, Tokenizer

from data.cache import atomic_folder, locked
from data.errors import DataError, Policy, log
from data.images import VisionSettings, plan_grid
from data.sources import Document, Picture, Source
from data.tokenizer import identity, special_ids

VERSION = 2  # raise when the layout of the cache or the tokens of a document change
BATCH = 128  # documents handed to the tokenizer at once


@dataclass
class TokenStore:
    """Documents as token ids.

    tokens: uint16 or uint32 [tokens]; document i is `tokens[offsets[i]:offsets[i + 1]]`: BOS (where the tokenizer has
        one), text and image tokens, EOS.
    byte_counts: uint32 [tokens] or None: the bytes of UTF-8 source text that each token stands for. They add up to the
        documents exactly, whatever the tokenizer: EOS takes what a normaliser dropped at the end.
    pictures: the images of each document that has any, in order.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    byte_counts: np.ndarray | None
    num_bytes: int
    skipped: dict[str, int] = field(default_factory=dict)
    repaired: dict[str, int] = field(default_factory=dict)
    pictures: dict[int, list[Picture]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Encoded:
    """One document as token ids, with the bytes behind each id if they are counted."""

    document: Document
    ids: np.ndarray
    byte_counts: np.ndarray | None


class Encoder:
    """Turns documents into token ids: BOS, text and image spans in order, EOS.

    `vision` is needed for documents with images; such a document may have at most `seq_len` tokens, since an image span
    cannot be cut.
    """

    def __init__(self, tokenizer: Tokenizer, seq_len: int, vision: VisionSettings | None, count_bytes: bool):
        self.tokenizer, self.seq_len, self.vision, self.count_bytes = tokenizer, seq_len, vision, count_bytes
        self.special = special_ids(tokenizer)
        self.dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32

    def encode(self, documents: list[Document], policy: Policy) -> Iterator[Encoded]:
        texts = [part for document in documents for part in document.parts if isinstance(part, str)]
        # The fast variant gives no offsets, which only counting needs.
        encode = self.tokenizer.encode_batch if self.count_bytes else self.tokenizer.encode_batch_fast
        encodings = iter(encode(texts, add_special_tokens=False))
        for document in documents:
            encoded = self._assemble(document, encodings)
            if self.vision and len(encoded.ids) > self.seq_len and len(document.parts) > 1:
                detail = f"{len(encoded.ids)} tokens for {self.seq_len}; raise seq_len or lower max_image_tokens"
                policy.report(DataError(document.file, document.line, "image document longer than a row", detail))
            else:
                yield encoded

    def encode_all(self, documents: Iterable[Document], policy: Policy) -> Iterator[Encoded]:
        documents = iter(documents)
        while batch := list(itertools.islice(documents, BATCH)):
            yield from self.encode(batch, policy)

    def _assemble(self, document: Document, encodings: Iterator[Encoding]) -> Encoded:
        ids = [] if self.special.bos is None else [self.special.bos]
        counts = [0] * len(ids)
        for part in document.parts:
            if isinstance(part, Picture):
                span = plan_grid(part.width, part.height, self.vision).num_tokens
                ids += [self.special.image] * span
                counts += [0] * span
                continue
            encoding = next(encodings)
            ids += encoding.ids
            if self.count_bytes:
                counts += bytes_per_token(part, encoding.offsets)
        ids.append(self.special.eos)
        if not self.count_bytes:
            return Encoded(document, np.array(ids, self.dtype), None)
        counts.append(len(document.text.encode()) - sum(counts))
        return Encoded(document, np.array(ids, self.dtype), np.array(counts, np.uint32))


def bytes_per_token(text: str, offsets: list[tuple[int, int]]) -> list[int]:
    """UTF-8 bytes of `text` that each token adds, from character offsets. Of several tokens that make up one character
    the first has its bytes; characters between tokens count to the next."""
    position = None
    if not text.isascii():
        widths = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        widths = 1 + (widths >= 0x80).astype(np.int64) + (widths >= 0x800) + (widths >= 0x10000)
        position = np.concatenate([[0], np.cumsum(widths)])
    counts, done = [], 0
    for _, end in offsets:
        reached = max(done, end if position is None else int(position[end]))
        counts.append(reached - done)
        done = reached
    return counts


def collect(encoded: Iterable[Encoded], policy: Policy) -> TokenStore:
    """A store in memory."""
    items = list(encoded)
    offsets = np.concatenate([[0], np.cumsum([len(e.ids) for e in items], dtype=np.int64)])
    counted = bool(items) and items[0].byte_counts is not None
    return TokenStore(
        tokens=np.concatenate([e.ids for e in items]) if items else np.zeros(0, np.uint16),
        offsets=offsets,
        byte_counts=np.concatenate([e.byte_counts for e in items]) if counted else None,
        num_bytes=sum(len(e.document.text.encode()) for e in items),
        skipped=dict(policy.skipped),
        repaired=dict(policy.repaired),
        pictures={i: p for i, e in enumerate(items) if (p := _pictures(e.document))},
    )


def _pictures(document: Document) -> list[Picture]:
    return [part for part in document.parts if isinstance(part, Picture)]


def cached(source: Source, source_id: str, encoder: Encoder, on_error: str, folder: Path) -> TokenStore:
    """The store of a text source: memory-mapped from the cache, tokenised into it first if it is not there.

    source_id: the source's identity, which takes a pass over its files.

    Raises `DataError` under policy `stop`; then nothing is left in the cache.
    """
    known = f"{VERSION} {source_id} {identity(encoder.tokenizer)} {encoder.count_bytes} {on_error}"
    path = folder / f"tokens-{hashlib.blake2b(known.encode(), digest_size=12).hexdigest()}"
    with locked(path):
        if not path.exists():
            log.info("tokenising into %s", path)
            with atomic_folder(path) as temporary:
                _write(source, encoder, Policy(on_error), temporary)
    meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    return TokenStore(
        tokens=_map(path / "tokens.bin", encoder.dtype),
        offsets=np.load(path / "offsets.npy"),
        byte_counts=_map(path / "byte_counts.bin", np.uint32) if encoder.count_bytes else None,
        num_bytes=meta["bytes"],
        skipped=meta["skipped"],
        repaired=meta["repaired"],
    )


def _write(source: Source, encoder: Encoder, policy: Policy, folder: Path) -> None:
    lengths, num_bytes = [], 0
    documents = (document for document, _ in source.read(policy))
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "byte_counts.bin").open("wb") as counts:
        for encoded in encoder.encode_all(documents, policy):
            _append(tokens, encoded.ids)
            if encoded.byte_counts is not None:
                _append(counts, encoded.byte_counts)
            lengths.append(len(encoded.ids))
            num_bytes += len(encoded.document.text.encode())
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    meta = {"bytes": num_bytes, "skipped": dict(policy.skipped), "repaired": dict(policy.repaired)}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def _append(file: BinaryIO, values: np.ndarray) -> None:
    file.write(memoryview(values).cast("B"))


def _map(path: Path, dtype: type) -> np.ndarray:
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)
