"""The vocabulary of the package: documents, their parts, and the interface of a source.

A source yields `(document, after)` pairs. `after()` returns the position behind that document; given to `read`, reading
continues there without reading what came before. It must be called before the next pair is asked for. A position can
be written as JSON and is meaningful to its own source only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from data.errors import BadRecordPolicy, DataError


@dataclass(frozen=True, slots=True)
class Picture:
    """An image inside a document: its size in pixels, a key that identifies it, and how to load it.

    `open` returns a PIL image and raises `DataError` if it cannot.
    """

    key: str
    open: Callable[[], Any]
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Control:
    """A control token inside a document, by its released spelling. Text with the same spelling stays ordinary text."""

    spelling: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Text that comes as token ids. `supervised`: of each, whether it is a target; None: as the part is."""

    ids: tuple[int, ...]
    supervised: tuple[bool, ...] | None = None


Part = str | Picture | Control | Tokens


@dataclass(frozen=True, slots=True)
class Document:
    """One training document.

    Attributes:
        parts: text, images, control tokens and token ids in reading order.
        file, line: where it came from; line 0 means the whole file.
        supervised: for each part, whether its tokens are targets; None if all are.
        record: replaces the content as `key`, for documents that must stay on the same side of a split.
    """

    parts: tuple[Part, ...]
    file: str
    line: int
    supervised: tuple[bool, ...] | None = None
    record: bytes | None = None

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def key(self) -> bytes:
        """Equal for documents with the same content, wherever they came from."""
        if self.record is not None:
            return self.record
        return "\0".join(_key(part) for part in self.parts).encode()


Position = Any
Reading = Iterator[tuple[Document, Callable[[], Position]]]


class Source(Protocol):
    """A stream of documents that can be read again, in the same order, from any position."""

    def read(self, policy: BadRecordPolicy, position: Position = None) -> Reading:
        """Documents from `position` on (None: from the start), each with the position behind it."""
        ...

    def identity(self, content: bool = True) -> str:
        """A hash that changes when the documents do. With `content=False` the contents of files are not read: the hash
        then covers only their names and sizes."""
        ...


def _key(part: Part) -> str:
    if isinstance(part, Tokens):
        return repr((part.ids, part.supervised))
    if isinstance(part, Control):
        raise TypeError(f"{part} is no part of plain text")
    return part if isinstance(part, str) else part.key


def hash_share(key: bytes) -> float:
    """A number in [0, 1) that depends on `key` alone. A split holds out the keys whose number is below its share."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64


def value_of(record: Any, field: str, file: str, line: int) -> Any:
    """The value of a field of a record. Raises `DataError` if the record is not an object or lacks the field."""
    if not isinstance(record, dict):
        raise DataError(file, line, "record is not an object", f"it is {kind_of(record)}")
    if field not in record:
        raise DataError(file, line, "wrong field", missing_field(field, record))
    return record[field]


def text_of(record: Any, field: str, file: str, line: int) -> str:
    """The text in a field of a record. Raises `DataError` if it is missing, not a string, blank or invalid Unicode."""
    value = value_of(record, field, file, line)
    if not isinstance(value, str):
        raise DataError(file, line, "field is not a string", f"{field} is {kind_of(value)}")
    if not value.strip():
        raise DataError(file, line, "empty text", f"{field} has no visible characters")
    return encodable(value, file, line)


def encodable(text: str, file: str, line: int) -> str:
    """`text` itself. Raises `DataError` if it cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a JSON escape can be half of a surrogate pair
        raise DataError(file, line, "invalid Unicode", f"lone surrogate {text[error.start]!r}") from None
    return text


def missing_field(field: str, names: Iterable[str]) -> str:
    """The detail of an error about a missing field, given the names of the fields that exist."""
    names = list(names)[:20]
    return f"there is no {field!r}; set data.field to one of {', '.join(map(repr, names)) or 'none'}"


def kind_of(value: Any) -> str:
    """The type of a JSON value, in words."""
    return {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number" if isinstance(value, int | float) else type(value).__name__
    )
