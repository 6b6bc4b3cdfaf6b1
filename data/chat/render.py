"""Renders a conversation as documents in the V4.1 chat format (see data/chat/__init__.py); each part is marked as
supervised or not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from data.chat.conversation import EFFORT_LINE, Conversation, ToolCall
from data.document import Control, Document, Part
from data.tokenizer import ASSISTANT, EOS, SYSTEM, USER

# The control tokens that a tokenizer must have to encode the chat format.
REQUIRED_TOKENS = (USER, ASSISTANT, SYSTEM, "<think>", "</think>")
THINK, END_THINK = Control("<think>"), Control("</think>")
RESULT, END_RESULT = Control("<tool_result>"), Control("</tool_result>")
MARKUP = Control("｜DSML｜")
SEPARATOR = "\n\n"


def documents(conversation: Conversation, file: str, line: int, key: bytes | None = None) -> Iterator[Document]:
    """Render a conversation as training documents. Every supervised answer is supervised in exactly one of the
    documents.

    file, line: the file and line of the record. key: stored as `Document.record`, so that all documents of a
    conversation are on the same side of a training/held-out split.
    """
    messages = conversation.messages
    answers = [number for number, message in enumerate(messages) if message.supervised]
    thinking = conversation.thinking
    if thinking is None:
        thinking = any(message.reasoning for message in messages)
    cases = [(replace(conversation, thinking=thinking), set(answers))]
    if thinking and not conversation.with_tools:
        modes = [conversation.thinking or bool(messages[number].reasoning) for number in answers]
        ends = zip(answers, modes, strict=True)
        cases = [(replace(conversation, messages=messages[: end + 1], thinking=mode), {end}) for end, mode in ends]
    for case, supervised in cases:
        rendered = render(case, supervised)
        # The last EOS is left out here: the encoder adds EOS to every document, supervised if the part before it is.
        yield Document(tuple(rendered.parts[:-1]), file, line, tuple(rendered.supervised[:-1]), key)


@dataclass
class Rendered:
    """The parts of a document in reading order, and whether each part is supervised.

    All text between two control tokens is one part, because it is tokenised as a whole in training and in generation
    alike.
    """

    parts: list[Part] = field(default_factory=list)
    supervised: list[bool] = field(default_factory=list)

    def add(self, *parts: Part, supervised: bool = False) -> None:
        for part in parts:
            if isinstance(part, str) and self.parts and isinstance(self.parts[-1], str):
                assert self.supervised[-1] == supervised, "supervision begins and ends at control tokens"
                self.parts[-1] += part
            elif part != "":
                self.parts.append(part)
                self.supervised.append(supervised)


def render(conversation: Conversation, supervised: set[int]) -> Rendered:
    """Render a conversation as parts, without BOS. `supervised`: the indices of the supervised messages."""
    rendered, messages, thinking = Rendered(), conversation.messages, conversation.thinking
    last_turn = max(number for number, message in enumerate(messages) if message.role != "assistant")
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
            with_reasoning = thinking and (conversation.with_tools or number > last_turn)
            body = (message.reasoning, END_THINK) if with_reasoning else ()
            rendered.add(Control(ASSISTANT), THINK if with_reasoning else END_THINK)
            rendered.add(
                *body, *message.content, *_calls(message.tool_calls), Control(EOS), supervised=number in supervised
            )
    return rendered


def _calls(calls: tuple[ToolCall, ...]) -> Iterator[Part]:
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
    """The section of the system text that explains how to call tools and lists their schemas."""
    yield "## Tools\n\nThe functions below can be called. A call looks like this, with one parameter a line:\n\n<"
    yield from (MARKUP, " calls>\n<", MARKUP, ' invoke name="FUNCTION">\n<', MARKUP)
    yield from (' parameter name="PARAMETER" string="true|false">VALUE</', MARKUP, " parameter>\n</", MARKUP)
    yield from (" invoke>\n</", MARKUP, ' calls>\n\nA text is given as it is with string="true", any other value as ')
    yield 'JSON with string="false". One block may hold several calls.\n\n### Functions\n\n'
    yield "\n".join(to_json(tool) for tool in tools)


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
