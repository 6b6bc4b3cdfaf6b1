"""Conversations whose records have been validated, and reasoning efforts given by name or number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data.document import Part

EFFORTS = {"low": 50, "high": 75, "max": 100}
DEFAULT_EFFORT = "high"
EFFORT_LINE = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


@dataclass(frozen=True)
class ToolCall:
    """A tool call: its id (to which the tool result refers), the name of the function, and its arguments."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Message:
    """One message of a conversation, after the messages of a user turn have been merged.

    Attributes:
        role: "system", "user" (this includes the tool results of a user turn) or "assistant".
        content: the parts of the message: text, images and control tokens.
        reasoning, tool_calls: the reasoning and the tool calls of an assistant message.
        supervised: whether an assistant message may be trained on.
    """

    role: str
    content: tuple[Part, ...]
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    supervised: bool = False


@dataclass(frozen=True)
class Conversation:
    """A conversation whose record has been validated.

    Attributes:
        thinking: whether the answers are in thinking mode; None means that an answer is in thinking mode if it has
            reasoning.
        effort: the reasoning effort, from 1 to 100.
        with_tools: whether the conversation has tools, in which case the reasoning of all answers is kept.
    """

    messages: tuple[Message, ...]
    thinking: bool | None
    effort: int
    with_tools: bool


def effort_budget(value: Any) -> int:
    """The reasoning effort as a number from 1 to 100, for an effort given by name or number. Raises ValueError if the
    value is neither.
    """
    if isinstance(value, str) and value in EFFORTS:
        return EFFORTS[value]
    if type(value) is int and 1 <= value <= 100:
        return value
    raise ValueError(f"effort={value!r}: must be one of {', '.join(EFFORTS)} or a whole number from 1 to 100")
