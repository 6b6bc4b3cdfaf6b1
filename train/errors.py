"""Exceptions that end a run with a message for the user. Any other exception is a bug, shown with a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from data import DataError, NetworkError


class InputError(ValueError):
    """The user's input cannot be used; the message says which input, why, and what to do."""


REFUSED = (InputError, DataError, OSError)  # these end a command with a message, without a traceback


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn a ``ValueError`` into an ``InputError``, in code that builds objects from the user's input.

    Model, optimizer and tokenizer refuse wrong input with a plain ``ValueError``. Elsewhere, as in the training loop, a
    plain ``ValueError`` is an error in the code and keeps its traceback.
    """
    try:
        yield
    except REFUSED:
        raise
    except ValueError as error:
        raise InputError(str(error)) from error


class NonFiniteError(RuntimeError):
    """A loss or a gradient was NaN or infinite; the weights were not updated."""


class Interrupted(Exception):
    """The process was asked to stop; the run state is saved."""


UNREACHABLE = 5  # exit code of a process that could not read its data over the network
LOST = 4  # exit code of a process when another process of the same run is lost


class RankLost(RuntimeError):
    """Another process of the run did not start, ended or no longer answers; the message names it.

    reported: True if another process prints the message.
    """

    def __init__(self, text: str, reported: bool):
        super().__init__(text)
        self.reported = reported


# Exit codes of a process that an exception ends with a message; `train/__main__.py` lists what the codes mean.
EXIT_CODES: dict[type[Exception], int] = {
    NonFiniteError: 3,  # raised by a training step
    FloatingPointError: 3,  # raised by text generation
    Interrupted: 75,
    RankLost: LOST,
    NetworkError: UNREACHABLE,  # it is a DataError too, but the next start may succeed
    **dict.fromkeys(REFUSED, 2),
}


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends with ``error``."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
