"""Readers: the sources that turn files and `datasets` data sets into documents."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from data.document import (
    Document,
    Picture,
    Position,
    Reading,
    Source,
    encodable,
    hash_share,
    kind_of,
    missing_field,
    text_of,
    value_of,
)
from data.errors import BadRecordPolicy, DataError
from data.files import File, content_hash, decode

PARQUET_BATCH = 1024  # rows per batch of the decoder


class _Files:
    """What sources of files have in common. The names of these classes are part of saved positions: see `identity`."""

    field = ""

    def __init__(self, files: list[File]):
        self.files = files

    def identity(self, content: bool = True) -> str:
        """A hash of the reader's class, the field, and the name and content (or size) of each file."""
        digest = hashlib.blake2b(f"{type(self).__name__} {self.field}".encode(), digest_size=16)
        for file in self.files:
            digest.update(file.name.encode() + b"\0")
            try:
                digest.update(content_hash(file.path) if content else file.path.stat().st_size.to_bytes(8, "big"))
            except OSError as error:
                digest.update(str(error.errno).encode())  # `read` reports it to the policy
        return digest.hexdigest()

    def _unreadable(self, path: Path, error: OSError) -> DataError:
        return DataError(str(path), 0, "unreadable file", error.strerror or str(error))


class TextFiles(_Files):
    """One document per file. Positions are the number of files read."""

    def read(self, policy: BadRecordPolicy, position: Position = None) -> Reading:
        for index in range(position or 0, len(self.files)):
            path = self.files[index].path
            try:
                text = decode(path.read_bytes(), str(path), policy)
                if not text.strip():
                    raise DataError(str(path), 0, "empty file")
            except OSError as error:
                policy.report(self._unreadable(path, error))
            except DataError as error:
                policy.report(error)
            else:
                yield Document((text,), str(path), 0), partial(int, index + 1)


class JsonLines(_Files):
    """One JSON object per line. Only \\n ends a line: U+2028 and the like are ordinary characters in JSON strings."""

    def __init__(self, files: list[File], field: str):
        super().__init__(files)
        self.field = field

    def read(self, policy: BadRecordPolicy, position: Position = None) -> Reading:
        """Positions are [file, byte offset of the next line, number of lines before it].

        All documents of one line have the same position. Therefore conversations, which can become several documents,
        cannot be streamed.
        """
        first, offset, line = position or (0, 0, 0)
        for index in range(first, len(self.files)):
            path = self.files[index].path
            try:
                with path.open("rb") as file:
                    file.seek(offset)
                    if not offset and not path.stat().st_size:
                        policy.report(DataError(str(path), 0, "empty file"))
                    for raw in file:
                        offset, line = offset + len(raw), line + 1
                        try:
                            documents = self._documents(raw, path, line, policy)
                        except DataError as error:
                            policy.report(error)
                        else:
                            for document in documents:
                                yield document, partial(list, (index, offset, line))
            except OSError as error:
                policy.report(self._unreadable(path, error))
            offset = line = 0

    def _documents(self, raw: bytes, path: Path, line: int, policy: BadRecordPolicy) -> Sequence[Document]:
        record = self._record(raw, path, line, policy)
        return (Document(self._parts(record, path, line), str(path), line),)

    def _record(self, raw: bytes, path: Path, line: int, policy: BadRecordPolicy) -> Any:
        text = decode(raw, str(path), policy, line).strip("\r\n")
        if not text.strip():
            raise DataError(str(path), line, "blank line")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError also for integers with too many digits
            raise DataError(str(path), line, "invalid JSON", str(error)) from None

    def _parts(self, record: Any, path: Path, line: int) -> tuple[str | Picture, ...]:
        return (text_of(record, self.field, str(path), line),)


class ImageTextLines(JsonLines):
    """JSONL whose field is a list of parts: {"type": "text", "text": ...} or {"type": "image", "image": path}.

    Image paths are relative to the JSONL file. Every image is decoded once here, to check it.
    """

    def _parts(self, record: Any, path: Path, line: int) -> tuple[str | Picture, ...]:
        from data.images import open_picture  # needs Pillow and torch

        items = value_of(record, self.field, str(path), line)
        if not isinstance(items, list) or not items:
            raise DataError(str(path), line, "field is not a list of parts", f"{self.field} is {kind_of(items)}")
        parts: list[str | Picture] = []
        for number, item in enumerate(items, 1):
            kind = item.get("type") if isinstance(item, dict) else None
            value = item.get(kind) if kind in ("text", "image") else None
            if not isinstance(value, str):
                detail = f'part {number} must be {{"type": "text", "text": ...}} or {{"type": "image", "image": path}}'
                raise DataError(str(path), line, "part is neither text nor image", detail)
            if kind == "text":
                parts.append(encodable(value, str(path), line))
            else:
                parts.append(open_picture(path.parent / value, str(path), line))
        return tuple(parts)


class Parquet(_Files):
    """One document per row. Only the configured column is read."""

    def __init__(self, files: list[File], field: str):
        super().__init__(files)
        self.field = field

    def read(self, policy: BadRecordPolicy, position: Position = None) -> Reading:
        """Positions are [file, number of rows before the next one]. Row groups that end before it are not read."""
        import pyarrow
        import pyarrow.parquet

        first, start = position or (0, 0)
        for index in range(first, len(self.files)):
            path = self.files[index].path
            try:
                with pyarrow.parquet.ParquetFile(path) as file:
                    if self.field not in file.schema_arrow.names:
                        raise DataError(str(path), 0, "wrong field", missing_field(self.field, file.schema_arrow.names))
                    if not file.metadata.num_rows:
                        raise DataError(str(path), 0, "empty file")
                    for row, value in self._rows(file, start):
                        try:
                            text = text_of({self.field: value.as_py()}, self.field, str(path), row + 1)
                        except UnicodeDecodeError as error:  # Parquet does not check that its strings are UTF-8
                            detail = f"byte 0x{error.object[error.start]:02x}"
                            policy.report(DataError(str(path), row + 1, "invalid UTF-8", detail))
                        except DataError as error:
                            policy.report(error)
                        else:
                            yield Document((text,), str(path), row + 1), partial(list, (index, row + 1))
            except DataError as error:
                policy.report(error)
            except pyarrow.ArrowInvalid as error:
                policy.report(DataError(str(path), 0, "invalid Parquet", str(error).splitlines()[0]))
            except OSError as error:
                policy.report(self._unreadable(path, error))
            start = 0

    def _rows(self, file: Any, start: int) -> Iterator[tuple[int, Any]]:
        """(row number, value of the field) for the rows of a file from `start` on."""
        row = 0
        for group in range(file.metadata.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if row + size <= start:
                row += size
                continue
            for batch in file.iter_batches(PARQUET_BATCH, row_groups=[group], columns=[self.field]):
                for value in batch.column(0):
                    if row >= start:
                        yield row, value
                    row += 1


class HubDataset:
    """A data set of the `datasets` library, map-style or streaming.

    Positions are {"row": rows read}, and for a streaming data set also its own "state".
    """

    def __init__(self, dataset: Any, name: str, field: str, streaming: bool):
        self.dataset, self.name, self.field, self.streaming = dataset, name, field, streaming

    def identity(self, content: bool = True) -> str:
        known = f"{self.name} {self.field} {getattr(self.dataset, '_fingerprint', '')}"
        return hashlib.blake2b(known.encode(), digest_size=16).hexdigest()

    def read(self, policy: BadRecordPolicy, position: Position = None) -> Reading:
        row = position["row"] if position else 0
        dataset = self.dataset
        if self.streaming:
            dataset = _own_position(dataset)
            if position:
                dataset.load_state_dict(position["state"])
        elif row >= len(dataset):
            return
        else:
            dataset = dataset.skip(row)
        records = iter(dataset)
        while True:
            try:
                record = next(records)
            except StopIteration:
                return
            except Exception as error:  # builders of data sets raise all kinds
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise DataError(self.name, row + 1, "unreadable data set", reason) from error
            row += 1
            try:
                text = text_of(record, self.field, self.name, row)
            except DataError as error:
                policy.report(error)
                continue
            yield Document((text,), self.name, row), partial(self._position, dataset, row)

    def _position(self, dataset: Any, row: int) -> dict[str, Any]:
        return {"row": row, "state": dataset.state_dict()} if self.streaming else {"row": row}


def _own_position(dataset: Any) -> Any:
    """A copy of a streaming data set. Its position is part of it, and two passes must not share one.

    The library's cache of file systems is part of it too, and is not copied: that would open each file system again in
    every new thread, which adds to the cache while it is being copied.
    """
    from huggingface_hub import HfFileSystem

    return copy.deepcopy(dataset, {id(HfFileSystem._cache): HfFileSystem._cache})


class HashSplit:
    """One side of a split by content: equal documents are on the same side, wherever they are in the data."""

    def __init__(self, source: Source, share: float, held_out: bool):
        self.source, self.share, self.held_out = source, share, held_out

    def identity(self, content: bool = True) -> str:
        return f"{self.source.identity(content)} {self.share} {self.held_out}"

    def read(self, policy: BadRecordPolicy, position: Position = None) -> Reading:
        for document, after in self.source.read(policy, position):
            if (hash_share(document.key) < self.share) == self.held_out:
                yield document, after
