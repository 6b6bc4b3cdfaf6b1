"""Tokenises documents. The token ids are memory-mapped from the cache, or kept in memory for streams. For each image,
the cache stores the size, the key, and the location of the image file (or the bytes, if the image came as bytes).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
from tokenizers import Encoding, Tokenizer

from data.cache import atomic_folder, make_once
from data.document import Control, Document, FilePart, Picture, Source, Tokens
from data.errors import BadRecordPolicy, DataError
from data.images import VisionSettings, load_picture, plan_grid
from data.progress import Advance, progress
from data.tokenizer import BOS, EOS, identity, special_ids

log = logging.getLogger(__name__)

VERSION = 4  # raise it when the layout of the cache or the tokens of a document change
BATCH = 128  # number of documents per call of the tokenizer


@dataclass
class TokenStore:
    """The token ids of many documents, concatenated.

    Attributes:
        tokens: uint16 or uint32 [tokens]. Document i is `tokens[offsets[i]:offsets[i + 1]]`: BOS (if the tokenizer has
            one), text and image tokens, EOS.
        offsets: int64 [documents + 1], the positions in `tokens` where the documents begin, and the end of the last
            one.
        byte_counts: uint32 [tokens], the number of bytes of UTF-8 source text that each token stands for, or None if
            they are not counted. Whatever the tokenizer, the byte counts of all tokens add up to the size of the
            documents in bytes: the bytes of text that a normaliser drops at the end of a document are added to the
            count of EOS.
        num_bytes: number of bytes of UTF-8 source text of all documents.
        skipped: for each reason, the number of records that were left out.
        repaired: for each reason, the number of records that were repaired.
        formats: for each format, the number of records recognised in it.
        unused: for each unused key, the number of records that have it.
        pictures: the images of each document that has images, in reading order.
        loss_mask: bool [tokens], which tokens may be targets of the loss, or None if all may be.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    byte_counts: np.ndarray | None
    num_bytes: int
    skipped: dict[str, int] = field(default_factory=dict)
    repaired: dict[str, int] = field(default_factory=dict)
    formats: dict[str, int] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)
    pictures: dict[int, list[Picture]] = field(default_factory=dict)
    loss_mask: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each document, int64 [documents]."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Encoded:
    """The token ids of one document, and the number of bytes of its text. `byte_counts` and `loss_mask` are as in
    `TokenStore`, or None.
    """

    document: Document
    num_bytes: int
    ids: np.ndarray
    byte_counts: np.ndarray | None
    loss_mask: np.ndarray | None


class Encoder:
    """Turns documents into token ids: BOS, text and image spans in order, EOS.

    Args:
        seq_len: number of tokens in a row. Conversations and documents with images must fit into one row, because they
            are never cut.
        vision: the settings that determine how many tokens an image takes, or None to reject images.
        count_bytes: whether to count the bytes of source text that each token stands for.
        conversations: whether documents are conversations, which mark the supervised parts.
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
        # In a byte-level vocabulary each character of a spelling stands for one byte.
        self._byte_level = type(tokenizer.decoder).__name__ == "ByteLevel"
        self._widths: dict[int, int] = {}
        self.dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32

    def encode(self, documents: list[Document], policy: BadRecordPolicy) -> Iterator[Encoded]:
        """Tokenise a batch of documents. Invalid documents are reported to `policy`."""
        texts = [part for document in documents for part in document.parts if isinstance(part, str)]
        # `encode_batch_fast` does not return character offsets, which are needed only to count bytes.
        encode = self.tokenizer.encode_batch if self.count_bytes else self.tokenizer.encode_batch_fast
        encodings = iter(encode(texts, add_special_tokens=False))
        for document in documents:
            try:
                encoded = self._assemble(document, encodings)
                if len(encoded.ids) > self.seq_len and (self.conversations or self.vision and len(document.parts) > 1):
                    kind = "conversation" if self.conversations else "image document"
                    remedy = "raise seq_len" + (" or lower max_image_tokens" if self.vision else "")
                    detail = f"it has {len(encoded.ids)} tokens, a row has {self.seq_len}; {remedy}"
                    raise DataError(document.file, document.line, f"{kind} longer than a row", detail)
            except DataError as error:
                policy.report(error)
            else:
                yield encoded

    def encode_all(self, documents: Iterable[Document], policy: BadRecordPolicy) -> Iterator[Encoded]:
        """Tokenise any number of documents, batch by batch."""
        documents = iter(documents)
        while batch := list(itertools.islice(documents, BATCH)):
            yield from self.encode(batch, policy)

    def _assemble(self, document: Document, encodings: Iterator[Encoding]) -> Encoded:
        """Encode one document, taking the encodings of its text parts from the iterator `encodings`."""
        ids = [] if self.special.bos is None or self._begins_with_bos(document) else [self.special.bos]
        counts, ends, num_bytes = [0] * len(ids), [], len(document.text.encode())
        # Take the encodings of all parts now, so that the next document finds its own encodings even if this one raises
        # an error.
        texts = [next(encodings) for part in document.parts if isinstance(part, str)]
        for part in document.parts:
            if isinstance(part, str):
                encoding = texts.pop(0)
                ids += encoding.ids
                if self.count_bytes:
                    counts += bytes_per_token(part, encoding.offsets)
            elif isinstance(part, Tokens):
                new = self._given(part, document)
                ids += new
                widths = [self._width(token) for token in new]
                num_bytes += sum(widths)
                counts += widths if self.count_bytes else []
            else:
                ids += self._span(part, document)
                counts += [0] * (len(ids) - len(counts)) if self.count_bytes else []
            ends.append(len(ids))
        ids.append(self.special.eos)
        byte_counts = loss_mask = None
        if self.count_bytes:
            counts.append(num_bytes - sum(counts))
            byte_counts = np.array(counts, np.uint32)
        if self.conversations and document.supervised is not None:
            lengths = np.diff([0, *ends, len(ids)])  # BOS is supervised like the first part, EOS like the last
            loss_mask = np.repeat([*document.supervised, document.supervised[-1]], lengths)
            for part, end in zip(document.parts, ends, strict=True):
                if isinstance(part, Tokens) and part.supervised is not None:
                    number = len(self._given(part, document))
                    loss_mask[end - number : end + 1] = [*part.supervised[:number], part.supervised[-1]]
        return Encoded(document, num_bytes, np.array(ids, self.dtype), byte_counts, loss_mask)

    def _begins_with_bos(self, document: Document) -> bool:
        first = document.parts[0]
        return isinstance(first, Tokens) and first.ids[0] == self.special.bos

    def _given(self, part: Tokens, document: Document) -> list[int]:
        """The token ids of a pre-tokenised part, without a final EOS, because every document gets an EOS anyway. Raises
        `DataError` for an id outside the vocabulary and for the id of an image token.
        """
        size = self.tokenizer.get_vocab_size()
        for place, token in enumerate(part.ids):
            if not 0 <= token < size:
                detail = f"input_ids[{place}] = {token}, but the tokenizer has only {size} tokens"
                raise DataError(document.file, document.line, "id outside the vocabulary", detail)
            if token == self.special.image:
                detail = f"input_ids[{place}] = {token}; records of token ids have no images"
                raise DataError(document.file, document.line, "image token without an image", detail)
        return list(part.ids[:-1] if part.ids[-1] == self.special.eos else part.ids)

    def _width(self, token: int) -> int:
        """The number of bytes of text that a token id stands for."""
        if token not in self._widths:
            spelling = self.tokenizer.id_to_token(token)
            added = token in self.tokenizer.get_added_tokens_decoder()
            whole = len(self.tokenizer.decode([token]).encode())
            self._widths[token] = 0 if added else len(spelling or "") if self._byte_level else whole
        return self._widths[token]

    def _span(self, part: Picture | Control, document: Document) -> list[int]:
        """The token ids of an image or of a control token."""
        if isinstance(part, Picture):
            if self.vision is None:
                detail = "the model has no vision_config, or the tokenizer has no image token"
                raise DataError(document.file, document.line, "image for a model without vision", detail)
            assert self.special.image is not None, "a vision encoder has an image token"
            return [self.special.image] * plan_grid(part.width, part.height, self.vision).num_tokens
        ids = control_ids(self.tokenizer, part)
        if self.tokenizer.token_to_id(part.spelling) is None and part.spelling not in (BOS, EOS):
            if any(part.spelling in text for text in document.parts if isinstance(text, str)):
                detail = f"{part.spelling} is a control token of the chat format, but the tokenizer does not have it"
                raise DataError(document.file, document.line, "text spells a control token", detail)
        return ids


def control_ids(tokenizer: Tokenizer, part: Control) -> list[int]:
    """The id of a control token, or the ids of its spelling if the tokenizer has no such token. BOS and EOS are found
    by their roles, whatever their spelling.
    """
    special = special_ids(tokenizer)
    roles = {BOS: special.bos, EOS: special.eos}
    found = roles[part.spelling] if part.spelling in roles else tokenizer.token_to_id(part.spelling)
    return tokenizer.encode(part.spelling, add_special_tokens=False).ids if found is None else [found]


def bytes_per_token(text: str, offsets: list[tuple[int, int]]) -> list[int]:
    """The number of UTF-8 bytes of `text` that each token stands for, given the tokens' character offsets.

    If several tokens make up one character, its bytes are counted for the first of them; characters between two tokens
    are counted for the second token.
    """
    position = None
    if not text.isascii():
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
        position = np.concatenate([[0], np.cumsum(widths)])
    counts, done = [], 0
    for _, end in offsets:
        reached = max(done, end if position is None else int(position[end]))
        counts.append(reached - done)
        done = reached
    return counts


def collect(encoded: Iterable[Encoded], policy: BadRecordPolicy) -> TokenStore:
    """Collect encoded documents in a `TokenStore` in memory."""
    items = list(encoded)
    offsets = np.concatenate([[0], np.cumsum([len(e.ids) for e in items], dtype=np.int64)])
    counted = bool(items) and items[0].byte_counts is not None
    return TokenStore(
        tokens=np.concatenate([e.ids for e in items]) if items else np.zeros(0, np.uint16),
        offsets=offsets,
        byte_counts=np.concatenate([e.byte_counts for e in items]) if counted else None,
        num_bytes=sum(e.num_bytes for e in items),
        skipped=dict(policy.skipped),
        repaired=dict(policy.repaired),
        formats=dict(policy.formats),
        unused=dict(policy.unused),
        pictures={i: p for i, e in enumerate(items) if (p := _pictures(e.document))},
        loss_mask=np.concatenate([e.loss_mask for e in items]) if items and items[0].loss_mask is not None else None,
    )


def _pictures(document: Document) -> list[Picture]:
    return [part for part in document.parts if isinstance(part, Picture)]


def tokenised(source: Source, source_id: str, encoder: Encoder, on_error: str, folder: Path) -> TokenStore:
    """The token store of a source, memory-mapped from the cache in `folder`. If the cache does not have it yet, the
    source is tokenised into the cache first; each image is then decoded once, so that a damaged one is found now and
    not in the middle of training.

    source_id: the result of `source.identity()`, which the caller passes because computing it reads all files. Raises
    `DataError` for a bad record if `on_error` is `stop`; in this case nothing is written to the cache.
    """
    known = f"{VERSION} {source_id} {identity(encoder.tokenizer)} {encoder.count_bytes} {on_error}"
    if encoder.conversations:
        known += f" {encoder.seq_len}"  # longer conversations are bad records
    if encoder.vision is not None:  # images are named by path, and their size in tokens follows from the settings
        known += f" {encoder.seq_len} {encoder.vision} {[str(Path(file).resolve()) for file in file_sizes(source)]}"
    path = folder / f"tokens-{hashlib.blake2b(known.encode(), digest_size=12).hexdigest()}"

    def write() -> None:
        log.info("tokenising documents into the cache %s", path)
        with atomic_folder(path) as temporary:
            _write(source, encoder, BadRecordPolicy(on_error), temporary)

    make_once(path, write)
    meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    return TokenStore(
        tokens=_map(path / "tokens.bin", encoder.dtype),
        offsets=np.load(path / "offsets.npy"),
        byte_counts=_map(path / "byte_counts.bin", np.uint32) if encoder.count_bytes else None,
        num_bytes=meta["bytes"],
        skipped=meta["skipped"],
        repaired=meta["repaired"],
        formats=meta.get("formats", {}),
        unused=meta.get("unused", {}),
        loss_mask=_map(path / "loss_mask.bin", np.bool_) if encoder.conversations else None,
        pictures=_read_pictures(path) if encoder.vision is not None else {},
    )


def _read_pictures(folder: Path) -> dict[int, list[Picture]]:
    found: dict[int, list[Picture]] = {}
    with (folder / "pictures.jsonl").open(encoding="utf-8") as file:
        for document, key, image, *rest in map(json.loads, file):
            place = Path(image) if isinstance(image, str) else FilePart(folder / "pictures.bin", *image)
            found.setdefault(document, []).append(Picture(key, place, *rest))
    return found


def _add_pictures(pictures: list[Picture], document: int, lines: TextIO, data: BinaryIO) -> None:
    """Append the images of a document to the cache. Raises `DataError` if an image cannot be decoded; in this case
    nothing is appended.
    """
    for picture in pictures:
        load_picture(picture)
    for picture in pictures:
        image: Any = picture.image
        if isinstance(image, bytes):
            image = data.tell(), data.write(image)
        else:
            image = str(Path(image).absolute())
        record = (document, picture.key, image, picture.width, picture.height, picture.file, picture.line)
        lines.write(json.dumps(record) + "\n")


def _write(source: Source, encoder: Encoder, policy: BadRecordPolicy, folder: Path) -> None:
    lengths: list[int] = []
    num_bytes = 0
    with ExitStack() as files:
        documents = files.enter_context(documents_of(source, policy))
        tokens, byte_counts, loss_mask = (
            files.enter_context((folder / f"{name}.bin").open("wb")) for name in ("tokens", "byte_counts", "loss_mask")
        )
        pictures = files.enter_context((folder / "pictures.jsonl").open("w", encoding="utf-8"))
        picture_bytes = files.enter_context((folder / "pictures.bin").open("wb"))
        for encoded in encoder.encode_all(documents, policy):
            try:
                _add_pictures(_pictures(encoded.document), len(lengths), pictures, picture_bytes)
            except DataError as error:
                policy.report(error)
                continue
            _append(tokens, encoded.ids)
            if encoded.byte_counts is not None:
                _append(byte_counts, encoded.byte_counts)
            if encoded.loss_mask is not None:
                _append(loss_mask, encoded.loss_mask)
            lengths.append(len(encoded.ids))
            num_bytes += encoded.num_bytes
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    counted = {name: dict(getattr(policy, name)) for name in ("skipped", "repaired", "formats", "unused")}
    meta = {"bytes": num_bytes, **counted}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


@contextmanager
def documents_of(source: Source, policy: BadRecordPolicy) -> Iterator[Iterator[Document]]:
    """The documents of a source. While they are read and tokenised, the progress is shown, if the source consists of
    files or of a known number of records.
    """
    documents, sizes = (document for document, _ in source.read(policy)), file_sizes(source)
    records = 0 if sizes else _records(source)
    with progress("tokenising", sum(sizes.values()) or records) as advance:
        if sizes:
            yield _shown(documents, sizes, advance)
        else:
            yield _shown_by_record(documents, advance) if records else documents


def file_sizes(source: Source) -> dict[str, int]:
    """The size in bytes of each file of a source, by the name in `Document.file`; empty for sources without files."""
    files = getattr(getattr(source, "source", source), "files", ())
    return {str(file.path): file.num_bytes for file in files if file.path.is_file()}


def _records(source: Source) -> int:
    """The number of records of a source; 0 if the source is not a data set, or is a streamed data set."""
    dataset: Any = getattr(getattr(source, "source", source), "dataset", None)
    return len(dataset) if hasattr(dataset, "__len__") else 0


def _shown_by_record(documents: Iterable[Document], advance: Advance) -> Iterator[Document]:
    """Yield the documents of a data set unchanged; each document advances the progress to the number of its record."""
    reached = 0
    for document in documents:
        advance(document.line - reached)
        reached = document.line
        yield document


def _shown(documents: Iterable[Document], sizes: dict[str, int], advance: Advance) -> Iterator[Document]:
    """Yield the documents unchanged and advance the progress by the bytes of each document's text; the documents of a
    file together advance it by no more than the file's size. When the next file begins, the progress advances by the
    bytes of the previous file that were not counted.
    """
    left, last = dict(sizes), ""
    for document in documents:
        if document.file != last:
            advance(left.pop(last, 0))
            last = document.file
        amount = min(left.get(last, 0), len(document.text.encode()))
        if amount:
            left[last] -= amount
            advance(amount)
        yield document


def _append(file: BinaryIO, values: np.ndarray) -> None:
    file.write(values.data.cast("B"))


def _map(path: Path, dtype: type) -> np.ndarray:
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)
