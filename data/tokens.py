"""Tokenised documents: in memory for one window of a stream, memory-mapped from the cache for everything else."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tokenizers import Encoding, Tokenizer

from data.cache import atomic_folder, locked
from data.document import Control, Document, Picture, Source
from data.errors import DataError, Policy, log
from data.images import VisionSettings, plan_grid
from data.tokenizer import EOS, identity, special_ids

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
    taught: bool [tokens] or None: which tokens may be targets; None means all.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    byte_counts: np.ndarray | None
    num_bytes: int
    skipped: dict[str, int] = field(default_factory=dict)
    repaired: dict[str, int] = field(default_factory=dict)
    pictures: dict[int, list[Picture]] = field(default_factory=dict)
    taught: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Encoded:
    """One document as token ids, with the bytes behind each id if they are counted, and which of them are taught if
    not all are."""

    document: Document
    ids: np.ndarray
    byte_counts: np.ndarray | None
    taught: np.ndarray | None


class Encoder:
    """Turns documents into token ids: BOS, text and image spans in order, EOS.

    `vision` is needed for documents with images; such a document may have at most `seq_len` tokens, since an image span
    cannot be cut. `conversations`: documents say which of their parts are taught, and none is longer than `seq_len`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seq_len: int,
        vision: VisionSettings | None,
        count_bytes: bool,
        conversations: bool = False,
    ):
        self.tokenizer, self.seq_len, self.vision, self.count_bytes = tokenizer, seq_len, vision, count_bytes
        self.conversations = conversations
        self.special = special_ids(tokenizer)
        self.dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32

    def encode(self, documents: list[Document], policy: Policy) -> Iterator[Encoded]:
        texts = [part for document in documents for part in document.parts if isinstance(part, str)]
        # The fast variant gives no offsets, which only counting needs.
        encode = self.tokenizer.encode_batch if self.count_bytes else self.tokenizer.encode_batch_fast
        encodings = iter(encode(texts, add_special_tokens=False))
        for document in documents:
            try:
                encoded = self._assemble(document, encodings)
                if len(encoded.ids) > self.seq_len and (self.conversations or self.vision and len(document.parts) > 1):
                    kind = "conversation" if self.conversations else "image document"
                    remedy = "raise seq_len" + (" or lower max_image_tokens" if self.vision else "")
                    detail = f"{len(encoded.ids)} tokens for {self.seq_len}; {remedy}"
                    raise DataError(document.file, document.line, f"{kind} longer than a row", detail)
            except DataError as error:
                policy.report(error)
            else:
                yield encoded

    def encode_all(self, documents: Iterable[Document], policy: Policy) -> Iterator[Encoded]:
        documents = iter(documents)
        while batch := list(itertools.islice(documents, BATCH)):
            yield from self.encode(batch, policy)

    def _assemble(self, document: Document, encodings: Iterator[Encoding]) -> Encoded:
        ids = [] if self.special.bos is None else [self.special.bos]
        counts, ends = [0] * len(ids), []
        # The texts of a refused document are passed over too, so that the next one finds its own.
        texts = [next(encodings) for part in document.parts if isinstance(part, str)]
        for part in document.parts:
            if isinstance(part, str):
                encoding = texts.pop(0)
                ids += encoding.ids
                if self.count_bytes:
                    counts += bytes_per_token(part, encoding.offsets)
            else:
                ids += self._span(part, document)
                counts += [0] * (len(ids) - len(counts)) if self.count_bytes else []
            ends.append(len(ids))
        ids.append(self.special.eos)
        byte_counts = taught = None
        if self.count_bytes:
            counts.append(len(document.text.encode()) - sum(counts))
            byte_counts = np.array(counts, np.uint32)
        if self.conversations:
            lengths = np.diff([0, *ends, len(ids)])  # BOS counts to the first part, which is a header
            taught = np.repeat([*document.taught, document.taught[-1]], lengths)
        return Encoded(document, np.array(ids, self.dtype), byte_counts, taught)

    def _span(self, part: Picture | Control, document: Document) -> list[int]:
        """The ids of a part that is no text."""
        if isinstance(part, Picture):
            if self.vision is None:
                detail = "the model has no vision_config, or the tokenizer no image token"
                raise DataError(document.file, document.line, "image for a model without vision", detail)
            return [self.special.image] * plan_grid(part.width, part.height, self.vision).num_tokens
        ids = control_ids(self.tokenizer, part)
        if self.tokenizer.token_to_id(part.spelling) is None and part.spelling != EOS:
            if any(part.spelling in text for text in document.parts if isinstance(text, str)):
                detail = f"{part.spelling}: the tokenizer has no token for it that would tell it from text"
                raise DataError(document.file, document.line, "text spells a mark of the format", detail)
        return ids


def control_ids(tokenizer: Tokenizer, part: Control) -> list[int]:
    """The id of a control token; its spelling in text tokens if the tokenizer has none (EOS is found by its role)."""
    found = special_ids(tokenizer).eos if part.spelling == EOS else tokenizer.token_to_id(part.spelling)
    return tokenizer.encode(part.spelling, add_special_tokens=False).ids if found is None else [found]


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
        taught=np.concatenate([e.taught for e in items]) if items and items[0].taught is not None else None,
    )


def _pictures(document: Document) -> list[Picture]:
    return [part for part in document.parts if isinstance(part, Picture)]


def tokenised(source: Source, source_id: str, encoder: Encoder, on_error: str, folder: Path) -> TokenStore:
    """The documents of a source as token ids: from the cache in `folder`, or in memory where they may have images.

    source_id: the source's identity, which takes a pass over its files. Raises `DataError` under policy `stop`; then
    nothing is left in the cache.
    """
    if encoder.vision is None:
        return _cached(source, source_id, encoder, on_error, folder)
    policy = Policy(on_error)  # the cache holds no images
    return collect(encoder.encode_all((document for document, _ in source.read(policy)), policy), policy)


def _cached(source: Source, source_id: str, encoder: Encoder, on_error: str, folder: Path) -> TokenStore:
    """The store of a text source: memory-mapped from the cache, tokenised into it first if it is not there."""
    known = f"{VERSION} {source_id} {identity(encoder.tokenizer)} {encoder.count_bytes} {on_error}"
    if encoder.conversations:
        known += f" {encoder.seq_len}"  # longer ones are left out
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
        taught=_map(path / "taught.bin", np.bool_) if encoder.conversations else None,
    )


def _write(source: Source, encoder: Encoder, policy: Policy, folder: Path) -> None:
    lengths, num_bytes = [], 0
    documents = (document for document, _ in source.read(policy))
    with ExitStack() as files:
        tokens, counts, taught = (
            files.enter_context((folder / f"{name}.bin").open("wb")) for name in ("tokens", "byte_counts", "taught")
        )
        for encoded in encoder.encode_all(documents, policy):
            _append(tokens, encoded.ids)
            if encoded.byte_counts is not None:
                _append(counts, encoded.byte_counts)
            if encoded.taught is not None:
                _append(taught, encoded.taught)
            lengths.append(len(encoded.ids))
            num_bytes += len(encoded.document.text.encode())
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    meta = {"bytes": num_bytes, "skipped": dict(policy.skipped), "repaired": dict(policy.repaired)}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def _append(file: BinaryIO, values: np.ndarray) -> None:
    file.write(memoryview(values).cast("B"))


def _map(path: Path, dtype: type) -> np.ndarray:
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)
