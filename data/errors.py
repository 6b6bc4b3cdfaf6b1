"""Errors about bad input data, and the policy that decides whether bad records stop the run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class DataError(ValueError):
    """The error for input data that cannot become a document. The message is one line with file, line and reason.

    Attributes:
        file: the path of the file, or the name of the data set.
        line: number of the line or record, counted from 1; 0 means the whole file.
        reason: a short phrase, the same for every record with this problem, so that records can be counted by reason.
        detail: the details of this record's problem, and what to do about it.
    """

    def __init__(self, file: str, line: int, reason: str, detail: str = ""):
        self.file, self.line, self.reason, self.detail = file, line, reason, detail
        where = f"{file}:{line}" if line else file
        super().__init__(f"{where}: {reason}" + (f": {detail}" if detail else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled: rank 0 sends its errors to others
        return type(self), (self.file, self.line, self.reason, self.detail)


class NetworkError(DataError):
    """The error for data that could not be read over the network in several tries; a restart of the run may succeed."""


class BadRecordPolicy:
    """Handles bad records as `data.on_error` says: `stop` raises their `DataError`, `skip` leaves the records out.

    Skipped records are counted by reason, and the first record of each reason is logged. Problems that can be repaired,
    such as a byte order mark, are repaired under either policy, and are counted and logged in the same way.
    """

    def __init__(self, on_error: str):
        self.stop = on_error == "stop"
        self.skipped: Counter[str] = Counter()
        self.repaired: Counter[str] = Counter()
        self.formats: Counter[str] = Counter()  # number of records of each recognised format, see `data.format`
        self.unused: Counter[str] = Counter()  # for each unused key, the number of records that have it

    def report(self, error: DataError) -> None:
        """Raise the error under the policy `stop`; under `skip` count it and return, and the caller continues with the
        next record.
        """
        if self.stop:
            raise error
        self._count(self.skipped, "skipped", error)

    def repair(self, error: DataError) -> None:
        """Count and log a problem in the data that the caller has repaired."""
        self._count(self.repaired, "repaired", error)

    def _count(self, counter: Counter[str], action: str, error: DataError) -> None:
        if not counter[error.reason]:
            log.warning("%s %s (further records with this problem are counted but not logged)", action, error)
        counter[error.reason] += 1


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """A context manager for writing to an open file that adds the file's name to errors such as "No space left on
    device".
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
