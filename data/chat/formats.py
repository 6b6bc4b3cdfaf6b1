"""Converts conversations from the record formats of other frameworks to the OpenAI `messages` format.

The values of `data.format` for conversations are these:

    messages:           {"messages": [{"role": ..., "content": ...}]}, used by OpenAI, TRL, axolotl and ms-swift.
    sharegpt:           {"conversations": [{"from": "human", "value": ...}]}, used by LLaMA-Factory, axolotl and LLaVA.
    alpaca:             {"instruction": ..., "input": ..., "output": ..., "history": [[question, answer]]}; the keys
                        query and response are also accepted.
    prompt_completion:  {"prompt": ..., "completion": ...}, where both values are texts or lists of messages; answers
                        inside the prompt are not supervised.
    preference:         {"chosen": ..., "rejected": ..., "prompt": ...}, or the keys of OpenAI's preference
                        fine-tuning; the chosen answer is supervised from where it differs from the rejected one.
    tokens:             {"input_ids": [...], "labels": [...]}.

The format of each record is recognised by its keys, unless `data.format` sets it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from data.document import kind_of
from data.errors import DataError

# The sets of keys by which each format is recognised. A record has the first format of which it has all keys of one
# set.
SHAPES: dict[str, tuple[set[str], ...]] = {
    "preference": ({"chosen", "rejected"}, {"preferred_output"}),
    "messages": ({"messages"},),
    "sharegpt": ({"conversations"},),
    "prompt_completion": ({"prompt", "completion"},),
    "alpaca": ({"instruction", "output"}, {"instruction", "response"}, {"query", "response"}),
    "tokens": ({"input_ids"},),
}
SHAPES_KEYS = {key for sets in SHAPES.values() for some in sets for key in some}
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "tool": "tool",
}


def shape_of(record: Any, field: str) -> str:
    """The name of a record's format. For an unrecognised record it is "messages"; reading the record then fails with an
    error that names `field`.
    """
    if not isinstance(record, dict):
        return "messages"
    present = {key for key, value in record.items() if value is not None}
    shapes = SHAPES if field in SHAPES_KEYS else {**SHAPES, "messages": ({field},)}
    return next((shape for shape, keys in shapes.items() if any(some <= present for some in keys)), "messages")


def as_messages(record: Any, shape: str, field: str, file: str, line: int) -> Mapping[str, Any]:
    """The record with its conversation in the OpenAI format under the key `field`. All other keys are unchanged.

    Raises `DataError` if the record is not in the format `shape`.
    """
    if not isinstance(record, dict):
        raise DataError(file, line, "record is not an object", f"it is {kind_of(record)}")
    return _Shapes(file, line).convert(record, shape, field)


def as_pair(record: Any, field: str, file: str, line: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Split a preference record into two records in the format of `as_messages`: one ends in the preferred answer, the
    other in the rejected answer. The messages before the answers are the same in both records.

    Raises `DataError` for a record that lacks one of the two answers.
    """
    if not isinstance(record, dict):
        raise DataError(file, line, "record is not an object", f"it is {kind_of(record)}")
    return _Shapes(file, line).pair(record, field)


class _Shapes:
    """Converts one record to the OpenAI format; its errors name the file and line of the record."""

    def __init__(self, file: str, line: int):
        self.file, self.line = file, line

    def bad(self, reason: str, detail: str) -> DataError:
        return DataError(self.file, self.line, reason, detail)

    def convert(self, record: dict[str, Any], shape: str, field: str) -> Mapping[str, Any]:
        if shape == "messages":
            if field in record and isinstance(record[field], list) and _is_sharegpt(record[field]):
                return {**record, field: [self._turn(turn, n) for n, turn in enumerate(record[field], 1)]}
            return record
        rest, messages = getattr(self, f"_{shape}")(dict(record))
        return {**rest, field: messages}

    def _sharegpt(self, record: dict[str, Any]) -> tuple[dict, list]:
        turns = self._list(record, "conversations")
        record.pop("conversations")
        return record, [self._turn(turn, n) for n, turn in enumerate(turns, 1)]

    def _turn(self, turn: Any, number: int) -> Any:
        """Convert a ShareGPT turn {"from": ..., "value": ...} to a message; a turn that is already a message is
        unchanged.
        """
        if not isinstance(turn, dict) or "role" in turn:
            return turn
        role = ROLES.get(str(turn.get("from")))
        if role is None:
            raise self.bad("unknown role", f"turn {number} is from {turn.get('from')!r}; known are {', '.join(ROLES)}")
        message = {key: value for key, value in turn.items() if key not in ("from", "value")}
        value = turn.get("value")
        if turn["from"] in ("function_call", "tool_call"):
            return {**message, "role": role, "content": None, "tool_calls": self._calls(value, number)}
        return {**message, "role": role, "content": value}

    def _calls(self, value: Any, number: int) -> list[dict[str, Any]]:
        """The tool calls in a JSON text: one object {"name": ..., "arguments": ...}, or a list of such objects."""
        try:
            calls = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise self.bad("wrong tool call", f"turn {number}: invalid JSON: {error}") from None
        calls = [calls] if isinstance(calls, dict) else calls
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise self.bad("wrong tool call", f'turn {number}: must be JSON like {{"name": ..., "arguments": ...}}')
        return [{"type": "function", "function": call} for call in calls]

    def _alpaca(self, record: dict[str, Any]) -> tuple[dict, list]:
        ask = "instruction" if record.get("instruction") is not None else "query"
        answer = "output" if record.get("output") is not None else "response"
        question = self._text(record, ask)
        if record.get("input"):
            question = f"{question}\n{self._text(record, 'input')}"
        messages = []
        for pair in record.get("history") or []:
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(t, str) for t in pair):
                raise self.bad("wrong history", "must be a list of pairs of a question and an answer")
            messages += [_user(pair[0]), _assistant(pair[1])]
        messages += [_user(question), _assistant(self._text(record, answer))]
        used = {ask, answer, "input", "history"}
        return {key: value for key, value in record.items() if key not in used}, messages

    def _prompt_completion(self, record: dict[str, Any]) -> tuple[dict, list]:
        prompt, completion = record.pop("prompt", None), record.pop("completion", None)
        before = [_user(prompt)] if isinstance(prompt, str) else prompt
        after = [_assistant(completion)] if isinstance(completion, str) else completion
        for key, value in (("prompt", before), ("completion", after)):
            if not isinstance(value, list) or not value:
                raise self.bad(f"wrong {key}", "must be text or a list of messages")
        before = [self._turn(turn, number) for number, turn in enumerate(before, 1)]
        after = [self._turn(turn, number) for number, turn in enumerate(after, len(before) + 1)]
        return record, [_context(message) for message in before] + after

    def pair(self, record: dict[str, Any], field: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Returns two records, one with the preferred answer and one with the rejected answer."""
        record = self._with_openai_names(dict(record))
        answers = record.get("chosen"), record.get("rejected")
        for name, answer in zip(("chosen", "rejected"), answers, strict=True):
            if answer is None:
                raise self.bad(f"no {name} answer", f"the record has no {name!r}; a pair needs both answers")
        if isinstance(answers[0], str) != isinstance(answers[1], str):
            detail = f"chosen is {kind_of(answers[0])}, rejected {kind_of(answers[1])}; give both in one form"
            raise self.bad("unlike answers", detail)
        if answers[0] == answers[1]:
            raise self.bad("equal answers", "chosen and rejected are the same, so there is no preference")
        swapped = {**record, "chosen": answers[1], "rejected": answers[0]}
        chosen, rejected = (self.convert(side, "preference", field) for side in (record, swapped))
        return _without(chosen, "rejected"), _without(rejected, "rejected")

    def _with_openai_names(self, record: dict[str, Any]) -> dict[str, Any]:
        """Rename the keys of a record in OpenAI's format for preference fine-tuning to the keys of other frameworks;
        records in other formats are returned unchanged.
        """
        if "preferred_output" not in record:
            return record
        given = record.pop("input", None)
        if not isinstance(given, dict) or not isinstance(given.get("messages"), list):
            raise self.bad("wrong input", 'must be {"messages": [...]} in a record with preferred_output')
        record |= {key: value for key, value in given.items() if key != "messages"} | {"prompt": given["messages"]}
        record["chosen"] = record.pop("preferred_output")
        record["rejected"] = record.pop("non_preferred_output", None)
        return record

    def _preference(self, record: dict[str, Any]) -> tuple[dict, list]:
        record = self._with_openai_names(record)
        chosen, rejected = record.pop("chosen", None), record.get("rejected")
        prompt = self._prompt_of(record)
        if isinstance(chosen, dict):
            chosen = [self._turn(chosen, 1)]
        if isinstance(chosen, str):
            if not prompt:
                detail = "chosen is text without a prompt; give a prompt, or chosen and rejected as lists of messages"
                raise self.bad("wrong prompt", detail)
            return record, [*map(_context, prompt), _assistant(chosen)]
        if not isinstance(chosen, list) or not chosen:
            raise self.bad("wrong chosen", "must be text or a list of messages")
        chosen = [self._turn(turn, number) for number, turn in enumerate(chosen, 1)]
        rejected = [self._turn(t, n) for n, t in enumerate(rejected, 1)] if isinstance(rejected, list) else []
        shared = next((n for n, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1]), 0)
        if prompt and chosen[: len(prompt)] == prompt:  # chosen repeats the prompt
            prompt, shared = [], max(shared, len(prompt))
        return record, [_context(message) for message in prompt + chosen[:shared]] + chosen[shared:]

    def _prompt_of(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages before the chosen answer, from the record's prompt, conversation or instruction."""
        if record.get("prompt") is not None:
            prompt = record.pop("prompt")
            if not isinstance(prompt, str | list):
                raise self.bad("wrong prompt", "must be text or a list of messages")
            return [_user(prompt)] if isinstance(prompt, str) else [self._turn(t, n) for n, t in enumerate(prompt, 1)]
        for key in ("messages", "conversations"):
            if record.get(key):
                turns = self._list(record, key)
                record.pop(key)
                return [self._turn(turn, number) for number, turn in enumerate(turns, 1)]
        if record.get("instruction") is not None:
            question = self._text(record, "instruction")
            record.pop("instruction")
            more = record.pop("input", None)
            return [_user(f"{question}\n{more}" if more else question)]
        return []

    def _list(self, record: dict[str, Any], key: str) -> list[Any]:
        if not isinstance(record.get(key), list) or not record[key]:
            raise self.bad(f"wrong {key}", 'must be a list of turns like {"from": "human", "value": ...}')
        return record[key]

    def _text(self, record: dict[str, Any], key: str) -> str:
        if not isinstance(record.get(key), str):
            raise self.bad(f"wrong {key}", f"must be text, not {kind_of(record.get(key))}")
        return record[key]


def _is_sharegpt(turns: list[Any]) -> bool:
    return bool(turns) and all(isinstance(turn, dict) and "from" in turn and "role" not in turn for turn in turns)


def _without(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != key}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _context(message: Any) -> Any:
    """A copy of the message that has `weight` 0 if it is an assistant message, so that it is not supervised."""
    if isinstance(message, dict) and message.get("role") == "assistant":
        return {**message, "weight": 0}
    return message
