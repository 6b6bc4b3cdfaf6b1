"""What every source yields and everything behind it takes: documents, their parts, and the interface of a source.

A source yields `(Document, after)` pairs. `after()`, called before the next pair is asked for, is the position behind
that document: what `read` needs to continue there without reading what came before. Positions are JSON-able and mean
nothing outside their source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from data.errors import DataError, Policy


@dataclass(frozen=True, slots=True)
class Picture:
    """An image inside a document: its size in pixels, a key that tells it from others, and how to get it.

    `open` returns a PIL image and raises `DataError` when it cannot.
    """

    key: str
    open: Callable[[], Any]
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Control:
    """A control token inside a document, by its released spelling. Text that spells the same is ordinary text."""

    spelling: str


Part = str | Picture | Control


@dataclass(frozen=True, slots=True)
class Document:
    """One training document: its parts in reading order, and where it came from (line 0: the whole file).

    taught: whether each part is to be supervised; None: the whole document is. record: takes the place of the content
    as `key`, for documents that must stay together.
    """

    parts: tuple[Part, ...]
    file: str
    line: int
    taught: tuple[bool, ...] | None = None
    record: bytes | None = None

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def key(self) -> bytes:
        """What makes two documents the same one: their text and images, not where they lie."""
        if self.record is not None:
            return self.record
        return "\0".join(part if isinstance(part, str) else part.key for part in self.parts).encode()


Position = Any
Reading = Iterator[tuple[Document, Callable[[], Position]]]


class Source(Protocol):
    """A repeatable, ordered stream of documents."""

    def read(self, policy: Policy, position: Position = None) -> Reading:
        """Documents from `position` on (None: from the start), each with the position behind it."""
        ...

    def identity(self, content: bool = True) -> str:
        """A hash that changes whenever the documents do (without `content`: their files' names or sizes)."""
        ...


def hash_share(key: bytes) -> float:
    """A number in [0, 1) that depends on nothing but `key`: a split holds out the keys below its share."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64


def value_of(record: Any, field: str, file: str, line: int) -> Any:
    """The value of a record's field. Raises `DataError` for what is no object and for a field that is not there."""
    if not isinstance(record, dict):
        raise DataError(file, line, "record is no object", f"it is {kind_of(record)}")
    if field not in record:
        raise DataError(file, line, "wrong field", missing_field(field, record))
    return record[field]


def text_of(record: Any, field: str, file: str, line: int) -> str:
    """The text of a record's field, or a `DataError` that says why there is none."""
    value = value_of(record, field, file, line)
    if not isinstance(value, str):
        raise DataError(file, line, "field is no string", f"{field} is {kind_of(value)}")
    if not value.strip():
        raise DataError(file, line, "empty text", f"{field} holds no visible character")
    return encodable(value, file, line)


def encodable(text: str, file: str, line: int) -> str:
    """`text`, or a `DataError` if it cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which is no character
        raise DataError(file, line, "invalid Unicode", f"lone surrogate {text[error.start]!r}") from None
    return text


def missing_field(field: str, names: Iterable[str]) -> str:
    """What to say where a record or table has fields or columns of these names only."""
    names = list(names)[:20]
    return f"there is no {field!r}; set data.field to one of {', '.join(map(repr, names)) or 'none'}"


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    return {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number" if isinstance(value, int | float) else type(value).__name__
    )
