"""The one way in which bad input is reported, and the policy that decides whether it stops the run."""

from __future__ import annotations

import logging
from collections import Counter

log = logging.getLogger(__name__)


class DataError(ValueError):
    """Input that cannot become a document: the message is one line naming file, line and reason.

    Attributes: file (path or data set name), line (1-based line or record; 0 for the file as a whole), reason (a short
    phrase that is the same for every record with this defect, so that it can be counted), detail (the rest).
    """

    def __init__(self, file: str, line: int, reason: str, detail: str = ""):
        self.file, self.line, self.reason, self.detail = file, line, reason, detail
        where = f"{file}:{line}" if line else file
        super().__init__(f"{where}: {reason}" + (f": {detail}" if detail else ""))


class Policy:
    """What happens to bad input: `stop` raises it, `skip` counts it by reason and logs its first occurrence.

    Input that is odd but readable, as a byte order mark, is repaired under either policy, counted and logged likewise.
    """

    def __init__(self, on_error: str):
        self.stop = on_error == "stop"
        self.skipped: Counter[str] = Counter()
        self.repaired: Counter[str] = Counter()

    def report(self, error: DataError) -> None:
        if self.stop:
            raise error
        self._count(self.skipped, "skipped", error)

    def repair(self, error: DataError) -> None:
        self._count(self.repaired, "repaired", error)

    def _count(self, counter: Counter[str], action: str, error: DataError) -> None:
        if not counter[error.reason]:
            log.warning("%s %s (further cases of this are only counted)", action, error)
        counter[error.reason] += 1
