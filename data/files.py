"""Finds the data files that a configuration names, and decompresses and decodes them."""

from __future__ import annotations

import bz2
import codecs
import functools
import glob
import gzip
import hashlib
import io
import logging
import lzma
import os
import sysconfig
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.cache import cached_text
from data.document import WHOLE, Share
from data.errors import BadRecordPolicy, DataError
from data.progress import Advance, progress

log = logging.getLogger(__name__)

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

# First bytes of compressed files, and how each kind is decompressed. The bytes decide, not the file's name.
PACKED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
ZSTD = b"\x28\xb5\x2f\xfd"
PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")

# A file modified this recently may change again without a new modification time: some file systems round it to 2 s.
JUST_WRITTEN_NS = 3 * 10**9


@dataclass(frozen=True, order=True, slots=True)
class File:
    """The path of a file, and its name relative to the configured folder; the name stays the same if the folder is
    moved.
    """

    path: Path
    name: str

    @property
    def num_bytes(self) -> int:
        """The size of the file; 0 if it is missing."""
        return self.path.stat().st_size if self.path.is_file() else 0


def find_files(paths: list[str], suffixes: tuple[str, ...]) -> list[File]:
    """All files that the paths name, sorted and without duplicates.

    A path can be a folder, a file or a glob pattern. From a folder, all files with one of `suffixes` are taken (in
    upper or lower case, possibly compressed: `.gz`, `.zst`, `.bz2`, `.xz`), at any depth and through links to folders,
    except hidden files; the log counts the files that are left out. A single file, or one that matches a glob pattern,
    is taken whatever its suffix is. Raises `DataError` for a path without files.
    """
    found: dict[Path, File] = {}
    for entry in paths:
        path = Path(entry).expanduser()
        if path.is_dir():
            everything = sorted(_walk(path, lambda name: name.startswith(".")))
            matches = [p for p in everything if suffix_of(p) in suffixes]
            _tell_left_out(path, [p for p in everything if suffix_of(p) not in suffixes])
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


def total_bytes(files: Iterable[File]) -> int:
    """The total size of all files in bytes; a missing file counts as 0."""
    return sum(file.num_bytes for file in files)


def suffix_of(path: Path) -> str:
    """The lower-case suffix of a file name, ignoring compression suffixes such as .gz."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED_SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _walk(root: Path, excluded: Callable[[str], bool], links: bool = True) -> Iterator[Path]:
    """All files in a folder and its subfolders. links: whether to follow links to folders. Links are followed last and
    each folder is visited once, so that a link to a parent folder does not cause an endless loop.
    """
    waiting, seen = deque([str(root)]), set()
    while waiting:
        top = waiting.popleft()
        if os.path.realpath(top) in seen:
            continue
        for folder, folders, names in os.walk(top):
            seen.add(os.path.realpath(folder))
            folders[:] = sorted(name for name in folders if not excluded(name))
            paths = (os.path.join(folder, name) for name in folders)
            waiting.extend(path for path in paths if links and os.path.islink(path))
            yield from (Path(folder, name) for name in names if not excluded(name))


@functools.cache
def _log_once(message: str) -> None:
    log.warning(message)


def _tell_left_out(folder: Path, files: list[Path]) -> None:
    """Log once which files of a folder are not read: the number of files with each suffix, and the first such file."""
    if files:
        kinds = Counter(suffix_of(path) or "no suffix" for path in files)
        counts = ", ".join(f"{number} x {suffix}" for suffix, number in kinds.most_common(5))
        more = ", ..." if len(kinds) > 5 else ""
        _log_once(f"{folder}: {len(files)} other files are not read ({counts}{more}; the first is {files[0].name})")


def stdlib_files() -> list[File]:
    """The default corpus: the .py files of the running Python's standard library, without tests and generated files."""
    root = Path(sysconfig.get_paths()["stdlib"]).resolve()
    # Empty files, such as some __init__.py, are left out because they are not documents.
    paths = [p for p in _walk(root, _not_in_corpus, links=False) if p.suffix == ".py" and p.stat().st_size]
    if not paths:
        raise DataError(str(root), 0, "missing file", "this Python has no standard library on disk; set data.source")
    return sorted(File(path, path.relative_to(root).as_posix()) for path in paths)


def _not_in_corpus(name: str) -> bool:
    return name in STDLIB_EXCLUDED or name.startswith(STDLIB_EXCLUDED_PREFIXES)


def files_hash(files: list[File], kind: str, content: bool, cache: Path | None = None) -> str:
    """A hash of the text `kind` and of the name and content of each file. With `content=False`, the size of a file
    replaces its content.

    cache: a folder in which the hash of contents is kept as long as path, size and modification time of all files stay
    the same, so that the files are not read again at the next start.
    """
    stamp = _stamp(files) if content and cache is not None else None
    if stamp is None:
        return _files_hash(files, kind, content)
    assert cache is not None
    key = hashlib.blake2b(f"{kind} {stamp}".encode(), digest_size=12).hexdigest()
    return cached_text(cache / f"content-{key}.txt", lambda: _files_hash(files, kind, content))


def _stamp(files: list[File]) -> str | None:
    """Name, path, size and modification time of all files; None if a file cannot be found or was just written."""
    digest, now = hashlib.blake2b(digest_size=16), time.time_ns()
    for file in files:
        try:
            status = file.path.stat()
        except OSError:
            return None
        if now - status.st_mtime_ns < JUST_WRITTEN_NS:
            return None
        digest.update(f"{file.name}\0{file.path.resolve()}\0{status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _files_hash(files: list[File], kind: str, content: bool) -> str:
    digest = hashlib.blake2b(kind.encode(), digest_size=16)
    with progress("reading the data files", total_bytes(files), shared=True) as advance:
        for file in files:
            digest.update(file.name.encode() + b"\0")
            try:
                size = file.path.stat().st_size
                digest.update(content_hash(file.path, advance) if content else size.to_bytes(8, "big"))
            except OSError as error:
                digest.update(str(error.errno).encode())  # reading the file then reports the error to the policy
    return digest.hexdigest()


def content_hash(path: Path, advance: Advance = lambda amount: None) -> bytes:
    """The BLAKE2b hash of a file's content. Each process reads a file only once as long as its size and modification
    time do not change. advance: is called with the number of bytes of each part that has been read.

    Raises OSError if the file cannot be read.
    """
    status = path.stat()
    if time.time_ns() - status.st_mtime_ns < JUST_WRITTEN_NS:
        return _read_hash(path, advance)
    version = path, status.st_size, status.st_mtime_ns
    if version not in _hashes:
        _hashes[version] = _read_hash(path, advance)
    return _hashes[version]


_hashes: dict[tuple[Path, int, int], bytes] = {}  # the hash of each version of a file that this process has read


def _read_hash(path: Path, advance: Advance) -> bytes:
    digest = hashlib.blake2b()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
            advance(len(part))
    return digest.digest()


def deal_files(sizes: list[int], share: Share, divisible: bool) -> dict[int, Share]:
    """Divide files of these sizes in bytes among several shares. Returns the files of the share `share`: a map from the
    index of each file to the part of it (a `Share`) that belongs to this share.

    With n shares, whole files are dealt in rounds of n files, largest files first, in alternating direction, so that
    all shares get as many files and nearly as many bytes. Fewer than n files remain, the smallest ones: each is divided
    among all shares if `divisible` is true, and otherwise given whole to one share.
    """
    index, count = share
    order = sorted(range(len(sizes)), key=lambda number: (-sizes[number], number))
    dealt = len(order) - len(order) % count
    found = {order[first + (index if (first // count) % 2 == 0 else count - 1 - index)]: WHOLE
             for first in range(0, dealt, count)}  # fmt: skip
    found |= {number: share if divisible else WHOLE for place, number in enumerate(order[dealt:])
              if divisible or place == index}  # fmt: skip
    return dict(sorted(found.items()))


def is_packed(path: Path) -> bool:
    """Whether a file is compressed, which its first bytes show."""
    with path.open("rb") as file:
        begin = file.read(8)
    return any(begin.startswith(mark) for mark in (*PACKED, ZSTD))


def lines_of_share(path: Path, share: Share) -> tuple[int, int]:
    """The byte range of the lines of a file that belong to one share. The file is divided into equal parts, one for
    each share; a line belongs to a share if it begins in the share's part. Returns the first byte, and the byte after
    the last one.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        return tuple(_line_start(file, size * place // share[1]) for place in (share[0], share[0] + 1))  # type: ignore[return-value]


def _line_start(file: Any, place: int) -> int:
    """The first byte at or after `place` at which a line begins."""
    if place == 0:
        return 0
    file.seek(place - 1)
    while chunk := file.readline(2**20):
        if chunk.endswith(b"\n"):
            break
    return file.tell()


def count_lines(path: Path, before: int) -> int:
    """The number of lines that end before a byte of a file."""
    found = 0
    with path.open("rb") as file:
        while before > 0 and (chunk := file.read(min(before, 2**20))):
            found, before = found + chunk.count(b"\n"), before - len(chunk)
    return found


def open_unpacked(path: Path) -> Any:
    """Open a file for reading bytes, decompressed if it is compressed with gzip, zstd, bzip2 or xz.

    Raises OSError if the file cannot be opened. Reading a damaged file raises one of `UNPACKING_ERRORS`.
    """
    with path.open("rb") as file:
        begin = file.read(8)
    if begin.startswith(ZSTD):
        import pyarrow  # slow to import

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    for mark, opener in PACKED.items():
        if begin.startswith(mark):
            return opener(path, "rb")
    return path.open("rb")


UNPACKING_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)


def skip_bytes(file: Any, number: int) -> None:
    """Skip `number` bytes of a file from `open_unpacked` by reading them, because the file may not be seekable."""
    while number > 0 and (read := len(file.read(min(number, 2**20)))):
        number -= read


def decode(data: bytes, file: str, policy: BadRecordPolicy, line: int = 1) -> str:
    """Decode UTF-8 bytes that start at line `line` of a file. A UTF-8 byte order mark is removed.

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
