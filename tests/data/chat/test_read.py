import base64
import json

import pytest

from data import DataError
from data.chat.read import (
    MESSAGE_KEYS,
    RECORD_KEYS,
    REFUSED_OF_MESSAGE,
    REFUSED_OF_RECORD,
    WEIGHTS,
    read_conversation,
    unused_keys,
)

from .records import TOOL, assistant, call, encode, picture, result, user


def test_images_that_cannot_be_used_are_refused_by_name(tokenizer, tmp_path):
    images = [
        ("missing image", "none.png"),
        ("unknown image format", {"bytes": base64.b64encode(b"no image").decode()}),
        ("corrupt image", {"base64": "###"}),
        ("corrupt image", {"base64": "é"}),
        ("image is not a local file", {"url": "https://example.org/a.png"}),
        ("wrong content", {"color": "red"}),
    ]
    for reason, image in images:
        record = {"messages": [user([{"type": "image", "image": image}]), assistant("?")]}
        with pytest.raises(DataError) as caught:
            read_conversation(record, str(tmp_path / "a.jsonl"), 7)
        assert (caught.value.reason, caught.value.line) == (reason, 7)
    (tmp_path / "red.png").write_bytes(picture())
    record = {"messages": [user([{"type": "image", "image": {"bytes": picture()}}]), assistant("?")]}
    with pytest.raises(DataError, match="f.jsonl:1: image for a model without vision"):
        encode(tokenizer, record)


BAD = [
    ({"messages": []}, "messages is not a list of objects"),
    ({"messages": "hi"}, "messages is not a list of objects"),
    ({"messages": [user("a"), "b"]}, "messages is not a list of objects"),
    ({"text": "x"}, "wrong field"),
    ([], "record is not an object"),
    ({"messages": [user("a")]}, "no supervised token"),
    ({"messages": [user("a"), assistant("b", weight=0)]}, "no supervised token"),
    ({"messages": [user("a"), assistant("b"), user("c")]}, "wrong order of messages"),
    ({"messages": [assistant("b")]}, "wrong order of messages"),
    ({"messages": [{"role": "system", "content": "s"}, assistant("b")]}, "wrong order of messages"),
    ({"messages": [user("a"), assistant("b"), assistant("c")]}, "wrong order of messages"),
    ({"messages": [user("a"), {"role": "robot", "content": "b"}]}, "unknown role"),
    ({"messages": [user("a"), {"content": "b"}]}, "unknown role"),
    ({"messages": [user(" "), assistant("b")]}, "empty message"),
    ({"messages": [user("a"), assistant("")]}, "empty message"),
    ({"messages": [user("a"), assistant("", "thought")]}, "empty message"),
    ({"messages": [user("a"), assistant(None)]}, "wrong content"),
    ({"messages": [user(3), assistant("b")]}, "wrong content"),
    ({"messages": [user([{"type": "audio"}]), assistant("b")]}, "wrong content"),
    ({"messages": [user("a"), assistant([{"type": "image", "image": "x.png"}])]}, "wrong content"),
    ({"messages": [user("\ud800"), assistant("b")]}, "invalid Unicode"),
    ({"messages": [user("a"), assistant("b", "\ud800")]}, "invalid Unicode"),
    ({"messages": [user("a"), assistant("b", reasoning=3)]}, "wrong reasoning"),
    ({"messages": [user("a"), {"role": "assistant", "content": "b", "reasoning": "c"}]}, "wrong reasoning"),
    ({"messages": [user("a"), assistant("b", weight=0.5)]}, "wrong weight"),
    ({"messages": [user("a"), assistant("b")], "effort": True}, "wrong effort"),
    ({"messages": [user("a"), assistant("b")], "effort": "50abc"}, "wrong effort"),
    ({"messages": [user("a"), assistant("b")], "effort": 101}, "wrong effort"),
    ({"messages": [user("a"), assistant("b")], "thinking": "yes"}, "wrong thinking"),
    ({"messages": [user("a"), assistant("b")], "tools": "weather"}, "wrong tools"),
    ({"messages": [user("a"), assistant("b")], "tools": [{"name": "weather"}]}, "wrong tools"),
    ({"messages": [user("a") | {"tools": [TOOL]}, assistant("b")]}, "wrong tools"),
    ({"messages": [user("a"), assistant("b", tool_calls="c")]}, "wrong tool call"),
    ({"messages": [user("a"), assistant("b", tool_calls=[{"name": "c"}])]}, "wrong tool call"),
    ({"messages": [user("a"), assistant("b", tool_calls=[call(3, {})])]}, "wrong tool call"),
    ({"messages": [user("a"), assistant("b", tool_calls=[call(None, {})]), result(None, "r"), result(None, "s"),
                   assistant("c")]}, "wrong tool call"),
    ({"messages": [user("a"), assistant("b", tool_calls=[call(None, {})]), {"role": "tool", "name": "other",
                   "content": "r"}, assistant("c")]}, "wrong tool call"),
    ({"messages": [user("a"), assistant("b", train=True, loss=False)]}, "wrong weight"),
    ({"messages": [user("a") | {"loss": True}, assistant("b")]}, "wrong weight"),
    ({"messages": [user("a"), assistant("b")], "system": 3}, "wrong system"),
    ({"messages": [{"role": "system", "content": "s"}, user("a"), assistant("b")], "system": "t"}, "wrong system"),
    ({"messages": [user("a"), assistant("b")], "images": "a.png"}, "wrong images"),
    ({"messages": [user("<image>a"), assistant("b")], "images": ["a.png", "b.png"]}, "wrong images"),
    ({"messages": [user("<image><image>a"), assistant("b")], "images": ["a.png"]}, "wrong images"),
    ({"messages": [user("<image>a"), assistant("b")], "images": ["absent.png"]}, "missing image"),
    ({"messages": [user("a"), assistant("b")], "label": False}, "undesired answer"),
    ({"messages": [user("a"), assistant("b")], "chat_template_kwargs": {"date": "today"}},
     "unsupported key chat_template_kwargs"),
    ({"messages": [user("a"), assistant("b", tool_calls=[call("x", {}), call("x", {})])]}, "wrong tool call"),
    ({"messages": [user("a"), assistant("b", tool_calls=[call("x", {}, 'c"')])]}, "wrong tool call"),
    ({"messages": [user("a"), assistant("b", function_call={"name": "c"})]}, "wrong tool call"),
    ({"messages": [user("a"), assistant("b", tool_calls=[call("x", "{")])]}, "wrong tool arguments"),
    ({"messages": [user("a"), assistant("b", tool_calls=[call("x", "[1]")])]}, "wrong tool arguments"),
    ({"messages": [user("a"), assistant("b"), result("x", "r"), assistant("c")]}, "tool result without call"),
    ({"messages": [user("a"), assistant("b", tool_calls=[call("x", {})]), user("c"), assistant("d")]},
     "tool call without its result"),
]  # fmt: skip


# A key of another framework that changes what it teaches is refused by name if it is not honoured.
BAD += [({"messages": [user("a"), assistant("b")], key: ["x"]}, f"unsupported key {key}") for key in REFUSED_OF_RECORD]
BAD += [({"messages": [user("a"), assistant("b", **{key: "x"})]}, f"unsupported key {key}")
        for key in REFUSED_OF_MESSAGE]  # fmt: skip


@pytest.mark.parametrize(("record", "reason"), BAD)
def test_a_malformed_record_is_refused_with_file_line_and_reason(record, reason):
    with pytest.raises(DataError) as caught:
        read_conversation(record, "f.jsonl", 3)
    assert (caught.value.file, caught.value.line, caught.value.reason) == ("f.jsonl", 3, reason)
    assert "\n" not in str(caught.value)


def test_a_null_counts_as_absent_for_every_key():
    """Records that Arrow has unified have every key of any record of theirs."""
    nulls = dict.fromkeys([*REFUSED_OF_RECORD, *RECORD_KEYS])
    of_message = dict.fromkeys([*REFUSED_OF_MESSAGE, *WEIGHTS, *MESSAGE_KEYS - {"role", "content"}])
    parts = [{"type": "text", "text": "a", "image": None, "image_url": None}]
    messages = [of_message | user(parts), of_message | {"role": "assistant", "content": "b"}]
    plain = {"messages": [user("a"), assistant("b")]}
    assert read_conversation({**nulls, "messages": messages}, "f", 1) == read_conversation(plain, "f", 1)
    assert unused_keys({**nulls, "messages": messages}, "messages") == set()


def test_whether_an_answer_is_supervised_in_the_words_of_each_framework():
    for key in WEIGHTS:
        for off, on in ((0, 1), (0.0, 1.0), *([(False, True)] if key != "weight" else [])):
            messages = [user("a"), assistant("b", **{key: off}), user("c"), assistant("d", **{key: on})]
            made = read_conversation({"messages": messages}, "f", 1).messages
            assert [message.supervised for message in made] == [False, False, False, True]


def test_tool_calls_without_ids_are_paired_by_order_or_name():
    def shape(*results):
        calls = [
            {"type": "function", "function": {"name": "one", "arguments": {"n": 1}}},
            {"type": "function", "id": "", "function": {"name": "two", "arguments": {"n": 2}}},
        ]
        messages = [user("a"), assistant(None, tool_calls=calls), *results, assistant("done")]
        return read_conversation({"messages": messages}, "f", 1).messages[2].content

    with_ids = [user("a"), assistant(None, tool_calls=[call("x", {"n": 1}, "one"), call("y", {"n": 2}, "two")])]
    with_ids += [result("x", "first"), result("y", "second"), assistant("done")]
    expected = read_conversation({"messages": with_ids}, "f", 1).messages[2].content
    first, second = {"role": "tool", "content": "first"}, {"role": "tool", "content": "second"}
    assert shape(first, second) == expected
    assert shape(second | {"name": "two"}, first | {"name": "one"}) == expected


def test_the_record_s_system_text_and_template_options():
    messages = [user("a"), assistant("b", "because")]
    record = {"messages": messages, "system": "s", "chat_template_kwargs": {"enable_thinking": True}}
    same = {"messages": [{"role": "system", "content": "s"}, *messages], "thinking": True}
    assert read_conversation(record, "f", 1) == read_conversation(same, "f", 1)
    record["chat_template_kwargs"] = {"reasoning_effort": "low", "thinking": True}
    assert read_conversation(record, "f", 1) == read_conversation(same | {"effort": "low"}, "f", 1)
    record = {"messages": messages, "tools": json.dumps([TOOL])}
    assert read_conversation(record, "f", 1) == read_conversation({"messages": messages, "tools": [TOOL]}, "f", 1)


def test_a_column_of_images_becomes_parts(tmp_path):
    """TRL's, LLaMA-Factory's and LLaVA's columns of images against parts of a message."""
    file = str(tmp_path / "f.jsonl")
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(picture())
    a, b = ({"type": "image", "image": name} for name in ("a.png", "b.png"))
    text = {"type": "text", "text": "Which colour?"}

    def content(said, **columns):
        (message, _) = read_conversation({"messages": [user(said), assistant("?")], **columns}, file, 1).messages
        return [part.key if hasattr(part, "key") else part for part in message.content]

    expected = content([a, text])
    assert content("<image>Which colour?", images=["a.png"]) == expected
    assert content("<image>\nWhich colour?", image="a.png") == expected
    assert content("Which colour?", images=[{"path": "a.png", "bytes": None}]) == expected
    assert content([{"type": "image"}, text], images=["a.png"]) == expected
    assert content([{"type": "image", "image": None}, text], images=["a.png"]) == expected
    assert content("<image>Which colour?<image>", images=["a.png", "b.png"]) == content([a, text, b])
    assert content("<image> is a tag") == ["<image> is a tag"], "without images it is text"


def test_keys_that_nothing_is_taken_from_are_named():
    record = {"messages": [user("a") | {"name": "Ann", "id": 3}, assistant("b")], "source": "web", "score": None}
    assert unused_keys(record, "messages") == {"source", "messages[].name", "messages[].id"}
