"""Every shape of record gives the conversation that the OpenAI shape gives."""

import json

import pytest

from data import DataError
from data.chat.conversation import Message
from data.chat.formats import SHAPES, as_messages, shape_of
from data.chat.read import read_conversation
from data.config import CHAT_FORMATS

from .records import assistant, call, result, user

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [user("2 + 3?"), assistant("5"), user("And 4?"), assistant("9")]
LAST_ONLY = [user("2 + 3?"), assistant("5", weight=0), user("And 4?"), assistant("9")]
HUMAN = [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5"}, {"from": "human", "value": "And 4?"},
         {"from": "gpt", "value": "9"}]  # fmt: skip

CASES = {
    "messages": ("messages", {"messages": TURNS}, TURNS),
    "sharegpt": ("sharegpt", {"conversations": HUMAN}, TURNS),
    "sharegpt, system": ("sharegpt", {"conversations": HUMAN, "system": "Be brief."}, [SYSTEM, *TURNS]),
    "sharegpt, a turn of the system": (
        "sharegpt",
        {"conversations": [{"from": "system", "value": "Be brief."}, *HUMAN]},
        [SYSTEM, *TURNS],
    ),
    "sharegpt, weights": (
        "sharegpt",
        {"conversations": [{**turn, "weight": 0} if n == 1 else turn for n, turn in enumerate(HUMAN)]},
        LAST_ONLY,
    ),
    "conversations of messages": ("sharegpt", {"conversations": TURNS}, TURNS),
    "messages of turns": ("messages", {"messages": HUMAN}, TURNS),
    "alpaca": ("alpaca", {"instruction": "Add.", "input": "2 3", "output": "5"}, [user("Add.\n2 3"), assistant("5")]),
    "alpaca, no input": ("alpaca", {"instruction": "Add.", "input": "", "output": "5"}, [user("Add."), assistant("5")]),
    "alpaca, history": (
        "alpaca",
        {"instruction": "And 4?", "output": "9", "history": [["2 + 3?", "5"]], "system": "Be brief."},
        [SYSTEM, *TURNS],
    ),
    "query and response": ("alpaca", {"query": "2 + 3?", "response": "5"}, TURNS[:2]),
    "prompt, completion": ("prompt_completion", {"prompt": "2 + 3?", "completion": "5"}, TURNS[:2]),
    "prompt, completion as messages": (
        "prompt_completion",
        {"prompt": TURNS[:3], "completion": TURNS[3:]},
        LAST_ONLY,
    ),
    "preference": ("preference", {"prompt": "2 + 3?", "chosen": "5", "rejected": "6"}, TURNS[:2]),
    "preference, messages": (
        "preference",
        {"prompt": TURNS[:3], "chosen": [TURNS[3]], "rejected": [assistant("8")]},
        LAST_ONLY,
    ),
    "preference, the prompt in both": (
        "preference",
        {"chosen": TURNS, "rejected": [*TURNS[:3], assistant("8")]},
        LAST_ONLY,
    ),
    "preference, the prompt thrice": (
        "preference",
        {"prompt": "2 + 3?", "chosen": TURNS[:2], "rejected": [TURNS[0], assistant("6")]},
        TURNS[:2],
    ),
    "preference, sharegpt": (
        "preference",
        {"conversations": HUMAN[:3], "chosen": HUMAN[3], "rejected": {"from": "gpt", "value": "8"}},
        LAST_ONLY,
    ),
    "preference, alpaca": (
        "preference",
        {"instruction": "2 + 3?", "input": "", "chosen": "5", "rejected": "6"},
        TURNS[:2],
    ),
    "preference, openai": (
        "preference",
        {"input": {"messages": TURNS[:3]}, "preferred_output": TURNS[3:], "non_preferred_output": [assistant("8")]},
        LAST_ONLY,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_shape_is_recognised_and_read_as_messages(name):
    shape, record, messages = CASES[name]
    assert shape_of(record, "messages") == shape
    before = json.dumps(record)
    made = as_messages(record, shape, "messages", "f", 1)
    assert json.dumps(record) == before, "the record itself stays as it is"
    expected = read_conversation({"messages": messages}, "f", 1)
    assert read_conversation(made, "f", 1) == expected


def test_tool_calls_of_sharegpt():
    called = json.dumps({"name": "weather", "arguments": {"city": "Bonn"}})
    turns = [{"from": "human", "value": "Weather?"}, {"from": "function_call", "value": called},
             {"from": "observation", "value": "rain"}, {"from": "gpt", "value": "It rains."}]  # fmt: skip
    made = as_messages({"conversations": turns}, "sharegpt", "messages", "f", 1)
    messages = [user("Weather?"), assistant(None, tool_calls=[call("call 1", {"city": "Bonn"})])]
    messages += [result("call 1", "rain"), assistant("It rains.")]
    assert read_conversation(made, "f", 1) == read_conversation({"messages": messages}, "f", 1)


def test_an_empty_history_and_keys_of_other_shapes_do_not_mislead():
    record = {"instruction": "2 + 3?", "input": None, "output": "5", "history": None, "messages": None}
    assert shape_of(record, "messages") == "alpaca"
    made = read_conversation(as_messages(record, "alpaca", "messages", "f", 1), "f", 1)
    assert made.messages == (Message("user", ("2 + 3?",)), Message("assistant", ("5",), supervised=True))
    assert shape_of({"chats": TURNS, "prompt": "x"}, "chats") == "messages", "data.field names the messages"
    assert shape_of({"text": "a"}, "messages") == shape_of(["a"], "messages") == "messages"


@pytest.mark.parametrize(
    ("shape", "record", "reason"),
    [
        ("sharegpt", {"conversations": []}, "wrong conversations"),
        ("sharegpt", {"conversations": [{"from": "robot", "value": "x"}]}, "unknown role"),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "x"}]}, "wrong tool call"),
        ("alpaca", {"instruction": 3, "output": "5"}, "wrong instruction"),
        ("alpaca", {"instruction": "a", "output": "b", "history": ["c"]}, "wrong history"),
        ("prompt_completion", {"prompt": "a"}, "wrong completion"),
        ("preference", {"chosen": "a", "rejected": "b"}, "wrong prompt"),
        ("preference", {"prompt": "q", "chosen": 3, "rejected": "b"}, "wrong chosen"),
        ("preference", {"preferred_output": TURNS[3:]}, "wrong input"),
        ("alpaca", [], "record is not an object"),
    ],
)
def test_a_record_without_the_shape_is_refused(shape, record, reason):
    with pytest.raises(DataError) as caught:
        as_messages(record, shape, "messages", "f", 3)
    assert (caught.value.line, caught.value.reason) == (3, reason)


def test_the_settings_know_the_shapes():
    assert set(CHAT_FORMATS) == set(SHAPES)
