"""Repeats operations that failed because of the network or a busy server."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from data.errors import NetworkError

log = logging.getLogger(__name__)

T = TypeVar("T")
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # seconds between two tries, about two minutes together
LIBRARIES = {"aiohttp", "fsspec", "httpcore", "httpx", "requests", "urllib3"}
PASSING_STATUS = (408, 425, 429)  # HTTP status codes, besides those from 500 on, after which another try may succeed
PASSING_NAMES = ("Connect", "Timeout", "Network", "Protocol", "Read", "Payload", "ServerDisconnected", "ClientOSError")


def passes(error: BaseException) -> bool:
    """Whether an exception, or one that caused it, comes from the network or a busy server, so that another try may
    succeed.
    """
    chain = list(_causes(error))
    if any(type(one).__name__ == "OfflineModeIsEnabled" for one in chain):  # the user has switched the network off
        return False
    return any(_passes(one) for one in chain)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _passes(error: BaseException) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "status", None)
    if isinstance(status, int):
        return status in PASSING_STATUS or status >= 500
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    library, name = type(error).__module__.partition(".")[0], type(error).__name__
    return library in LIBRARIES and any(part in name for part in PASSING_NAMES)


class Tries:
    """Counts consecutive failures of an operation, and waits before the next try.

    where: the name of the data set, for messages. waits: seconds before the second, third, ... try.
    """

    def __init__(self, where: str, waits: tuple[float, ...] = WAITS):
        self.where, self.waits, self.failed = where, waits, 0

    def succeeded(self) -> None:
        self.failed = 0

    def wait(self, error: BaseException) -> None:
        """Wait before the next try. A random extra time of up to a quarter keeps the processes of a run from all trying
        again at the same moment.

        Raises `NetworkError` if this was the last try.
        """
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if self.failed == len(self.waits):
            detail = f"{self.failed + 1} tries failed, the last one with: {reason}"
            raise NetworkError(self.where, 0, "the network or the server does not answer", detail) from error
        seconds = self.waits[self.failed] * random.uniform(1, 1.25)
        self.failed += 1
        log.warning("%s: %s; trying again in %.0f s", self.where, reason, seconds)
        time.sleep(seconds)


def retried(action: Callable[[], T], where: str) -> T:
    """Call `action` until it succeeds, waiting longer after each failure for which `passes` is true; other exceptions
    are raised.

    Raises `NetworkError` if every try fails.
    """
    tries = Tries(where)
    while True:
        try:
            return action()
        except Exception as error:
            if not passes(error):
                raise
            tries.wait(error)
