"""Streams of documents with their provenance.

A source yields `(Document, after)` pairs. `after()`, called before the next pair is asked for, is the position behind
that document: what `read` needs to continue there without reading what came before. Positions are JSON-able and mean
nothing outside their source.
"""

from __future__ import annotations

import codecs
import copy
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from data.config import DataConfig
from data.errors import DataError, Policy

SUFFIXES = {
    "text": (".txt", ".md", ".rst", ".py"),
    "jsonl": (".jsonl", ".ndjson"),
    "image_text": (".jsonl", ".ndjson"),
    "chat": (".jsonl", ".ndjson"),
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
class Control:
    """A control token inside a document, by its released spelling. Text that spells it is none."""

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


def open_sources(cfg: DataConfig) -> tuple[Source, Source]:
    """The train and validation sources of a configuration.

    Raises `DataError` for a path that matches nothing, a data set that cannot be opened or a split without files.
    """
    if cfg.source == "digits":
        from data.digits import DigitSource

        return DigitSource("train", cfg.validation_share), DigitSource("validation", cfg.validation_share)
    if cfg.source == "stdlib":
        return _split_files(stdlib_files(), cfg.validation_share)
    if cfg.source == "hub":
        return _hub_sources(cfg)
    suffixes = SUFFIXES[cfg.source]
    files = find_files(cfg.paths, suffixes)
    held_out = find_files(cfg.validation_paths, suffixes) if cfg.validation_paths else None
    if held_out:
        kept_back = {file.path.resolve() for file in held_out}
        files = [file for file in files if file.path.resolve() not in kept_back]
        if not files:
            raise DataError(cfg.paths[0], 0, "no training data", "data.validation_paths names every file of data.paths")
    if cfg.source == "text":
        return (TextFiles(files), TextFiles(held_out)) if held_out else _split_files(files, cfg.validation_share)
    from data.chat import ChatLines  # builds on this module

    reader = {"jsonl": JsonLines, "parquet": Parquet, "image_text": ImageTextLines, "chat": ChatLines}[cfg.source]
    source = reader(files, cfg.field)
    return (source, reader(held_out, cfg.field)) if held_out else _split_records(source, cfg.validation_share)


def hash_share(key: bytes) -> float:
    """A number in [0, 1) that depends on nothing but `key`: the coordinate on which splits are made."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64


@dataclass(frozen=True, order=True, slots=True)
class File:
    """A file, and its name below the folder that a configuration names: what stays when the folder moves."""

    path: Path
    name: str


def find_files(paths: list[str], suffixes: tuple[str, ...]) -> list[File]:
    """Every file that the paths name, sorted and without repeats.

    A folder contributes its files with one of `suffixes` at any depth, without hidden ones; a file or the matches of a
    glob pattern are taken as they are. Raises `DataError` for a path that gives no file.
    """
    found: dict[Path, File] = {}
    for entry in paths:
        path = Path(entry).expanduser()
        if path.is_dir():
            matches = sorted(p for p in _walk(path, lambda name: name.startswith(".")) if p.suffix in suffixes)
            missing = f"the folder holds no {' or '.join(suffixes)} file"
        else:
            matches = [path] if path.is_file() else [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
            matches = [p for p in matches if p.is_file()]
            missing = "there is no such file, folder or match"
        if not matches:
            raise DataError(entry, 0, "missing file", f"{missing}; check the paths of data")
        for match in matches:
            name = match.relative_to(path).as_posix() if path.is_dir() else match.name
            found.setdefault(match.resolve(), File(match, name))
    return sorted(found.values())


def _walk(root: Path, excluded: Callable[[str], bool]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not excluded(name)]
        yield from (Path(folder, name) for name in names if not excluded(name))


def stdlib_files() -> list[File]:
    """The .py files of the running Python's standard library that make up the default corpus."""
    root = Path(sysconfig.get_paths()["stdlib"]).resolve()
    paths = [
        p for p in _walk(root, _not_in_corpus) if p.suffix == ".py" and p.stat().st_size
    ]  # __init__.py can be empty
    if not paths:
        raise DataError(str(root), 0, "missing file", "this Python has no standard library on disk; set data.source")
    return sorted(File(path, path.relative_to(root).as_posix()) for path in paths)


def _not_in_corpus(name: str) -> bool:
    return name in STDLIB_EXCLUDED or name.startswith(STDLIB_EXCLUDED_PREFIXES)


def _split_files(files: list[File], share: float) -> tuple[Source, Source]:
    """Split whole files by a hash of their names, so that a file keeps its side whatever its neighbours."""
    held_out = [file for file in files if hash_share(file.name.encode()) < share]
    kept = [file for file in files if hash_share(file.name.encode()) >= share]
    for split, part in (("train", kept), ("validation", held_out)):
        if not part:
            detail = f"{len(files)} files at validation_share {share} leave none; raise it or set data.validation_paths"
            raise DataError(str(files[0].path.parent), 0, f"no {split} files", detail)
    return TextFiles(kept), TextFiles(held_out)


def _split_records(source: Source, share: float) -> tuple[Source, Source]:
    return HashSplit(source, share, False), HashSplit(source, share, True)


def decode(data: bytes, file: str, policy: Policy, line: int = 1) -> str:
    """The text of UTF-8 bytes that begin at `line` of a file; a UTF-8 byte order mark is removed.

    Raises `DataError` with the line of the first byte that is wrong.
    """
    if line == 1:
        for name, mark in FOREIGN_MARKS:
            if data.startswith(mark):
                raise DataError(file, 1, f"{name} byte order mark", "convert the file to UTF-8")
        if data.startswith(codecs.BOM_UTF8):
            policy.repair(DataError(file, 1, "UTF-8 byte order mark", "it is no part of the text"))
            data = data[len(codecs.BOM_UTF8) :]
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        raise DataError(file, line, "invalid UTF-8", f"byte 0x{data[error.start]:02x}") from None


class _Files:
    """What the file-based sources share: names, identity and turning operating-system errors into `DataError`."""

    field = ""

    def __init__(self, files: list[File]):
        self.files = files

    def identity(self, content: bool = True) -> str:
        """Hash of the kind of source, of each file's name, and of its content or size."""
        digest = hashlib.blake2b(f"{type(self).__name__} {self.field}".encode(), digest_size=16)
        for file in self.files:
            digest.update(file.name.encode() + b"\0")
            try:
                if not content:
                    digest.update(file.path.stat().st_size.to_bytes(8, "big"))
                    continue
                with file.path.open("rb") as opened:
                    digest.update(hashlib.file_digest(opened, "blake2b").digest())
            except OSError as error:
                digest.update(str(error.errno).encode())  # read() reports it under the policy
        return digest.hexdigest()

    def _unreadable(self, path: Path, error: OSError) -> DataError:
        return DataError(str(path), 0, "unreadable file", error.strerror or str(error))


class TextFiles(_Files):
    """One document a file."""

    def read(self, policy: Policy, position: Position = None) -> Reading:
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
    """One JSON object a line. Lines end at \\n alone: U+2028 and its kin are ordinary characters in JSON strings."""

    def __init__(self, files: list[File], field: str):
        super().__init__(files)
        self.field = field

    def read(self, policy: Policy, position: Position = None) -> Reading:
        """Positions are [file, byte offset of the next line, number of lines before it]; a conversation's documents
        share one, which is why conversations are not streamed.
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

    def _documents(self, raw: bytes, path: Path, line: int, policy: Policy) -> Sequence[Document]:
        record = self._record(raw, path, line, policy)
        return (Document(self._parts(record, path, line), str(path), line),)

    def _record(self, raw: bytes, path: Path, line: int, policy: Policy) -> Any:
        text = decode(raw, str(path), policy, line).strip("\r\n")
        if not text.strip():
            raise DataError(str(path), line, "blank line")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:  # also an integer of more digits than Python converts
            raise DataError(str(path), line, "invalid JSON", str(error)) from None

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
                parts.append(encodable(value, str(path), line))
            else:
                parts.append(open_picture(path.parent / value, str(path), line))
        return tuple(parts)


class Parquet(_Files):
    """One document a row; only the named column is read."""

    def __init__(self, files: list[File], field: str):
        super().__init__(files)
        self.field = field

    def read(self, policy: Policy, position: Position = None) -> Reading:
        """Positions are [file, rows before the next one]; whole row groups before it are not read again."""
        import pyarrow
        import pyarrow.parquet

        first, start = position or (0, 0)
        for index in range(first, len(self.files)):
            path = self.files[index].path
            try:
                with pyarrow.parquet.ParquetFile(path) as file:
                    if self.field not in file.schema_arrow.names:
                        raise DataError(str(path), 0, "wrong field", _no_field(self.field, file.schema_arrow.names))
                    if not file.metadata.num_rows:
                        raise DataError(str(path), 0, "empty file")
                    for row, value in self._rows(file, start):
                        try:
                            text = text_of({self.field: value.as_py()}, self.field, str(path), row + 1)
                        except UnicodeDecodeError as error:  # Parquet does not check what it stores as text
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
            dataset = copy.deepcopy(dataset)  # its position is part of it, and passes must not share one
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
    return _split_records(source, cfg.validation_share)


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
    if not isinstance(value, str):
        raise DataError(file, line, "field is no string", f"{field} is {_kind(value)}")
    if not value.strip():
        raise DataError(file, line, "empty text", f"{field} holds no visible character")
    return encodable(value, file, line)


def encodable(text: str, file: str, line: int) -> str:
    """`text`, or a `DataError` if it holds what is no character."""
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
