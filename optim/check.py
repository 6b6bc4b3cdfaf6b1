"""Validation of settings: all broken rules are reported in one error, each preceded by the name of its setting."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite


def require(what: str, rules: Iterable[tuple[bool, str]]) -> None:
    """Raise ValueError if a rule is broken. The message is `what`, followed by one line for each broken rule."""
    problems = [text for holds, text in rules if not holds]
    if problems:
        raise ValueError(f"{what}:\n  " + "\n  ".join(problems))


def share(name: str, value: float) -> tuple[bool, str]:
    """The rule that a decay factor is in [0, 1)."""
    return 0 <= value < 1, f"{name}: must lie in [0, 1), got {value!r}"


def positive(name: str, value: float) -> tuple[bool, str]:
    """The rule that a divisor or a size is above 0 and finite."""
    return 0 < value and isfinite(value), f"{name}: must be above 0 and finite, got {value!r}"
