"""Files of a configuration: finding them, and their bytes as text."""

from __future__ import annotations

import codecs
import glob
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.errors import DataError, Policy

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
