"""Defines documents, the parts of a document, and the interface of a source of documents.

A source yields `(document, after)` pairs. `after()` returns the position just after that document, and must be called
before the next pair is requested. Given a position, `read` continues from the position without reading the data before
it. A position is a JSON value that only the source that returned the position can interpret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from data.errors import BadRecordPolicy, DataError


@dataclass(frozen=True, slots=True)
class FilePart:
    """`size` bytes of a file, from byte `start` on."""

    path: Path
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Picture:
    """An image inside a document; `load_picture` of `data/images.py` decodes it.

    Attributes:
        key: identifies the image.
        image: the path or the bytes of an image file, or the part of a larger file that contains these bytes.
        width, height: the size in pixels, as an image viewer shows the image.
        file, line: file and line of the record that refers to the image, for error messages.
    """

    key: str
    image: Path | bytes | FilePart
    width: int
    height: int
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Control:
    """A control token inside a document, identified by its spelling in the released tokenizer. Text with the same
    spelling is not a control token but ordinary text.
    """

    spelling: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Text that is given as token ids. `supervised`: for each token id, whether the token is a target of the loss; None
    if `Document.supervised` decides for all token ids of this part together.
    """

    ids: tuple[int, ...]
    supervised: tuple[bool, ...] | None = None


Part = str | Picture | Control | Tokens


@dataclass(frozen=True, slots=True)
class Document:
    """A training document.

    Attributes:
        parts: the text, images, control tokens and token ids of the document, in reading order.
        file, line: the file and line that the document came from; line 0 means the whole file.
        supervised: for each part, whether its tokens are targets of the loss; None if all parts are supervised.
        record: if given, the property `key` is this value instead of the content of the document, so that all documents
            with the same `record` are on the same side of a training/held-out split.
    """

    parts: tuple[Part, ...]
    file: str
    line: int
    supervised: tuple[bool, ...] | None = None
    record: bytes | None = None

    @property
    def text(self) -> str:
        """The text parts of the document, joined into one string."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def key(self) -> bytes:
        """Bytes that identify the content: documents with the same content have the same key, even if the documents
        come from different files.
        """
        if self.record is not None:
            return self.record
        return "\0".join(_key(part) for part in self.parts).encode()


Position = Any
Share = tuple[int, int]  # (index, count): share `index` of `count` shares, which together have every record once
WHOLE: Share = (0, 1)
Reading = Iterator[tuple[Document, Callable[[], Position]]]


class Source(Protocol):
    """A sequence of documents that can be read repeatedly, always in the same order, from any position."""

    def read(self, policy: BadRecordPolicy, position: Position = None) -> Reading:
        """Yield the documents from `position` on (None means from the start), each with a function that returns the
        position after that document.
        """
        ...

    def identity(self, content: bool = True) -> str:
        """Returns a hash that changes when the documents change. With `content=False`, the hash depends only on the
        names and sizes of the files, and the contents of the files are not read.
        """
        ...


class SharedSource(Source, Protocol):
    """A source whose records can be divided into shares, so that several readers together read every record exactly
    once.
    """

    def share(self, share: Share) -> SharedSource:
        """Returns a source of one share of the records. A position is valid only for the share that it comes from."""
        ...


def _key(part: Part) -> str:
    if isinstance(part, Tokens):
        return repr((part.ids, part.supervised))
    if isinstance(part, Control):
        raise TypeError(f"{part} cannot be part of a plain text document")
    return part if isinstance(part, str) else part.key


def hash_share(key: bytes) -> float:
    """Returns a hash of `key`, scaled to a number in [0, 1). A document is held out if the hash share of the document's
    key is below the configured held-out fraction.
    """
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64


def value_of(record: Any, field: str, file: str, line: int) -> Any:
    """Returns the value of `field` in a record. Raises `DataError` if the record is not a JSON object or lacks the
    field.
    """
    if not isinstance(record, dict):
        raise DataError(file, line, "record is not an object", f"it is {kind_of(record)}")
    if field not in record:
        raise DataError(file, line, "wrong field", missing_field(field, record))
    return record[field]


def text_of(record: Any, field: str, file: str, line: int) -> str:
    """Returns the text of `field` in a record. Raises `DataError` if the text is missing, not a string, blank or
    invalid Unicode.
    """
    value = value_of(record, field, file, line)
    if not isinstance(value, str):
        raise DataError(file, line, "field is not a string", f"{field} is {kind_of(value)}")
    if not value.strip():
        raise DataError(file, line, "empty text", f"{field} has no visible characters")
    return encodable(value, file, line)


def encodable(text: str, file: str, line: int) -> str:
    """Returns `text` unchanged. Raises `DataError` if the text cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a JSON escape can be half of a surrogate pair
        raise DataError(file, line, "invalid Unicode", f"lone surrogate {text[error.start]!r}") from None
    return text


def missing_field(field: str, names: Iterable[str]) -> str:
    """Returns the detail text of an error about the missing field `field` of a record; `names` are the fields that the
    record has.
    """
    names = list(names)[:20]
    return f"there is no {field!r}; set data.field to one of {', '.join(map(repr, names)) or 'none'}"


def kind_of(value: Any) -> str:
    """Returns the type of a JSON value in words, for error messages."""
    return {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number" if isinstance(value, int | float) else type(value).__name__
    )
