import base64

import pytest

from data import DataError
from data.chat.read import read_conversation

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
    ({"messages": [user("a"), assistant("b", tool_calls=[call(None, {})])]}, "wrong tool call"),
    ({"messages": [user("a"), assistant("b", tool_calls=[call("x", {}), call("x", {})])]}, "wrong tool call"),
    ({"messages": [user("a"), assistant("b", tool_calls=[call("x", {}, 'c"')])]}, "wrong tool call"),
    ({"messages": [user("a"), assistant("b", function_call={"name": "c"})]}, "wrong tool call"),
    ({"messages": [user("a"), assistant("b", tool_calls=[call("x", "{")])]}, "wrong tool arguments"),
    ({"messages": [user("a"), assistant("b", tool_calls=[call("x", "[1]")])]}, "wrong tool arguments"),
    ({"messages": [user("a"), assistant("b"), result("x", "r"), assistant("c")]}, "tool result without call"),
    ({"messages": [user("a"), assistant("b", tool_calls=[call("x", {})]), user("c"), assistant("d")]},
     "tool call without its result"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "reason"), BAD)
def test_a_malformed_record_is_refused_with_file_line_and_reason(record, reason):
    with pytest.raises(DataError) as caught:
        read_conversation(record, "f.jsonl", 3)
    assert (caught.value.file, caught.value.line, caught.value.reason) == ("f.jsonl", 3, reason)
    assert "\n" not in str(caught.value)
