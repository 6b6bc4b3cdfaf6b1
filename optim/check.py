"""How settings check themselves: every broken rule at once, each beginning with the name of its setting."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite


def require(what: str, rules: Iterable[tuple[bool, str]]) -> None:
    """Raise ValueError with the texts of all rules that do not hold, a line each below `what`."""
    problems = [text for holds, text in rules if not holds]
    if problems:
        raise ValueError(f"{what}:\n  " + "\n  ".join(problems))


def share(name: str, value: float) -> tuple[bool, str]:
    """The rule of a decay factor: in [0, 1)."""
    return 0 <= value < 1, f"{name}: must lie in [0, 1), got {value!r}"


def positive(name: str, value: float) -> tuple[bool, str]:
    """The rule of a divisor or a size: above 0 and finite."""
    return 0 < value and isfinite(value), f"{name}: must be above 0 and finite, got {value!r}"
