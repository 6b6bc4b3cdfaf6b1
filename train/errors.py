"""How a run can end early: errors that a user can fix, as opposed to our own mistakes, which keep their traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from data import DataError


class InputError(ValueError):
    """Input cannot be used; the message says what, why, and what to do."""


REFUSED = (InputError, DataError, OSError)  # end a command with a message


@contextmanager
def user_errors() -> Iterator[None]:
    """Wraps code that builds objects from the user's input: model, optimizer and tokenizer refuse it by a plain
    ``ValueError``.

    Elsewhere, as in the training loop, a plain ``ValueError`` is a mistake in the code.
    """
    try:
        yield
    except REFUSED:
        raise
    except ValueError as error:
        raise InputError(str(error)) from error


class NonFiniteError(RuntimeError):
    """A loss or gradient was NaN or infinite; the step was not applied."""


class Interrupted(Exception):
    """The process was asked to stop; the run state is saved."""


LOST = 4  # exit code of a process whose run has lost another


class RankLost(RuntimeError):
    """Another process of the run did not start, ended or no longer answers; the message names it.

    reported: another process prints it.
    """

    def __init__(self, text: str, reported: bool):
        super().__init__(text)
        self.reported = reported
