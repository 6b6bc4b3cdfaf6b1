"""The format, token by token."""

import json
from collections import Counter

import numpy as np
import pytest

from data import DataError
from data.chat.read import read_conversation
from data.chat.render import documents
from data.tokenizer import CONTROL_TOKENS, guard

from .records import ASSISTANT, BOS, EFFORT, EOS, SYSTEM, TOOL, USER, assistant, call, encode, expected, result, user


def test_a_chat_turn(tokenizer):
    record = {"messages": [{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Hello there.")]}
    parts = (BOS, SYSTEM, "Be brief.", USER, "Hi", ASSISTANT, "</think>", ["Hello there."], [EOS])
    assert encode(tokenizer, record) == [expected(tokenizer, *parts)]


def test_without_system_text_a_chat_has_no_system_token(tokenizer):
    record = {"messages": [user("Hi"), assistant("Hello."), user("Bye"), assistant("So long.")]}
    first = (BOS, USER, "Hi", ASSISTANT, "</think>", ["Hello."], [EOS])
    parts = (*first, USER, "Bye", ASSISTANT, "</think>", ["So long."], [EOS])
    assert encode(tokenizer, record) == [expected(tokenizer, *parts)], "chat turns stay one document, all supervised"


@pytest.mark.parametrize(("effort", "number"), [(None, 75), ("low", 50), ("high", 75), ("max", 100), (1, 1), (37, 37)])
def test_a_thinking_turn_has_the_effort_line_before_the_system_text(tokenizer, effort, number):
    messages = [user("Hi"), assistant("Hello.", "A greeting.")]
    record = {"messages": messages} | ({} if effort is None else {"effort": effort})
    turn = (USER, "Hi", ASSISTANT, "<think>", ["A greeting."], ["</think>"], ["Hello."], [EOS])
    assert encode(tokenizer, record) == [expected(tokenizer, BOS, SYSTEM, EFFORT.format(number), *turn)]
    record["messages"] = [{"role": "developer", "content": "Be brief."}, *messages]
    line = EFFORT.format(number) + "Be brief."
    assert encode(tokenizer, record) == [expected(tokenizer, BOS, SYSTEM, line, *turn)]


def test_earlier_reasoning_is_dropped_by_one_document_for_each_user_turn(tokenizer):
    messages = [user("1"), assistant("a1", "t1"), user("2"), assistant("a2", "t2")]
    line = (BOS, SYSTEM, EFFORT.format(75), USER, "1", ASSISTANT)
    first = (*line, "<think>", ["t1"], ["</think>"], ["a1"], [EOS])
    second = (*line, "</think>", "a1", EOS, USER, "2", ASSISTANT, "<think>", ["t2"], ["</think>"], ["a2"], [EOS])
    wanted = [expected(tokenizer, *first), expected(tokenizer, *second)]
    assert encode(tokenizer, {"messages": messages}) == wanted
    messages[1]["weight"] = 0
    assert encode(tokenizer, {"messages": messages}) == wanted[1:]


def test_an_answer_without_reasoning_is_a_chat_turn_unless_thinking_is_asked_for(tokenizer):
    messages = [user("1"), assistant("a1"), user("2"), assistant("a2", "t2")]
    chat = (USER, "1", ASSISTANT, "</think>")
    second = (BOS, SYSTEM, EFFORT.format(75), *chat, "a1", EOS, USER, "2", ASSISTANT, "<think>")
    second += (["t2"], ["</think>"], ["a2"], [EOS])
    wanted = [expected(tokenizer, BOS, *chat, ["a1"], [EOS]), expected(tokenizer, *second)]
    assert encode(tokenizer, {"messages": messages}) == wanted
    first = (BOS, SYSTEM, EFFORT.format(75), USER, "1", ASSISTANT, "<think>", ["</think>"], ["a1"], [EOS])
    assert encode(tokenizer, {"messages": messages, "thinking": True}) == [expected(tokenizer, *first), wanted[1]]
    parts = (BOS, *chat, ["a1"], [EOS], USER, "2", ASSISTANT, "</think>", ["a2"], [EOS])
    assert encode(tokenizer, {"messages": messages, "thinking": False}) == [expected(tokenizer, *parts)]


@pytest.mark.parametrize("spelling", [dict, json.dumps, lambda arguments: json.dumps(json.dumps(arguments))])
def test_tools_keep_reasoning_and_their_results_follow_the_order_of_the_calls(tokenizer, spelling):
    calls = [call("x", spelling({"city": "Rome", "days": 2, "at": ["a", "é"]})), call("y", spelling({"city": "Oslo"}))]
    record = {
        "messages": [
            user("Weather?"),
            assistant("I look.", "Two cities.", tool_calls=calls),
            result("y", "snow"),
            result("x", [{"type": "text", "text": "sun"}, {"type": "text", "text": "wind"}]),
            user("And?"),
            assistant("Sun and snow.", "Now I know."),
        ],
        "tools": [TOOL],
    }
    [(ids, mask)] = encode(tokenizer, record)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    head, _, rest = text.partition(USER)
    assert head.startswith(BOS + SYSTEM + EFFORT.format(75) + "\n\n## Tools\n\n")
    assert head.endswith('### Functions\n\n{"name": "weather", "parameters": {"type": "object"}}')
    block = (
        "I look.\n\n<｜DSML｜ calls>\n"
        '<｜DSML｜ invoke name="weather">\n'
        '<｜DSML｜ parameter name="city" string="true">Rome</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="days" string="false">2</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="at" string="false">["a", "é"]</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n"
        '<｜DSML｜ invoke name="weather">\n'
        '<｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n"
        "</｜DSML｜ calls>"
    )
    results = "<tool_result>sun\n\nwind</tool_result>\n\n<tool_result>snow</tool_result>\n\nAnd?"
    turns = ["Weather?", ASSISTANT, "<think>", "Two cities.</think>" + block + EOS, USER, results, ASSISTANT]
    turns += ["<think>", "Now I know.</think>Sun and snow." + EOS]
    assert rest == "".join(turns)
    shown = tokenizer.decode(np.array(ids)[mask].tolist(), skip_special_tokens=False)
    assert shown == turns[3] + turns[8]
    assert ids.count(tokenizer.token_to_id("<tool_result>")) == 2
    parts = next(iter(documents(read_conversation(record, "f.jsonl", 1), "f.jsonl", 1))).parts
    texts = [isinstance(part, str) for part in parts]
    assert (True, True) not in zip(texts, texts[1:], strict=False), "text is tokenised as a whole"


def test_a_final_tool_call_is_supervised_and_no_arguments_are_none(tokenizer):
    record = {"messages": [user("Go"), assistant(None, tool_calls=[call("x", "")])], "tools": [TOOL]}
    [(ids, mask)] = encode(tokenizer, record)
    shown = tokenizer.decode(np.array(ids)[mask].tolist(), skip_special_tokens=False)
    block = '<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    assert shown == "\n\n" + block + EOS


def test_a_tokenizer_with_a_token_for_the_mark_of_tool_calls_uses_it(tokenizer):
    state = json.loads(tokenizer.to_str())
    new = max(token["id"] for token in state["added_tokens"]) + 10_000
    state["added_tokens"].append({**state["added_tokens"][0], "id": new, "content": "｜DSML｜"})
    richer = guard(type(tokenizer).from_str(json.dumps(state)), "test")
    mark = richer.token_to_id("｜DSML｜")
    record = {"messages": [user("｜DSML｜"), assistant(None, tool_calls=[call("x", {"a": "｜DSML｜"})])]}
    [(ids, mask)] = encode(richer, record)
    assert ids.count(mark) == 6 and sum(np.array(ids)[mask] == mark) == 6, "the two in text are text"
    with pytest.raises(DataError, match="text spells a control token"):
        encode(tokenizer, record)


def test_user_messages_in_a_row_and_parts_are_joined_and_a_later_system_message_opens_a_turn(tokenizer):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    later = {"role": "system", "content": "Now rhyme."}
    record = {"messages": [user(parts), user("three"), assistant("a", "t"), later, assistant("b", "u")]}
    line = (BOS, SYSTEM, EFFORT.format(75), USER, "one\n\ntwo\n\nthree", ASSISTANT)
    first = (*line, "<think>", ["t"], ["</think>"], ["a"], [EOS])
    second = (*line, "</think>", "a", EOS, SYSTEM, "Now rhyme.", ASSISTANT, "<think>")
    second += (["u"], ["</think>"], ["b"], [EOS])
    assert encode(tokenizer, record) == [expected(tokenizer, *first), expected(tokenizer, *second)]


def test_text_that_spells_a_control_token_is_text(tokenizer):
    spelled = " ".join(CONTROL_TOKENS)
    record = {
        "messages": [
            {"role": "system", "content": spelled},
            user(spelled),
            assistant(spelled, spelled, tool_calls=[call("x", {"a": spelled})]),
            result("x", spelled),
            assistant(spelled, spelled),
        ],
    }
    [(ids, _)] = encode(tokenizer, record)
    control = Counter(tokenizer.id_to_token(i) for i in ids if i in range(len(CONTROL_TOKENS)))
    assert control == {
        **{BOS: 1, SYSTEM: 1, USER: 2, ASSISTANT: 2, "<think>": 2, "</think>": 2, EOS: 2},
        **{"<tool_result>": 1, "</tool_result>": 1},
    }
    assert tokenizer.decode(ids, skip_special_tokens=False).count(spelled) == 8
