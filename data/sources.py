"""Streams of documents with their provenance.

A source yields `(Document, after)` pairs. `after()`, called before the next pair is asked for, is the position behind
that document: what `read` needs to continue there without reading what came before. Positions are JSON-able and mean
nothing outside their source.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from data.config import DataConfig
from data.errors import DataError, Policy, log

SUFFIXES = {
    "text": (".txt", ".md", ".rst", ".py"),
    "jsonl": (".jsonl", ".ndjson"),
    "image_text": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
}
# Not part of the default corpus: other people's packages, tests (their text repeats the library's and is partly broken
# on purpose), files made by programs (code page tables, the topics of `help`), and this machine's build settings.
STDLIB_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
STDLIB_EXCLUDED |= {"__pycache__", "lib-dynload"}
STDLIB_EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")
# A byte order mark of UTF-32-LE begins with that of UTF-16-LE, so the longer ones come first.
FOREIGN_MARKS = (
    ("UTF-32", codecs.BOM_UTF32_LE),
    ("UTF-32", codecs.BOM_UTF32_BE),
    ("UTF-16", codecs.BOM_UTF16_LE),
    ("UTF-16", codecs.BOM_UTF16_BE),
)
PARQUET_BATCH = 1024


@dataclass(frozen=True, slots=True)
class Picture:
    """An image inside a document: its size, a key that tells it from others, and how to get it.

    `open` returns a PIL image and raises `DataError` when it cannot.
    """

    key: str
    open: Callable[[], Any]
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Document:
    """One training document: its parts in reading order, and where it came from (line 0: the whole file)."""

    parts: tuple[str | Picture, ...]
    file: str
    line: int

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def key(self) -> bytes:
        """What makes two documents the same one: their text and images, not where they lie."""
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


def open_sources(cfg: DataConfig) -> tuple[Source, Source]:
    """The train and validation sources of a configuration.

    Raises `DataError` for a path that matches nothing, a data set that cannot be opened or a split without documents.
    """
    if cfg.source == "digits":
        from data.digits import DigitSource  # scikit-learn is slow to import and needed by nobody else

        return DigitSource("train", cfg.validation_share), DigitSource("validation", cfg.validation_share)
    if cfg.source == "stdlib":
        return _split_files(TextFiles, *_stdlib_files(), cfg.validation_share)
    if cfg.source == "hub":
        return _hub_sources(cfg)
    files, root = find_files(cfg.paths, SUFFIXES[cfg.source])
    if cfg.source == "text":
        if cfg.validation_paths:
            held_out, held_out_root = find_files(cfg.validation_paths, SUFFIXES["text"])
            return TextFiles(files, root), TextFiles(held_out, held_out_root)
        return _split_files(TextFiles, files, root, cfg.validation_share)
    reader = {"jsonl": JsonLines, "parquet": Parquet, "image_text": ImageTextLines}[cfg.source]
    source = reader(files, root, cfg.field)
    if cfg.validation_paths:
        return source, reader(*find_files(cfg.validation_paths, SUFFIXES[cfg.source]), cfg.field)
    return HashSplit(source, cfg.validation_share, False), HashSplit(source, cfg.validation_share, True)


def hash_share(key: bytes) -> float:
    """A number in [0, 1) that depends on nothing but `key`: the coordinate on which splits are made."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64


def find_files(paths: list[str], suffixes: tuple[str, ...]) -> tuple[list[Path], Path]:
    """Every file that the paths name, sorted and without repeats, and the folder their names are relative to.

    A folder contributes its files with one of `suffixes`, at any depth; a file or a glob pattern is taken as it is.
    """
    found: set[Path] = set()
    for entry in paths:
        path = Path(entry).expanduser()
        if path.is_dir():
            matches = [p for p in path.rglob("*") if p.suffix in suffixes and p.is_file()]
            missing = f"the folder holds no {' or '.join(suffixes)} file"
        elif path.exists():
            matches, missing = [path], ""
        else:
            matches = [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()]
            missing = "there is no such file, folder or match"
        if not matches:
            raise DataError(entry, 0, "missing file", f"{missing}; check data.paths")
        found.update(p.resolve() for p in matches)
    files = sorted(found)
    root = Path(*_common_parts([f.parent.parts for f in files]))
    return files, root


def _common_parts(paths: list[tuple[str, ...]]) -> list[str]:
    same = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    return [names[0] for names in same]


def _stdlib_files() -> tuple[list[Path], Path]:
    root = Path(sysconfig.get_paths()["stdlib"]).resolve()
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if _in_corpus(name)]
        files += [Path(folder, name) for name in names if name.endswith(".py") and _in_corpus(name)]
    files = sorted(path for path in files if path.stat().st_size)  # packages have empty __init__.py files
    if not files:
        raise DataError(str(root), 0, "missing file", "this Python has no standard library on disk; set data.source")
    return files, root


def _in_corpus(name: str) -> bool:
    return name not in STDLIB_EXCLUDED and not name.startswith(STDLIB_EXCLUDED_PREFIXES)


def _split_files(reader: type, files: list[Path], root: Path, share: float) -> tuple[Source, Source]:
    """Split whole files by a hash of their name below `root`, so that a file keeps its side whatever its neighbours."""
    held_out = [f for f in files if hash_share(f.relative_to(root).as_posix().encode()) < share]
    kept = [f for f in files if f not in set(held_out)]
    for name, part in (("train", kept), ("validation", held_out)):
        if not part:
            detail = f"{len(files)} files and validation_share {share} leave none; set validation_paths"
            raise DataError(str(root), 0, f"empty {name} split", detail)
    return reader(kept, root), reader(held_out, root)


def decode(data: bytes, file: str, first_line: int = 1) -> str:
    """UTF-8 bytes to text; `DataError` with the line of the first bad byte. A byte order mark is no text: removed."""
    if first_line == 1:
        for name, mark in FOREIGN_MARKS:
            if data.startswith(mark):
                raise DataError(file, 1, f"{name} byte order mark", "convert the file to UTF-8")
        if data.startswith(codecs.BOM_UTF8):
            log.info("%s:1: removed a UTF-8 byte order mark", file)
            data = data[len(codecs.BOM_UTF8) :]
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise DataError(file, line, "invalid UTF-8", f"byte 0x{data[error.start]:02x}") from None


class _Files:
    """What the file-based sources share: names, identity and turning operating-system errors into `DataError`."""

    def __init__(self, files: list[Path], root: Path):
        self.files, self.root = files, root

    def identity(self, content: bool = True) -> str:
        """Hash of the kind of source, of each file's name below the root, and of its content or size."""
        digest = hashlib.blake2b(f"{type(self).__name__} {getattr(self, 'field', '')}".encode(), digest_size=16)
        for path in self.files:
            digest.update(path.relative_to(self.root).as_posix().encode() + b"\0")
            try:
                if not content:
                    digest.update(path.stat().st_size.to_bytes(8, "big"))
                    continue
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "blake2b").digest())
            except OSError as error:
                digest.update(str(error.errno).encode())  # read() reports it under the policy
        return digest.hexdigest()

    def _unreadable(self, path: Path, error: OSError) -> DataError:
        return DataError(str(path), 0, "unreadable file", error.strerror or str(error))


class TextFiles(_Files):
    """One document a file."""

    def read(self, policy: Policy, position: Position = None) -> Reading:
        for index in range(position or 0, len(self.files)):
            path = self.files[index]
            try:
                text = decode(path.read_bytes(), str(path))
                if not text.strip():
                    raise DataError(str(path), 0, "empty file")
            except OSError as error:
                policy.report(self._unreadable(path, error))
            except DataError as error:
                policy.report(error)
            else:
                yield Document((text,), str(path), 0), partial(int, index + 1)


class JsonLines(_Files):
    """One JSON object a line. Lines end at \\n alone: U+2028 and its kin are ordinary characters in JSON strings."""

    def __init__(self, files: list[Path], root: Path, field: str):
        super().__init__(files, root)
        self.field = field

    def read(self, policy: Policy, position: Position = None) -> Reading:
        """Positions are [file, byte offset of the next line, number of lines before it]."""
        first, offset, line = position or (0, 0, 0)
        for index in range(first, len(self.files)):
            path = self.files[index]
            try:
                with path.open("rb") as file:
                    file.seek(offset)
                    if not offset and not path.stat().st_size:
                        policy.report(DataError(str(path), 0, "empty file"))
                    for raw in file:
                        offset, line = offset + len(raw), line + 1
                        try:
                            document = self._document(raw, path, line)
                        except DataError as error:
                            policy.report(error)
                        else:
                            yield document, partial(list, (index, offset, line))
            except OSError as error:
                policy.report(self._unreadable(path, error))
            offset = line = 0

    def _document(self, raw: bytes, path: Path, line: int) -> Document:
        text = decode(raw, str(path), line).strip("\r\n")
        if not text.strip():
            raise DataError(str(path), line, "blank line")
        try:
            record = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(str(path), line, "invalid JSON", str(error)) from None
        return Document(self._parts(record, path, line), str(path), line)

    def _parts(self, record: Any, path: Path, line: int) -> tuple[str | Picture, ...]:
        return (text_of(record, self.field, str(path), line),)


class ImageTextLines(JsonLines):
    """JSONL whose field is a list of parts, {"type": "text", "text": ...} or {"type": "image", "image": path}.

    Image paths are relative to the JSONL file. Only the header of an image is read here.
    """

    def _parts(self, record: Any, path: Path, line: int) -> tuple[str | Picture, ...]:
        from data.images import open_picture  # Pillow: needed by image sources only

        items = value_of(record, self.field, str(path), line)
        if not isinstance(items, list) or not items:
            raise DataError(str(path), line, "field is no list of parts", f"{self.field} is {_kind(items)}")
        parts: list[str | Picture] = []
        for number, item in enumerate(items, 1):
            kind = item.get("type") if isinstance(item, dict) else None
            value = item.get(kind) if kind in ("text", "image") else None
            if not isinstance(value, str):
                detail = f'part {number} must be {{"type": "text", "text": ...}} or {{"type": "image", "image": path}}'
                raise DataError(str(path), line, "part is neither text nor image", detail)
            if kind == "text":
                parts.append(_encodable(value, str(path), line))
            else:
                parts.append(open_picture(path.parent / value, str(path), line))
        return tuple(parts)


class Parquet(_Files):
    """One document a row; only the named column is read."""

    def __init__(self, files: list[Path], root: Path, field: str):
        super().__init__(files, root)
        self.field = field

    def read(self, policy: Policy, position: Position = None) -> Reading:
        """Positions are [file, rows before the next one]; whole row groups before it are not read again."""
        import pyarrow
        import pyarrow.parquet

        first, start = position or (0, 0)
        for index in range(first, len(self.files)):
            path = self.files[index]
            try:
                with pyarrow.parquet.ParquetFile(path) as file:
                    if self.field not in file.schema_arrow.names:
                        raise DataError(str(path), 0, "wrong field", _no_field(self.field, file.schema_arrow.names))
                    if not file.metadata.num_rows:
                        raise DataError(str(path), 0, "empty file")
                    for row, value in self._rows(file, start):
                        try:
                            text = text_of({self.field: value}, self.field, str(path), row + 1)
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
        row = 0
        for group in range(file.metadata.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if row + size <= start:
                row += size
                continue
            for batch in file.iter_batches(PARQUET_BATCH, row_groups=[group], columns=[self.field]):
                for value in batch.column(0):
                    if row >= start:
                        yield row, _parquet_value(value)
                    row += 1


def _parquet_value(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return value.as_buffer().to_pybytes()  # text_of names the defect


class HubDataset:
    """A `datasets` data set, map-style or streaming. Positions are row numbers, or the library's own stream state."""

    def __init__(self, dataset: Any, name: str, field: str, streaming: bool):
        self.dataset, self.name, self.field, self.streaming = dataset, name, field, streaming

    def identity(self, content: bool = True) -> str:
        known = f"{self.name} {self.field} {getattr(self.dataset, '_fingerprint', '')}"
        return hashlib.blake2b(known.encode(), digest_size=16).hexdigest()

    def read(self, policy: Policy, position: Position = None) -> Reading:
        row = position["row"] if position else 0
        dataset = self.dataset
        if self.streaming:
            # load_state_dict leaves its mark on the data set, so a fresh pass must begin from a fresh state.
            dataset = dataset.take(2**62)
            if position:
                dataset.load_state_dict(position["state"])
        elif row:
            dataset = dataset.skip(row)
        records = iter(dataset)
        while True:
            try:
                record = next(records)
            except StopIteration:
                return
            except Exception as error:  # whatever a dataset builder raises; there is no common class
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


def _hub_sources(cfg: DataConfig) -> tuple[Source, Source]:
    import datasets

    def load(split: str) -> HubDataset:
        name = cfg.paths[0]
        try:
            if (Path(name) / "dataset_info.json").exists() or (Path(name) / "dataset_dict.json").exists():
                dataset = datasets.load_from_disk(name)
                dataset = dataset[split] if isinstance(dataset, dict) else dataset
                dataset = dataset.to_iterable_dataset() if cfg.streaming else dataset
            else:
                options = {"revision": cfg.hub_revision, "split": split, "streaming": cfg.streaming}
                dataset = datasets.load_dataset(name, cfg.hub_name, **options)
        except Exception as error:  # the library raises dozens of kinds, from network to parsing
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(name, 0, "cannot open data set", f"split {split}: {reason}") from error
        columns = dataset.column_names
        if columns is not None and cfg.field not in columns:
            raise DataError(name, 0, "wrong field", _no_field(cfg.field, columns))
        return HubDataset(dataset, f"{name}[{split}]", cfg.field, cfg.streaming)

    source = load(cfg.hub_split)
    if cfg.hub_validation_split:
        return source, load(cfg.hub_validation_split)
    return HashSplit(source, cfg.validation_share, False), HashSplit(source, cfg.validation_share, True)


class HashSplit:
    """One side of a split by document content: equal documents fall on the same side, in any order and any file."""

    def __init__(self, source: Source, share: float, held_out: bool):
        self.source, self.share, self.held_out = source, share, held_out

    def identity(self, content: bool = True) -> str:
        return f"{self.source.identity(content)} {self.share} {self.held_out}"

    def read(self, policy: Policy, position: Position = None) -> Reading:
        for document, after in self.source.read(policy, position):
            if (hash_share(document.key) < self.share) == self.held_out:
                yield document, after


def value_of(record: Any, field: str, file: str, line: int) -> Any:
    if not isinstance(record, dict):
        raise DataError(file, line, "record is no object", f"it is {_kind(record)}")
    if field not in record:
        raise DataError(file, line, "wrong field", _no_field(field, list(record)))
    return record[field]


def text_of(record: Any, field: str, file: str, line: int) -> str:
    """The text of a record, or a `DataError` that says why there is none."""
    value = value_of(record, field, file, line)
    if isinstance(value, bytes):
        return decode(value, file, line)
    if not isinstance(value, str):
        raise DataError(file, line, "field is no string", f"{field} is {_kind(value)}")
    if not value.strip():
        raise DataError(file, line, "empty text", f"{field} holds no visible character")
    return _encodable(value, file, line)


def _encodable(text: str, file: str, line: int) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which is no character
        raise DataError(file, line, "invalid Unicode", f"lone surrogate {text[error.start]!r}") from None
    return text


def _no_field(field: str, names: list[str]) -> str:
    return f"there is no {field!r}; set data.field to one of {', '.join(map(repr, names[:20])) or 'none'}"


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number" if isinstance(value, int | float) else type(value).__name__
    )
