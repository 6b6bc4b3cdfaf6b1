"""Finding the files that a configuration names, and decoding them."""

from __future__ import annotations

import codecs
import functools
import glob
import hashlib
import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.errors import BadRecordPolicy, DataError

# Left out of the default corpus: third-party packages, tests (they repeat the library's text, and some are broken on
# purpose), generated files (code page tables, topics of `help`), and the build settings of this machine.
STDLIB_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
STDLIB_EXCLUDED |= {"__pycache__", "lib-dynload"}
STDLIB_EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")
# UTF-32 comes first, because its little-endian mark begins with that of UTF-16.
FOREIGN_BYTE_ORDER_MARKS = (
    ("UTF-32", codecs.BOM_UTF32_LE),
    ("UTF-32", codecs.BOM_UTF32_BE),
    ("UTF-16", codecs.BOM_UTF16_LE),
    ("UTF-16", codecs.BOM_UTF16_BE),
)

# A file this new may change again within the same modification time: some file systems round it to 2 s.
JUST_WRITTEN_NS = 3 * 10**9


@dataclass(frozen=True, order=True, slots=True)
class File:
    """A file, and its name relative to the folder that was configured, which stays the same if the folder is moved."""

    path: Path
    name: str


def find_files(paths: list[str], suffixes: tuple[str, ...]) -> list[File]:
    """All files that the paths name, sorted, each once.

    Of a folder, all files with one of `suffixes` are taken, at any depth, except hidden ones. A single file and the
    matches of a glob pattern are taken whatever their suffix. Raises `DataError` for a path without files.
    """
    found: dict[Path, File] = {}
    for entry in paths:
        path = Path(entry).expanduser()
        if path.is_dir():
            matches = sorted(p for p in _walk(path, lambda name: name.startswith(".")) if p.suffix in suffixes)
            missing = f"the folder has no {' or '.join(suffixes)} file"
        else:
            matches = [path] if path.is_file() else [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
            matches = [p for p in matches if p.is_file()]
            missing = "no such file or folder, and no file matches"
        if not matches:
            raise DataError(entry, 0, "missing file", f"{missing}; check data.paths and data.validation_paths")
        for match in matches:
            name = match.relative_to(path).as_posix() if path.is_dir() else match.name
            found.setdefault(match.resolve(), File(match, name))
    return sorted(found.values())


def _walk(root: Path, excluded: Callable[[str], bool]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not excluded(name)]
        yield from (Path(folder, name) for name in names if not excluded(name))


def stdlib_files() -> list[File]:
    """The default corpus: the .py files of the running Python's standard library, without tests and generated files."""
    root = Path(sysconfig.get_paths()["stdlib"]).resolve()
    # An empty file, as some __init__.py are, is not a document.
    paths = [p for p in _walk(root, _not_in_corpus) if p.suffix == ".py" and p.stat().st_size]
    if not paths:
        raise DataError(str(root), 0, "missing file", "this Python has no standard library on disk; set data.source")
    return sorted(File(path, path.relative_to(root).as_posix()) for path in paths)


def _not_in_corpus(name: str) -> bool:
    return name in STDLIB_EXCLUDED or name.startswith(STDLIB_EXCLUDED_PREFIXES)


def content_hash(path: Path) -> bytes:
    """BLAKE2b of a file's content. A file that keeps its size and modification time is read once per process.

    Raises OSError if it cannot be read.
    """
    status = path.stat()
    if time.time_ns() - status.st_mtime_ns < JUST_WRITTEN_NS:
        return _read_hash(path)
    return _known_hash(path, status.st_size, status.st_mtime_ns)


@functools.cache
def _known_hash(path: Path, size: int, mtime_ns: int) -> bytes:
    return _read_hash(path)


def _read_hash(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").digest()


def decode(data: bytes, file: str, policy: BadRecordPolicy, line: int = 1) -> str:
    """Decode UTF-8 bytes that begin at `line` of a file. A UTF-8 byte order mark is removed.

    Raises `DataError` naming the line of the first invalid byte.
    """
    if line == 1:
        for name, mark in FOREIGN_BYTE_ORDER_MARKS:
            if data.startswith(mark):
                raise DataError(file, 1, f"{name} byte order mark", "convert the file to UTF-8")
        if data.startswith(codecs.BOM_UTF8):
            policy.repair(DataError(file, 1, "UTF-8 byte order mark", "it is not part of the text"))
            data = data[len(codecs.BOM_UTF8) :]
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        raise DataError(file, line, "invalid UTF-8", f"byte 0x{data[error.start]:02x}") from None
