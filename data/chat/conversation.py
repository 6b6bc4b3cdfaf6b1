"""A conversation that has been checked, and efforts by name and number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data.document import Part

EFFORTS = {"low": 50, "high": 75, "max": 100}
DEFAULT_EFFORT = "high"
EFFORT_LINE = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


@dataclass(frozen=True)
class Call:
    """A tool call: the id that its result names, the function, its arguments."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Message:
    """A turn or a system text. role: system, user (tool results included) or assistant."""

    role: str
    content: tuple[Part, ...]
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    taught: bool = False


@dataclass(frozen=True)
class Conversation:
    """A checked record. thinking None: what has reasoning is; effort 1..100; with_tools: all reasoning stays."""

    messages: tuple[Message, ...]
    thinking: bool | None
    effort: int
    with_tools: bool


def effort_budget(value: Any) -> int:
    """1..100 of an effort by name or number. Raises ValueError for anything else; a bool is no number."""
    if isinstance(value, str) and value in EFFORTS:
        return EFFORTS[value]
    if type(value) is int and 1 <= value <= 100:
        return value
    raise ValueError(f"effort={value!r}: must be one of {', '.join(EFFORTS)} or a whole number from 1 to 100")
