"""How bad input is reported, and what decides whether it stops the run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


class DataError(ValueError):
    """Input that cannot become a document. The message is one line with file, line and reason.

    Attributes:
        file: path, or name of the data set.
        line: number of the line or record, from 1; 0 for the file as a whole.
        reason: a short phrase, the same for every record with this problem, so that records can be counted by reason.
        detail: what is specific to this record, and what to do.
    """

    def __init__(self, file: str, line: int, reason: str, detail: str = ""):
        self.file, self.line, self.reason, self.detail = file, line, reason, detail
        where = f"{file}:{line}" if line else file
        super().__init__(f"{where}: {reason}" + (f": {detail}" if detail else ""))


class BadRecordPolicy:
    """What to do about a bad record (`data.on_error`): `stop` raises its `DataError`, `skip` leaves the record out.

    Skipped records are counted by reason, and the first of each reason is logged. Input that can be repaired, such as a
    byte order mark, is repaired under either policy, and counted and logged in the same way.
    """

    def __init__(self, on_error: str):
        self.stop = on_error == "stop"
        self.skipped: Counter[str] = Counter()
        self.repaired: Counter[str] = Counter()
        self.formats: Counter[str] = Counter()  # records by the shape they were recognised as, see `data.format`
        self.unused: Counter[str] = Counter()  # keys of records that nothing is taken from

    def report(self, error: DataError) -> None:
        """Raise the error or count it. After a return the caller goes on with the next record."""
        if self.stop:
            raise error
        self._count(self.skipped, "skipped", error)

    def repair(self, error: DataError) -> None:
        """Count a problem that the caller has repaired."""
        self._count(self.repaired, "repaired", error)

    def _count(self, counter: Counter[str], action: str, error: DataError) -> None:
        if not counter[error.reason]:
            log.warning("%s %s (more of the same are only counted)", action, error)
        counter[error.reason] += 1


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Around writing to an open file, whose errors do not say which one it is: "No space left on device" alone."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
