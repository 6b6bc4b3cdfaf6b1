"""Cache entries that are written completely or not at all, by one process while the others wait."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from data.errors import DataError, naming


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a cache entry, so that one process makes the entry and the others then find it.

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


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` on success, remove it on failure.

    Call it while holding the lock of `path`: the temporary name is fixed, so a killed process leaves at most one such
    file behind, and the next process overwrites it.
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
    """The same for a folder. `path` must not exist yet."""
    temporary = path.with_name(path.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with naming(path):
            yield temporary
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
