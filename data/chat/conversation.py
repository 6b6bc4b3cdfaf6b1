"""Conversations that have been checked, and reasoning efforts by name and number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data.document import Part

EFFORTS = {"low": 50, "high": 75, "max": 100}
DEFAULT_EFFORT = "high"
EFFORT_LINE = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


@dataclass(frozen=True)
class ToolCall:
    """A tool call: its id, which the result refers to, the name of the function, and its arguments."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Message:
    """A turn of a conversation.

    Attributes:
        role: "system", "user" (this includes the tool results of a user turn) or "assistant".
        content: text, images and control tokens.
        reasoning, tool_calls: of an assistant message.
        supervised: whether an assistant message may be trained on.
    """

    role: str
    content: tuple[Part, ...]
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    supervised: bool = False


@dataclass(frozen=True)
class Conversation:
    """A checked record.

    Attributes:
        thinking: whether its answers are in thinking mode; None: the answers that have reasoning are.
        effort: 1 to 100.
        with_tools: whether it has tools, so that the reasoning of all answers is kept.
    """

    messages: tuple[Message, ...]
    thinking: bool | None
    effort: int
    with_tools: bool


def effort_budget(value: Any) -> int:
    """The number, 1 to 100, of an effort given by name or number. Raises ValueError for any other value."""
    if isinstance(value, str) and value in EFFORTS:
        return EFFORTS[value]
    if type(value) is int and 1 <= value <= 100:
        return value
    raise ValueError(f"effort={value!r}: must be one of {', '.join(EFFORTS)} or a whole number from 1 to 100")
