"""Conversations: JSONL in the OpenAI `messages` shape -> documents in the V4.1 format, with only assistant text taught.

The format (V4.1 report, arXiv 2609.19969, post-training; released encoder), control tokens in brackets:

    [BOS][System]Reasoning Effort: 75 (...)\\n\\n<system text>
    [User]<user text>[Assistant][<think>]<reasoning>[</think>]<answer>[EOS]

The effort line is there in thinking mode only, and then [System] is too, system text or not. In chat mode, and in
turns whose reasoning is dropped, a turn is [Assistant][</think>]<answer>[EOS]. Reasoning before the last user turn is
dropped unless the conversation has tools: since an answer has its reasoning only while it is the last, such a record
becomes one document for each answer, and each teaches that answer alone. Taught are reasoning, `</think>` behind it,
answer, tool calls and EOS; never the header, system, user or tool text.

A record: `messages`, and optionally `tools`, `effort` and `thinking`. Without `thinking`, an answer is in thinking mode
if it has reasoning; with tools, all are if any has.
Message: `role` (system or developer, user, assistant, tool), `content` (text, or a list of text parts and, from users,
image parts), `reasoning_content`, `tool_calls`, `tool_call_id`, `weight` (0: an assistant message not to be taught).

Our choices, where the report is silent; the first four follow the released encoder:
- messages and tool results of one user turn, and the parts of a message, are joined by a blank line;
- a system message inside a conversation opens a turn as a user message does;
- tool calls follow the answer after a blank line as `<[｜DSML｜] calls>`, in it `<[｜DSML｜] invoke name="...">` and
  `<[｜DSML｜] parameter name="..." string="true|false">`: strings as they are, all else as JSON;
- tools stand at the end of the system text, one function schema in JSON a line; the words around them are ours;
- a conversation has tools if a record or system message lists some or an assistant calls one.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data.errors import DataError, Policy
from data.sources import Control, Document, JsonLines, Part, Picture, encodable, value_of
from data.tokenizer import ASSISTANT, EOS, SYSTEM, USER, special_ids
from data.tokens import control_ids

FORMAT = 1  # raise when the same record becomes other parts
EFFORTS = {"low": 50, "high": 75, "max": 100}
DEFAULT_EFFORT = "high"
EFFORT_LINE = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
REQUIRED = (USER, ASSISTANT, SYSTEM, "<think>", "</think>")  # tokens that a tokenizer must have for conversations

THINK, END_THINK = Control("<think>"), Control("</think>")
RESULT, END_RESULT = Control("<tool_result>"), Control("</tool_result>")
MARKUP = Control("｜DSML｜")
SEPARATOR = "\n\n"


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

    def documents(self, file: str, line: int, key: bytes | None = None) -> Iterator[Document]:
        """What this conversation is trained as; every taught answer is taught in exactly one document."""
        messages, taught = self.messages, [number for number, message in enumerate(self.messages) if message.taught]
        thinking = any(message.reasoning for message in messages) if self.thinking is None else self.thinking
        cases = [(replace(self, thinking=thinking), set(taught))]
        if thinking and not self.with_tools:
            modes = [self.thinking or bool(messages[number].reasoning) for number in taught]
            ends = zip(taught, modes, strict=True)
            cases = [(replace(self, messages=messages[: end + 1], thinking=mode), {end}) for end, mode in ends]
        for conversation, answers in cases:
            text = _render(conversation, answers)
            # An encoder closes a document by EOS itself; that one is taught with what stands before it.
            yield Document(tuple(text.parts[:-1]), file, line, tuple(text.taught[:-1]), key)


class ChatLines(JsonLines):
    """One conversation a line; see the module's description."""

    def identity(self, content: bool = True) -> str:
        return f"{super().identity(content)} {FORMAT}"

    def _documents(self, raw: bytes, path: Path, line: int, policy: Policy) -> Sequence[Document]:
        record = self._record(raw, path, line, policy)
        conversation = read_conversation(record, str(path), line, self.field)
        # Copies of a conversation, and all documents of one, stay on one side of a split.
        key = json.dumps(record[self.field], sort_keys=True).encode()
        return list(conversation.documents(str(path), line, key))


def effort_budget(value: Any) -> int:
    """1..100 of an effort by name or number. Raises ValueError for anything else; a bool is no number."""
    if isinstance(value, str) and value in EFFORTS:
        return EFFORTS[value]
    if type(value) is int and 1 <= value <= 100:
        return value
    raise ValueError(f"effort={value!r}: must be one of {', '.join(EFFORTS)} or a whole number from 1 to 100")


def prompt_ids(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    thinking: bool = False,
    effort: str | int = DEFAULT_EFFORT,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """Token ids of a conversation of text up to where the next answer begins, its header included.

    Raises `DataError` for malformed messages.
    """
    record = {"messages": messages, "thinking": thinking, "effort": effort, "tools": tools}
    text = _render(read_conversation(record, "messages", 0, answered=False), set())
    ids = [bos] if (bos := special_ids(tokenizer).bos) is not None else []
    for part in (*text.parts, Control(ASSISTANT), THINK if thinking else END_THINK):
        if isinstance(part, Picture):
            raise DataError("messages", 0, "image in a text prompt", part.key)
        if isinstance(part, Control):
            ids += control_ids(tokenizer, part)
        else:
            ids += tokenizer.encode(part, add_special_tokens=False).ids
    return ids


# Conversation -> parts


@dataclass
class _Text:
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


def _render(conversation: Conversation, taught: set[int]) -> _Text:
    """The parts of a conversation, without BOS; `taught` are the numbers of the messages to supervise."""
    text, messages, thinking = _Text(), conversation.messages, conversation.thinking
    opened = max(number for number, message in enumerate(messages) if message.role != "assistant")
    if thinking or messages[0].role == "system":
        text.add(Control(SYSTEM))
    if thinking:
        text.add(EFFORT_LINE.format(conversation.effort))
    for number, message in enumerate(messages):
        if message.role == "system":
            text.add(*[Control(SYSTEM)] * (number > 0), *message.content)
        elif message.role == "user":
            text.add(Control(USER), *message.content)
        else:
            reasons = thinking and (conversation.with_tools or number > opened)
            body = (message.reasoning, END_THINK) if reasons else ()
            text.add(Control(ASSISTANT), THINK if reasons else END_THINK)
            text.add(*body, *message.content, *_calls(message.calls), Control(EOS), taught=number in taught)
    return text


def _calls(calls: tuple[Call, ...]) -> Iterator[Part]:
    if not calls:
        return
    yield from (SEPARATOR + "<", MARKUP, " calls>\n")
    for call in calls:
        yield from ("<", MARKUP, f' invoke name="{call.name}">\n')
        for number, (name, value) in enumerate(call.arguments.items()):
            is_text = isinstance(value, str)
            yield from ("\n" * (number > 0) + "<", MARKUP, f' parameter name="{name}" string="{_json(is_text)}">')
            yield from (value if is_text else _json(value), "</", MARKUP, " parameter>")
        yield from ("\n</", MARKUP, " invoke>\n")
    yield from ("</", MARKUP, " calls>")


def _tool_list(tools: list[dict[str, Any]]) -> Iterator[Part]:
    """What the system text says about the tools: how to call them, then their schemas."""
    yield "## Tools\n\nThe functions below can be called. A call looks like this, with one parameter a line:\n\n<"
    yield from (MARKUP, " calls>\n<", MARKUP, ' invoke name="FUNCTION">\n<', MARKUP)
    yield from (' parameter name="PARAMETER" string="true|false">VALUE</', MARKUP, " parameter>\n</", MARKUP)
    yield from (" invoke>\n</", MARKUP, ' calls>\n\nA text is given as it is with string="true", any other value as ')
    yield 'JSON with string="false". One block may hold several calls.\n\n### Functions\n\n'
    yield "\n".join(_json(tool) for tool in tools)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# Record -> conversation


def read_conversation(
    record: Any, file: str, line: int, field: str = "messages", answered: bool = True
) -> Conversation:
    """Check a record. `answered`: it is for training, so it must end with an answer and teach something.

    Image paths are relative to the folder of `file`. Raises `DataError`.
    """
    items = value_of(record, field, file, line)
    return _Reader(file, line).conversation(record, items, answered)


@dataclass(frozen=True)
class _Reader:
    """Reads one record; what it raises names the file and line."""

    file: str
    line: int

    def bad(self, reason: str, detail: str = "") -> DataError:
        return DataError(self.file, self.line, reason, detail)

    def conversation(self, record: Mapping[str, Any], items: Any, answered: bool) -> Conversation:
        if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
            raise self.bad("messages are no list of objects", 'each must look like {"role": ..., "content": ...}')
        try:
            effort = effort_budget(DEFAULT_EFFORT if record.get("effort") is None else record["effort"])
        except ValueError as error:
            raise self.bad("wrong effort", str(error)) from None
        items = self._with_tools(items, record.get("tools"))
        messages = self._turns(items)
        self._check_order(messages, answered)
        thinking = record.get("thinking")
        if not isinstance(thinking, bool | None):
            raise self.bad("wrong thinking", f"thinking={thinking!r}: must be true or false")
        with_tools = any(item.get("tools") or item.get("tool_calls") for item in items)
        return Conversation(tuple(messages), thinking, effort, with_tools)

    def _with_tools(self, items: list[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
        """The record's own tools belong to its first system message, which is made if it is not there."""
        if not tools:
            return items
        if any(item.get("tools") for item in items):
            raise self.bad("wrong tools", "both the record and a message list tools; keep one list")
        place = next((n for n, item in enumerate(items) if item.get("role") in ("system", "developer")), None)
        if place is None:
            return [{"role": "system", "content": "", "tools": tools}, *items]
        return [*items[:place], {**items[place], "tools": tools}, *items[place + 1 :]]

    def _turns(self, items: list[dict[str, Any]]) -> list[Message]:
        messages: list[Message] = []
        calls: tuple[Call, ...] = ()  # of the last answer, as long as results may follow
        blocks: list[tuple[str | None, tuple[Part, ...]]] = []  # of the open user turn: (call id of a result, parts)

        def close() -> None:
            nonlocal calls
            self._check_results(calls, [call for call, _ in blocks if call is not None])
            if blocks:
                messages.append(Message("user", _joined(_in_call_order(blocks, calls))))
            calls = ()
            blocks.clear()

        for number, item in enumerate(items, 1):
            role = item.get("role")
            if item.get("tools") and role not in ("system", "developer"):
                raise self.bad("wrong tools", f"message {number} ({role}) lists tools; only a system message may")
            if role == "user":
                content = self._content(item, number, images=True)
                if not any(not isinstance(part, str) or part.strip() for part in content):
                    raise self.bad("empty message", f"message {number} (user)")
                blocks.append((None, content))
            elif role == "tool":
                result = self._content(item, number)
                blocks.append((self._name(item, "tool_call_id", number), (RESULT, *result, END_RESULT)))
            elif role in ("system", "developer"):
                close()
                content = self._content(item, number)
                if tools := item.get("tools"):
                    content = (*content, SEPARATOR, *_tool_list(self._tools(tools)))
                messages.append(Message("system", content))
            elif role == "assistant":
                close()
                messages.append(self._answer(item, number))
                calls = messages[-1].calls
            else:
                allowed = "system, developer, user, assistant, tool"
                raise self.bad("unknown role", f"message {number} has role {role!r}; allowed are {allowed}")
        if blocks:
            close()  # calls that nothing follows are what the last answer teaches
        return messages

    def _answer(self, item: dict[str, Any], number: int) -> Message:
        if item.get("function_call"):
            raise self.bad("wrong tool call", f"message {number} uses function_call; write it as tool_calls")
        if item.get("reasoning"):
            raise self.bad("wrong reasoning", f"message {number} uses reasoning; write it as reasoning_content")
        reasoning = item.get("reasoning_content")
        if reasoning is not None and not isinstance(reasoning, str):
            raise self.bad("wrong reasoning", f"message {number}: reasoning_content must be text")
        weight = item.get("weight", 1)
        if isinstance(weight, bool) or weight not in (0, 1):
            raise self.bad("wrong weight", f"message {number}: weight={weight!r} must be 0 or 1")
        calls = item.get("tool_calls") or []
        if not isinstance(calls, list):
            raise self.bad("wrong tool call", f"message {number}: tool_calls must be a list")
        calls = tuple(self._call(call, number) for call in calls)
        if len({call.id for call in calls}) < len(calls):
            raise self.bad("wrong tool call", f"message {number}: two calls have the same id")
        content = () if calls and item.get("content") is None else self._content(item, number)
        if not calls and not "".join(content).strip():
            raise self.bad("empty message", f"message {number} (assistant) has neither text nor tool calls")
        reasoning = encodable(reasoning or "", self.file, self.line)
        return Message("assistant", content, reasoning, calls, weight == 1)

    def _call(self, call: Any, number: int) -> Call:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            shape = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
            raise self.bad("wrong tool call", f"message {number}: a call must look like {shape}")
        arguments = function.get("arguments")
        try:
            for _ in range(2):  # as an object, as JSON, and as JSON inside a JSON string: all are met in data
                if isinstance(arguments, str):
                    arguments = json.loads(arguments) if arguments.strip() else {}
        except (json.JSONDecodeError, RecursionError) as error:
            raise self.bad("wrong tool arguments", f"message {number}: invalid JSON: {error}") from None
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise self.bad("wrong tool arguments", f"message {number}: must be an object, is {arguments!r:.80}")
        name = self._name(function, "name", number)
        if quoted := [text for text in (name, *arguments) if '"' in text]:
            raise self.bad("wrong tool call", f"message {number}: the name {quoted[0]!r} has a quotation mark")
        for text in (name, *arguments, *(value for value in arguments.values() if isinstance(value, str))):
            encodable(text, self.file, self.line)
        encodable(_json(arguments), self.file, self.line)
        return Call(self._name(call, "id", number), name, arguments)

    def _tools(self, tools: Any) -> list[dict[str, Any]]:
        """The function schemas of tools in the OpenAI shape."""
        if not isinstance(tools, list):
            raise self.bad("wrong tools", "tools must be a list")
        functions = [tool.get("function") if isinstance(tool, dict) else None for tool in tools]
        for function in functions:
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                shape = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
                raise self.bad("wrong tools", f"a tool must look like {shape}")
            encodable(_json(function), self.file, self.line)
        return functions

    def _check_results(self, calls: tuple[Call, ...], results: list[str]) -> None:
        known = [call.id for call in calls]
        for result in results:
            if result not in known:
                raise self.bad("tool result without call", f"the last answer made no call {result!r}")
        if sorted(known) != sorted(results):
            wrong = next(call for call in known if results.count(call) != 1)
            count = results.count(wrong)
            raise self.bad("tool call without its result", f"call {wrong!r} has {count} results, it needs one")

    def _check_order(self, messages: list[Message], answered: bool) -> None:
        roles = [message.role for message in messages]
        if answered and not any(message.taught for message in messages):
            raise self.bad("no supervised token", "no assistant message is there to be taught")
        if roles[0] == "assistant" or roles[:2] == ["system", "assistant"]:
            raise self.bad("wrong order of messages", "an assistant message comes before any user message")
        if any(pair == ("assistant", "assistant") for pair in zip(roles, roles[1:], strict=False)):
            raise self.bad("wrong order of messages", "two assistant messages follow each other; join them")
        if answered and roles[-1] != "assistant":
            raise self.bad("wrong order of messages", f"the last message is {roles[-1]}, it must be an answer")
        if not answered and (roles[-1] == "assistant" or roles == ["system"]):
            raise self.bad("wrong order of messages", "a prompt must end with a user message or tool results")

    def _name(self, item: dict[str, Any], key: str, number: int) -> str:
        value = item.get(key)
        if not isinstance(value, str) or not value:
            raise self.bad("wrong tool call", f"message {number}: {key} must be a text, is {value!r}")
        return value

    def _content(self, item: dict[str, Any], number: int, images: bool = False) -> tuple[Part, ...]:
        """The parts of a message's content, joined by blank lines."""
        content, role = item.get("content"), item.get("role")
        if isinstance(content, str):
            return (encodable(content, self.file, self.line),)
        if not isinstance(content, list):
            raise self.bad("wrong content", f"message {number} ({role}): must be text or a list of parts")
        blocks: list[tuple[None, tuple[Part, ...]]] = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                blocks.append((None, (encodable(part["text"], self.file, self.line),)))
            elif kind in ("image", "image_url") and images:
                blocks.append((None, (self._image(part[kind] if kind in part else part, number),)))
            elif kind in ("image", "image_url"):
                raise self.bad("wrong content", f"message {number}: images are for user messages, not for {role}")
            else:
                detail = f"message {number}: a part must have type text (and text), image or image_url"
                raise self.bad("wrong content", detail)
        return _joined(blocks)

    def _image(self, value: Any, number: int) -> Picture:
        """An image given as path, data: address, base64 or bytes: {"path"|"url"|"base64"|"bytes": ...} or the value."""
        from data.images import open_picture  # Pillow: needed by conversations with images only

        kind = "path"
        if isinstance(value, dict):
            kind = next((k for k in ("bytes", "base64", "path", "url") if value.get(k) is not None), "")
            value = value.get(kind)
        if isinstance(value, str) and value.startswith("data:"):
            kind, value = "base64", value.partition(",")[2]
        if isinstance(value, str) and kind in ("base64", "bytes"):
            try:
                value = base64.b64decode(value, validate=True)
            except ValueError as error:  # binascii.Error is one
                raise self.bad("corrupt image", f"message {number}: invalid base64: {error}") from None
        if isinstance(value, bytes):
            return open_picture(value, self.file, self.line)
        if not isinstance(value, str):
            raise self.bad("wrong content", f"message {number}: an image is a path, a data: address, base64 or bytes")
        if "://" in value:
            raise self.bad("image is not on this machine", f"message {number}: {value:.80}; give a path or base64")
        return open_picture(Path(self.file).parent / value, self.file, self.line)


def _in_call_order(
    blocks: list[tuple[str | None, tuple[Part, ...]]], calls: tuple[Call, ...]
) -> list[tuple[str | None, tuple[Part, ...]]]:
    """The blocks of a user turn with tool results in the order of their calls, whatever order they came in."""
    order = {call.id: number for number, call in enumerate(calls)}
    results = iter(sorted((block for block in blocks if block[0] is not None), key=lambda block: order[block[0]]))
    return [block if block[0] is None else next(results) for block in blocks]


def _joined(blocks: Iterable[tuple[Any, tuple[Part, ...]]]) -> tuple[Part, ...]:
    joined: list[Part] = []
    for _, parts in blocks:
        joined += [SEPARATOR, *parts] if joined else parts
    return tuple(joined)
