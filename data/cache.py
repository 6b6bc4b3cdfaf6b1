"""Cache files and folders that are written atomically (completely or not at all), by one process while the others
wait.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from data.errors import DataError, naming


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A context manager that holds the lock of a cache entry, so that one process creates the entry while others wait
    for it.

    Raises `DataError` if the lock file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(path.name + ".lock"))
        lock.acquire()
    except OSError as error:
        raise DataError(
            str(path.parent), 0, "cannot write the cache", f"{error.strerror}; set data.cache_dir"
        ) from None
    try:
        yield
    finally:
        lock.release()


def make_once(path: Path, make: Callable[[], None]) -> None:
    """Call `make`, which creates the cache entry `path`, if the entry does not exist. One process makes the entry while
    the others wait; a complete entry is not locked.

    Raises `DataError` if the lock file cannot be written.
    """
    if not path.exists():
        with locked(path):
            if not path.exists():
                make()


def cached_text(path: Path, make: Callable[[], str]) -> str:
    """The text of a small cache file, which `make` returns if the file does not exist.

    Raises `DataError` if the file cannot be written.
    """

    def write() -> None:
        text = make()
        with atomic_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")

    make_once(path, write)
    return path.read_text(encoding="utf-8")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A context manager that yields a temporary path beside `path`, and renames that file to `path` on success or
    removes it on failure.

    The caller must hold the lock of `path`. The name of the temporary file is fixed, so a killed process leaves at most
    one such file behind, and the next process overwrites it.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with naming(path):
            yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Like `atomic_file`, but for a folder. `path` must not exist yet."""
    temporary = path.with_name(path.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with naming(path):
            yield temporary
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
