"""Reads files of records: JSONL, JSON, Parquet and Arrow. The format is recognised by the file's name and content; JSON
files may be compressed.

A file is read as a sequence of `Item`s. A place in a file is a tuple of numbers; reading can start at the place `after`
of any `Item`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from data.document import WHOLE, Share, kind_of
from data.errors import BadRecordPolicy, DataError
from data.files import (
    UNPACKING_ERRORS,
    count_lines,
    decode,
    is_packed,
    lines_of_share,
    open_unpacked,
    skip_bytes,
    suffix_of,
)

ROWS = 1024  # number of rows that the Parquet decoder returns at a time
COUNTED_BYTES = 2**26  # lines before a share of a file are counted up to this place; it takes hundredths of a second
RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")

Place = tuple[int, ...]
# A function that takes all column names of a table and returns those to read
Columns = Callable[[Sequence[str]], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Item:
    """A record of a file, or the error raised by reading it; its number, counted from 1 (in JSONL the line number); and
    the places in the file before and after the record.
    """

    record: Any
    line: int
    before: Place
    after: Place


def read_records(
    path: Path, start: Place, policy: BadRecordPolicy, columns: Columns, part: Part | None = None
) -> Iterator[Item]:
    """Yield the records of a file, or of a share of it, from the place `start` on; the place () is the beginning of the
    file. For a record that cannot be read, the `Item` holds the error.

    A share of lines that are not compressed is a range of bytes, and a share of a table or of a JSON list is a range of
    records; only this range is read. In a compressed file of lines, each of n shares has every n-th line, and every
    reader decompresses all lines.

    columns: a function that chooses the columns to read from a table. Raises `DataError` for a file that cannot be read
    at all.
    """
    try:
        yield from _reader(path)(path, start, policy, columns, part or part_of(path, WHOLE))
    except UNPACKING_ERRORS as error:
        raise DataError(str(path), 0, "unreadable file", getattr(error, "strerror", None) or str(error)) from None


def _reader(path: Path) -> Callable[..., Iterator[Item]]:
    by_suffix = {".json": _json, ".parquet": _parquet, ".arrow": _arrow, ".jsonl": _lines, ".ndjson": _lines}
    if (suffix := suffix_of(path)) in by_suffix:
        return by_suffix[suffix]
    with path.open("rb") as file:
        begin = file.read(6)
    return _parquet if begin.startswith(b"PAR1") else _arrow if begin == b"ARROW1" else _lines


class Part(NamedTuple):
    """One share of a file. begin, end: of a file of lines the first byte of the share, and the byte after the share
    (None: lines are not divided by bytes); line: the number of lines before the share, 0 if they are not counted.
    """

    share: Share
    begin: int
    end: int | None
    line: int
    name: str  # of the file in error messages; if the lines before the share are not counted, it says where that begins


def part_of(path: Path, share: Share) -> Part:
    """Find where a share of a file lies. Lines before a share are counted if they have at most COUNTED_BYTES bytes."""
    if share == WHOLE or _reader(path) is not _lines or is_packed(path):
        return Part(share, 0, None, 0, str(path))
    begin, end = lines_of_share(path, share)
    line = count_lines(path, begin) if begin <= COUNTED_BYTES else 0
    return Part(share, begin, end, line, f"{path} from byte {begin}" if begin and line == 0 else str(path))


def _lines(path: Path, start: Place, policy: BadRecordPolicy, columns: Columns, part: Part) -> Iterator[Item]:
    """Read a file with one JSON object per line. Only \\n ends a line, because other line separators such as U+2028 are
    ordinary characters in JSON strings.

    A place is a tuple (byte offset of the next line in the uncompressed file, number of lines before it).
    """
    (index, count), end = part.share, part.end
    every = count if end is None else 1
    offset, line = start or (part.begin, part.line)
    with open_unpacked(path) as file:
        file.seek(offset) if file.seekable() else skip_bytes(file, offset)
        empty = not offset and not index
        for raw in file:
            if end is not None and offset >= end:
                return
            empty = False
            before, offset, line = (offset, line), offset + len(raw), line + 1
            if every > 1 and (line - 1) % every != index:
                continue
            try:
                record = _parsed(raw, part.name, line, policy)
            except DataError as error:
                record = error
            yield Item(record, line, before, (offset, line))
    if empty:
        raise DataError(str(path), 0, "empty file")


def _parsed(raw: bytes, name: str, line: int, policy: BadRecordPolicy) -> Any:
    text = decode(raw, name, policy, line).strip("\r\n")
    if not text.strip():
        raise DataError(name, line, "blank line")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for integers with too many digits
        raise DataError(name, line, "invalid JSON", str(error)) from None


def _rows_of(number: int, start: Place, share: Share) -> tuple[int, int]:
    """The index of the first record to read, and the index after the last one. The records to read are those of a share
    of a file with `number` records, without the records before the place `start`.
    """
    index, count = share
    return max(number * index // count, start[0] if start else 0), number * (index + 1) // count


def _json(path: Path, start: Place, policy: BadRecordPolicy, columns: Columns, part: Part) -> Iterator[Item]:
    """Read a JSON file that holds a list of records, a single record, or one record per line. The place of
    a record is a tuple (number of records before it,).
    """
    if len(start) == 2:
        yield from _lines(path, start, policy, columns, part)
        return
    with open_unpacked(path) as file:
        text = decode(file.read(), str(path), policy)
    if not text.strip():
        raise DataError(str(path), 0, "empty file")
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        if not error.msg.startswith("Extra data"):
            raise DataError(str(path), error.lineno, "invalid JSON", str(error)) from None
        yield from _lines(path, (), policy, columns, part)  # the file holds several JSON values, one on each line
        return
    except (ValueError, RecursionError) as error:
        raise DataError(str(path), 0, "invalid JSON", str(error)) from None
    if not isinstance(records, list | dict):
        raise DataError(str(path), 0, "no records", f"the file holds {kind_of(records)}, not a list of objects")
    records = [records] if isinstance(records, dict) else records
    if not records:
        raise DataError(str(path), 0, "empty file")
    for number in range(*_rows_of(len(records), start, part.share)):
        yield Item(records[number], number + 1, (number,), (number + 1,))


def _parquet(path: Path, start: Place, policy: BadRecordPolicy, columns: Columns, part: Part) -> Iterator[Item]:
    """Read a Parquet file. The place of a record is a tuple (number of rows before the record,). Row groups without a
    row to read are skipped.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = list(columns(file.schema_arrow.names))
            if not file.metadata.num_rows:
                raise DataError(str(path), 0, "empty file")
            row, (first, end) = 0, _rows_of(file.metadata.num_rows, start, part.share)
            for group in range(file.metadata.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                if row + size <= first:
                    row += size
                    continue
                for batch in file.iter_batches(ROWS, row_groups=[group], columns=names):
                    if row >= end:
                        return
                    yield from _rows(batch, path, row, first, end)
                    row += len(batch)
    except pyarrow.ArrowInvalid as error:
        raise DataError(str(path), 0, "invalid Parquet", str(error).splitlines()[0]) from None


def _arrow(path: Path, start: Place, policy: BadRecordPolicy, columns: Columns, part: Part) -> Iterator[Item]:
    """Read an Arrow file, or an Arrow stream such as the `datasets` library writes. The place of a record is a tuple
    (number of rows before the record,).
    """
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as file:
            try:
                reader = pyarrow.ipc.open_file(file)
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            except pyarrow.ArrowInvalid:
                file.seek(0)
                reader = batches = pyarrow.ipc.open_stream(file)
            names = list(columns(reader.schema.names))
            row, stored = 0, list(batches)  # not copied, because the file is mapped into memory
            first, end = _rows_of(sum(map(len, stored)), start, part.share)
            for batch in stored:
                yield from _rows(batch.select(names), path, row, first, end)
                row += len(batch)
            if not row:
                raise DataError(str(path), 0, "empty file")
    except pyarrow.ArrowInvalid as error:
        raise DataError(str(path), 0, "invalid Arrow", str(error).splitlines()[0]) from None


def _rows(batch: Any, path: Path, before: int, first: int, end: int) -> Iterator[Item]:
    """Yield the rows of a batch that are in the range from row `first` of the file up to, not including, row `end`.
    `before`: the number of rows in the file before the batch.
    """
    names = batch.schema.names
    for number in range(max(0, first - before), min(len(batch), end - before)):
        row = before + number
        try:
            record: Any = {n: without_nulls(batch.column(i)[number].as_py()) for i, n in enumerate(names)}
        except UnicodeDecodeError as error:  # Parquet does not check that its strings are UTF-8
            detail = f"byte 0x{error.object[error.start]:02x}"
            record = DataError(str(path), row + 1, "invalid UTF-8", detail)
        yield Item(record, row + 1, (row,), (row + 1,))


def without_nulls(value: Any) -> Any:
    """A copy of the value without keys whose value is null, because a table gives every row the keys of all rows."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
