"""Turns a record in the OpenAI `messages` format into a validated conversation. Other frameworks have keys that select
which messages are trained on: each such key is either applied here or rejected with an error that names the key.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.chat.conversation import DEFAULT_EFFORT, Conversation, Message, ToolCall, effort_budget
from data.chat.render import END_RESULT, RESULT, SEPARATOR, to_json, tool_list
from data.document import Part, Picture, encodable, kind_of, value_of
from data.errors import DataError

# The keys of a record and of a message that this file reads.
RECORD_KEYS = {"tools", "effort", "thinking", "system", "images", "image", "chat_template_kwargs", "label", "kto_tag"}
MESSAGE_KEYS = {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "tools", "name"}
# The keys of a message that say whether an answer is supervised, in the formats of OpenAI, ms-swift and axolotl.
WEIGHTS = ("weight", "loss", "train", "training", "train_on_turn")
# Keys of a record that change what other frameworks train on, and that are not supported here.
REFUSED_OF_RECORD = {
    "videos": "the model reads only text and images",
    "video": "the model reads only text and images",
    "audios": "the model reads only text and images",
    "audio": "the model reads only text and images",
    "objects": "bounding boxes are not rendered; write their coordinates into the text of a message",
    "functions": "use tools instead",
    "function_call": "use tool_calls of a message instead",
    "documents": "write the documents into a message",
    "loss_scale": "the weight of an answer can only be 0 or 1; give messages a weight instead",
    "loss_weight": "all records have the same weight",
    "sample_weight": "all records have the same weight",
    "weight": "all records have the same weight; give messages a weight instead",
    "mask": "give messages a weight instead",
    "train_on_inputs": "only answers can be supervised",
    "segments": "use messages with a weight instead",
    "chat_template": "only the model's own chat format is supported",
}
REFUSED_OF_MESSAGE = {
    "training_detail": "an answer is supervised as a whole or not at all; use weight instead",
    "train_detail": "an answer is supervised as a whole or not at all; use weight instead",
    "loss_scale": "the weight of an answer can only be 0 or 1; use weight instead",
    "prefix": "an answer cannot be the beginning of a longer one",
    "thinking": "use reasoning_content instead",
    "reasoning_details": "use reasoning_content instead",
    "refusal": "use content instead",
    "audio": "the model reads only text and images",
    "images": "write images as parts of content",
}
IMAGE_MARK = "<image>"  # in a user's text, this marks where the next image of the record belongs


def read_conversation(
    record: Any, file: str, line: int, field: str = "messages", for_training: bool = True
) -> Conversation:
    """Validate a record and return its conversation. Raises `DataError` with `file` and `line` if the record is
    malformed.

    for_training: if True, the record must end with an answer, and at least one answer must be supervised. If False, the
    record is a prompt and must not end with an answer. Image paths are relative to the folder of `file`.
    """
    items = value_of(record, field, file, line)
    return _Reader(file, line).conversation(record, items, for_training)


@dataclass(frozen=True)
class _Reader:
    """Reads one record; its errors name the file and line of the record."""

    file: str
    line: int

    def bad(self, reason: str, detail: str = "") -> DataError:
        return DataError(self.file, self.line, reason, detail)

    def conversation(self, record: Mapping[str, Any], items: Any, for_training: bool) -> Conversation:
        if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
            raise self.bad(
                "messages is not a list of objects", 'each message must look like {"role": ..., "content": ...}'
            )
        record = self._with_template_options(record)
        try:
            effort = effort_budget(DEFAULT_EFFORT if record.get("effort") is None else record["effort"])
        except ValueError as error:
            raise self.bad("wrong effort", str(error)) from None
        self._refuse(record, REFUSED_OF_RECORD, "")
        if record.get("label") is False or record.get("kto_tag") is False:
            raise self.bad("undesired answer", "the record marks its answer as undesired, so it must not be trained on")
        for number, item in enumerate(items, 1):
            self._refuse(item, REFUSED_OF_MESSAGE, f"message {number}: ")
        items = self._with_images(self._with_system(items, record.get("system")), record)
        items = _with_call_ids(self._with_tools(items, self._tool_list(record.get("tools"))))
        messages = self._turns(items)
        self._check_order(messages, for_training)
        thinking = record.get("thinking")
        if not isinstance(thinking, bool | None):
            raise self.bad("wrong thinking", f"thinking={thinking!r}: must be true or false")
        with_tools = any(item.get("tools") or item.get("tool_calls") for item in items)
        return Conversation(tuple(messages), thinking, effort, with_tools)

    def _refuse(self, given: Mapping[str, Any], keys: Mapping[str, str], where: str) -> None:
        for key in keys.keys() & given.keys():
            value = given[key]
            if value is None or value is False or value in ("", [], {}) or (key == "weight" and value == 1):
                continue
            raise self.bad(f"unsupported key {key}", f"{where}{key} = {value!r:.60}; {keys[key]}")

    def _with_template_options(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """The record with `thinking` and `effort` copied from its `chat_template_kwargs`."""
        options = record.get("chat_template_kwargs")
        if not options:
            return record
        names = {
            "enable_thinking": "thinking",
            "thinking": "thinking",
            "reasoning_effort": "effort",
            "effort": "effort",
        }
        if not isinstance(options, dict) or (unknown := options.keys() - names.keys()):
            known = ", ".join(sorted(names))
            given = sorted(unknown) if isinstance(options, dict) else options
            raise self.bad("unsupported key chat_template_kwargs", f"{given!r:.60}; known are {known}")
        return {**record, **{names[key]: value for key, value in options.items() if value is not None}}

    def _with_system(self, items: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
        """The messages, preceded by the system text of the record."""
        if system is None or system == "":
            return items
        if not isinstance(system, str):
            raise self.bad("wrong system", f"the record's system must be text, not {kind_of(system)}")
        if items[0].get("role") in ("system", "developer"):
            raise self.bad("wrong system", "both the record and a message have a system text; keep only one of them")
        return [{"role": "system", "content": system}, *items]

    def _with_images(self, items: list[dict[str, Any]], record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The messages with the record's images inserted: each image replaces an <image> mark in a user's text or a
        part {"type": "image"}. If the messages contain no such mark or part, the images are placed before the first
        user text.
        """
        images = record.get("images")
        if not images and record.get("image") is not None:
            images = [record["image"]] if not isinstance(record["image"], list) else record["image"]
        if not images:
            return items
        if not isinstance(images, list):
            raise self.bad("wrong images", "the record's images must be a list")
        waiting, marks = list(images), 0
        made = []
        for item in items:
            content = item.get("content")
            if item.get("role") == "user" and isinstance(content, str | list):
                parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
                parts, used = _place_images(parts, waiting)
                marks += used
                item = {**item, "content": parts} if used else item
            made.append(item)
        first = next((number for number, item in enumerate(made) if item.get("role") == "user"), None)
        if not marks and first is not None and isinstance(made[first].get("content"), str | list):
            content = made[first]["content"]
            content = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
            parts = [*({"type": "image", "image": image} for image in images), *content]
            made[first] = {**made[first], "content": parts}
        elif marks != len(images):
            detail = f"{len(images)} images for {marks} marks {IMAGE_MARK} in the texts of user messages"
            raise self.bad("wrong images", detail)
        return made

    def _tool_list(self, tools: Any) -> Any:
        """The tools of the record, parsed if they are given as a JSON string."""
        if not isinstance(tools, str) or not tools.strip():
            return tools or None
        try:
            return json.loads(tools)
        except ValueError:
            return tools

    def _with_tools(self, items: list[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
        """The messages with the tools of the record moved into the first system message; if there is no system message,
        one is added.
        """
        if not tools:
            return items
        if any(item.get("tools") for item in items):
            raise self.bad("wrong tools", "both the record and a message list tools; keep only one of the lists")
        place = next((n for n, item in enumerate(items) if item.get("role") in ("system", "developer")), None)
        if place is None:
            return [{"role": "system", "content": "", "tools": tools}, *items]
        return [*items[:place], {**items[place], "tools": tools}, *items[place + 1 :]]

    def _turns(self, items: list[dict[str, Any]]) -> list[Message]:
        """The messages of the record; the messages of each user turn, including tool results, are merged into one
        message.
        """
        messages: list[Message] = []
        calls: tuple[ToolCall, ...] = ()  # calls of the last answer, whose results may follow
        blocks: list[tuple[str | None, tuple[Part, ...]]] = []  # this user turn: (call id of a tool result, parts)

        def close_turn() -> None:
            nonlocal calls
            self._check_results(calls, [call for call, _ in blocks if call is not None])
            if blocks:
                messages.append(Message("user", _joined(_in_call_order(blocks, calls))))
            calls = ()
            blocks.clear()

        for number, item in enumerate(items, 1):
            role = item.get("role")
            taught = [key for key in WEIGHTS if item.get(key) not in (None, 0)]
            if taught and role != "assistant":
                detail = f"message {number} ({role}): {taught[0]}={item[taught[0]]!r}; only answers can be supervised"
                raise self.bad("wrong weight", detail)
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
                close_turn()
                content = self._content(item, number)
                if tools := item.get("tools"):
                    content = (*content, SEPARATOR, *tool_list(self._tools(tools)))
                messages.append(Message("system", content))
            elif role == "assistant":
                close_turn()
                messages.append(self._answer(item, number))
                calls = messages[-1].tool_calls
            else:
                allowed = "system, developer, user, assistant, tool"
                raise self.bad("unknown role", f"message {number} has role {role!r}; allowed are {allowed}")
        if blocks:
            close_turn()  # not after a final answer: its tool calls have no results yet
        return messages

    def _answer(self, item: dict[str, Any], number: int) -> Message:
        if item.get("function_call"):
            raise self.bad("wrong tool call", f"message {number} uses function_call; use tool_calls instead")
        if item.get("reasoning"):
            raise self.bad("wrong reasoning", f"message {number} uses reasoning; use reasoning_content instead")
        reasoning = item.get("reasoning_content")
        if reasoning is not None and not isinstance(reasoning, str):
            raise self.bad("wrong reasoning", f"message {number}: reasoning_content must be text")
        weights = {key: item[key] for key in WEIGHTS if item.get(key) is not None}
        for key, weight in weights.items():
            if weight not in (0, 1) or (key == "weight" and isinstance(weight, bool)):
                raise self.bad("wrong weight", f"message {number}: {key}={weight!r} must be 0 or 1")
        if len(set(map(bool, weights.values()))) > 1:
            raise self.bad(
                "wrong weight",
                f"message {number}: {', '.join(weights)} contradict each other about whether to train on the answer",
            )
        calls = item.get("tool_calls") or []
        if not isinstance(calls, list):
            raise self.bad("wrong tool call", f"message {number}: tool_calls must be a list")
        calls = tuple(self._call(call, number) for call in calls)
        if len({call.id for call in calls}) < len(calls):
            raise self.bad("wrong tool call", f"message {number}: two calls have the same id")
        content = () if calls and item.get("content") is None else self._content(item, number)
        if not calls and not "".join(map(str, content)).strip():
            raise self.bad("empty message", f"message {number} (assistant) has neither text nor tool calls")
        reasoning = encodable(reasoning or "", self.file, self.line)
        return Message("assistant", content, reasoning, calls, supervised=all(weights.values()))

    def _call(self, call: Any, number: int) -> ToolCall:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            shape = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
            raise self.bad("wrong tool call", f"message {number}: a call must look like {shape}")
        arguments = function.get("arguments")
        try:
            for _ in range(2):  # an object, JSON, or JSON in a JSON string: all three occur in data sets
                if isinstance(arguments, str):
                    arguments = json.loads(arguments) if arguments.strip() else {}
        except (json.JSONDecodeError, RecursionError) as error:
            raise self.bad("wrong tool arguments", f"message {number}: invalid JSON: {error}") from None
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise self.bad("wrong tool arguments", f"message {number}: must be an object, not {arguments!r:.80}")
        name = self._name(function, "name", number)
        if quoted := [text for text in (name, *arguments) if '"' in text]:
            raise self.bad("wrong tool call", f"message {number}: the name {quoted[0]!r} contains a quotation mark")
        for text in (name, *arguments, *(value for value in arguments.values() if isinstance(value, str))):
            encodable(text, self.file, self.line)
        encodable(to_json(arguments), self.file, self.line)
        return ToolCall(self._name(call, "id", number), name, arguments)

    def _tools(self, tools: Any) -> list[dict[str, Any]]:
        """The function schemas from a list of tools in the OpenAI shape."""
        if not isinstance(tools, list):
            raise self.bad("wrong tools", "tools must be a list")
        functions: list[Any] = [tool.get("function") if isinstance(tool, dict) else None for tool in tools]
        for function in functions:
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                shape = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
                raise self.bad("wrong tools", f"a tool must look like {shape}")
            encodable(to_json(function), self.file, self.line)
        return functions

    def _check_results(self, calls: tuple[ToolCall, ...], results: list[str]) -> None:
        known = [call.id for call in calls]
        for result in results:
            if result not in known:
                raise self.bad("tool result without call", f"the last answer has no tool call {result!r}")
        if sorted(known) != sorted(results):
            wrong = next(call for call in known if results.count(call) != 1)
            count = results.count(wrong)
            raise self.bad(
                "tool call without its result", f"tool call {wrong!r} has {count} results, but must have exactly one"
            )

    def _check_order(self, messages: list[Message], for_training: bool) -> None:
        roles = [message.role for message in messages]
        if for_training and not any(message.supervised for message in messages):
            raise self.bad("no supervised token", "there is no assistant message with weight 1")
        if roles[0] == "assistant" or roles[:2] == ["system", "assistant"]:
            raise self.bad("wrong order of messages", "an assistant message comes before the first user message")
        if any(pair == ("assistant", "assistant") for pair in zip(roles, roles[1:], strict=False)):
            raise self.bad("wrong order of messages", "two assistant messages follow each other; merge them into one")
        if for_training and roles[-1] != "assistant":
            raise self.bad(
                "wrong order of messages", f"the last message is from {roles[-1]}, it must be from assistant"
            )
        if not for_training and (roles[-1] == "assistant" or roles == ["system"]):
            raise self.bad("wrong order of messages", "a prompt must end with a user message or tool results")

    def _name(self, item: dict[str, Any], key: str, number: int) -> str:
        value = item.get(key)
        if not isinstance(value, str) or not value:
            raise self.bad("wrong tool call", f"message {number}: {key} must be a non-empty string, not {value!r}")
        return value

    def _content(self, item: dict[str, Any], number: int, images: bool = False) -> tuple[Part, ...]:
        """The content of a message, with blank lines between its parts."""
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
                value = part if part.get(kind) is None else part[kind]
                blocks.append((None, (self._image(value, number),)))
            elif kind in ("image", "image_url"):
                raise self.bad("wrong content", f"message {number}: only user messages can have images, not {role}")
            else:
                detail = f"message {number}: a part must have type text (and text), image or image_url"
                raise self.bad("wrong content", detail)
        return _joined(blocks)

    def _image(self, value: Any, number: int) -> Picture:
        """Open an image that is given as {"path"|"url"|"base64"|"bytes": ...}, or as a path, a data: URL or bytes."""
        from data.images import open_picture  # needs Pillow and torch

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
            raise self.bad("wrong content", f"message {number}: an image must be a path, a data: URL, base64 or bytes")
        if "://" in value:
            raise self.bad("image is not a local file", f"message {number}: {value:.80}; give a path or base64")
        return open_picture(Path(self.file).parent / value, self.file, self.line)


def unused_keys(record: Mapping[str, Any], field: str) -> set[str]:
    """The keys of a record and of its messages that `read_conversation` ignores."""
    found = (
        {key for key, value in record.items() if value is not None} - RECORD_KEYS - REFUSED_OF_RECORD.keys() - {field}
    )
    known = MESSAGE_KEYS | REFUSED_OF_MESSAGE.keys() | set(WEIGHTS)
    of_messages = {key for item in record[field] for key, value in item.items() if value is not None} - known
    named = any(item.get("name") is not None and item.get("role") != "tool" for item in record[field])
    return found | {f"{field}[].{key}" for key in (*of_messages, *["name"] * named)}


def _place_images(parts: list[Any], waiting: list[Any]) -> tuple[list[Any], int]:
    """Returns the parts of a user message with each <image> mark replaced by the next image of `waiting`, and the
    number of <image> marks.
    """
    placed, marks = [], 0
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image" and not any(
            part.get(key) is not None for key in ("image", "path", "url", "base64", "bytes")
        ):
            placed.append({"type": "image", "image": waiting.pop(0) if waiting else None})
            marks += 1
        elif kind == "text" and isinstance(part.get("text"), str) and IMAGE_MARK in part["text"]:
            before, *rest = part["text"].split(IMAGE_MARK)
            marks += len(rest)
            texts = [[{"type": "text", "text": text.strip()}] if text.strip() else [] for text in (before, *rest)]
            placed += texts[0]
            for text in texts[1:]:
                placed += [{"type": "image", "image": waiting.pop(0) if waiting else None}, *text]
        else:
            placed.append(part)
    return placed, marks


def _with_call_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, with an id added to every tool call and tool result that has none. A tool call without an id
    gets the id "call N", where N is its number in the message. A tool result without an id gets the id of the next tool
    call that had none; if the result names a function, only calls of that function count.
    """
    made: list[dict[str, Any]] = []
    waiting: list[tuple[str, Any]] = []  # the ids given here to tool calls, and the functions they call
    for item in items:
        calls, role = item.get("tool_calls"), item.get("role")
        if role == "assistant":
            waiting = []
        if role == "assistant" and isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
            given = [call if call.get("id") not in (None, "") else {**call, "id": f"call {number}"}
                     for number, call in enumerate(calls, 1)]  # fmt: skip
            waiting = [
                (new["id"], (new.get("function") or {}).get("name") if isinstance(new.get("function"), dict) else None)
                for new, old in zip(given, calls, strict=True)
                if new is not old
            ]
            item = {**item, "tool_calls": given}
        elif role == "tool" and item.get("tool_call_id") in (None, "") and waiting:
            named = [entry for entry in waiting if item.get("name") in (None, entry[1])]
            if named:
                waiting.remove(named[0])
                item = {**item, "tool_call_id": named[0][0]}
        made.append(item)
    return made


def _in_call_order(
    blocks: list[tuple[str | None, tuple[Part, ...]]], calls: tuple[ToolCall, ...]
) -> list[tuple[str | None, tuple[Part, ...]]]:
    """The blocks (texts and tool results) of a user turn, with the tool results sorted into the order of their tool
    calls.
    """
    order = {call.id: number for number, call in enumerate(calls)}
    results = iter(sorted((block for block in blocks if block[0] is not None), key=lambda block: order[str(block[0])]))
    return [block if block[0] is None else next(results) for block in blocks]


def _joined(blocks: Iterable[tuple[Any, tuple[Part, ...]]]) -> tuple[Part, ...]:
    """The parts of all blocks, with a blank line between every two blocks."""
    joined: list[Part] = []
    for _, parts in blocks:
        joined += [SEPARATOR, *parts] if joined else parts
    return tuple(joined)
