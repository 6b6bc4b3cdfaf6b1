"""Conversation -> documents: parts in the V4.1 format (see the package's description) and which are supervised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from data.chat.conversation import EFFORT_LINE, Call, Conversation
from data.document import Control, Document, Part
from data.tokenizer import ASSISTANT, EOS, SYSTEM, USER

REQUIRED = (USER, ASSISTANT, SYSTEM, "<think>", "</think>")  # tokens that a tokenizer must have for conversations
THINK, END_THINK = Control("<think>"), Control("</think>")
RESULT, END_RESULT = Control("<tool_result>"), Control("</tool_result>")
MARKUP = Control("｜DSML｜")
SEPARATOR = "\n\n"


def documents(conversation: Conversation, file: str, line: int, key: bytes | None = None) -> Iterator[Document]:
    """What a conversation is trained as; every taught answer is taught in exactly one document.

    file, line, key: where the documents came from, and what keeps them on one side of a split (`Document.record`).
    """
    messages = conversation.messages
    taught = [number for number, message in enumerate(messages) if message.taught]
    thinking = conversation.thinking
    if thinking is None:
        thinking = any(message.reasoning for message in messages)
    cases = [(replace(conversation, thinking=thinking), set(taught))]
    if thinking and not conversation.with_tools:
        modes = [conversation.thinking or bool(messages[number].reasoning) for number in taught]
        ends = zip(taught, modes, strict=True)
        cases = [(replace(conversation, messages=messages[: end + 1], thinking=mode), {end}) for end, mode in ends]
    for case, answers in cases:
        rendered = render(case, answers)
        # An encoder closes a document by EOS itself; that one is taught with what stands before it.
        yield Document(tuple(rendered.parts[:-1]), file, line, tuple(rendered.taught[:-1]), key)


@dataclass
class Rendered:
    """Parts in reading order and whether each is taught.

    Text between two control tokens is one part: it must be tokenised as it is when a model reads or writes it.
    """

    parts: list[Part] = field(default_factory=list)
    taught: list[bool] = field(default_factory=list)

    def add(self, *parts: Part, taught: bool = False) -> None:
        for part in parts:
            if isinstance(part, str) and self.parts and isinstance(self.parts[-1], str):
                assert self.taught[-1] == taught, "a control token stands where supervision begins or ends"
                self.parts[-1] += part
            elif part != "":
                self.parts.append(part)
                self.taught.append(taught)


def render(conversation: Conversation, taught: set[int]) -> Rendered:
    """The parts of a conversation, without BOS; `taught` are the numbers of the messages to supervise."""
    rendered, messages, thinking = Rendered(), conversation.messages, conversation.thinking
    opened = max(number for number, message in enumerate(messages) if message.role != "assistant")
    if thinking or messages[0].role == "system":
        rendered.add(Control(SYSTEM))
    if thinking:
        rendered.add(EFFORT_LINE.format(conversation.effort))
    for number, message in enumerate(messages):
        if message.role == "system":
            rendered.add(*[Control(SYSTEM)] * (number > 0), *message.content)
        elif message.role == "user":
            rendered.add(Control(USER), *message.content)
        else:
            reasons = thinking and (conversation.with_tools or number > opened)
            body = (message.reasoning, END_THINK) if reasons else ()
            rendered.add(Control(ASSISTANT), THINK if reasons else END_THINK)
            rendered.add(*body, *message.content, *_calls(message.calls), Control(EOS), taught=number in taught)
    return rendered


def _calls(calls: tuple[Call, ...]) -> Iterator[Part]:
    if not calls:
        return
    yield from (SEPARATOR + "<", MARKUP, " calls>\n")
    for call in calls:
        yield from ("<", MARKUP, f' invoke name="{call.name}">\n')
        for number, (name, value) in enumerate(call.arguments.items()):
            is_text = isinstance(value, str)
            yield from ("\n" * (number > 0) + "<", MARKUP, f' parameter name="{name}" string="{to_json(is_text)}">')
            yield from (value if is_text else to_json(value), "</", MARKUP, " parameter>")
        yield from ("\n</", MARKUP, " invoke>\n")
    yield from ("</", MARKUP, " calls>")


def tool_list(tools: list[dict[str, Any]]) -> Iterator[Part]:
    """What the system text says about the tools: how to call them, then their schemas."""
    yield "## Tools\n\nThe functions below can be called. A call looks like this, with one parameter a line:\n\n<"
    yield from (MARKUP, " calls>\n<", MARKUP, ' invoke name="FUNCTION">\n<', MARKUP)
    yield from (' parameter name="PARAMETER" string="true|false">VALUE</', MARKUP, " parameter>\n</", MARKUP)
    yield from (" invoke>\n</", MARKUP, ' calls>\n\nA text is given as it is with string="true", any other value as ')
    yield 'JSON with string="false". One block may hold several calls.\n\n### Functions\n\n'
    yield "\n".join(to_json(tool) for tool in tools)


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
