from __future__ import annotations

import json

import pytest

from data import DataConfig, load_tokenizer, special_ids
from data.chat.prompt import prompt_ids
from data.chat.read import read_conversation
from data.chat.render import documents
from data.document import Control
from data.errors import BadRecordPolicy
from data.tokenizer_files import CONFIG, TEMPLATE, tokenizer_files
from data.tokens import Encoder
from tests.data.chat.records import EFFORT, TOOL, assistant, call, result, user

transformers = pytest.importorskip("transformers")

CASES = {
    "chat": dict(messages=[user("Hi, é 語\n")]),
    "thinking": dict(messages=[user("1+1?")], thinking=True, effort="max"),
    "effort": dict(messages=[user("1+1?")], thinking=True, effort=7),
    "system": dict(messages=[{"role": "system", "content": "Be brief."}, user("a"), assistant("b"), user("c")]),
    "system later": dict(messages=[user("a"), assistant("b"), {"role": "developer", "content": "now"}, user("c")]),
    "dropped reasoning": dict(messages=[user("a"), assistant("b", "why"), user("c")], thinking=True),
    "two of one turn": dict(messages=[user("a"), user([{"type": "text", "text": t} for t in "bc"])]),
    "tools": dict(messages=[user("a")], tools=[TOOL, TOOL]),
    "tools and system": dict(messages=[{"role": "system", "content": "s"}, user("a")], tools=[TOOL], thinking=True),
    "calls": dict(
        messages=[
            user("a"),
            assistant("b", "why", tool_calls=[call("1", {"town": "A\nB", "days": 3}), call("2", {"all": [True, 0]})]),
            result("2", "rain"),
            result("1", "sun"),
            user("and?"),
            assistant(None, tool_calls=[call("1", {})]),
            result("1", [{"type": "text", "text": "snow"}]),
        ],
        thinking=True,
    ),
}


@pytest.fixture(scope="module")
def exported(tokenizer, tmp_path_factory):
    """(our tokenizer, the same as AutoTokenizer reads it, its folder)."""
    folder = tmp_path_factory.mktemp("export")
    for name, text in tokenizer_files(DataConfig(), tokenizer).items():
        (folder / name).write_text(text, encoding="utf-8")
    return tokenizer, transformers.AutoTokenizer.from_pretrained(folder), folder


def test_auto_tokenizer_reads_ids_roles_and_bos(exported) -> None:
    ours, theirs, _ = exported
    text = "Some words, 1234 é 語  \n\n   end"
    assert theirs(text).input_ids == [0, *ours.encode(text, add_special_tokens=False).ids]
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 1, 2)
    assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == text
    assert len(theirs) == ours.get_vocab_size(with_added_tokens=True)


@pytest.mark.parametrize("case", CASES)
def test_the_template_writes_the_prompts_of_the_data(exported, case: str) -> None:
    ours, theirs, _ = exported
    arguments = {"thinking": False, "effort": "high", "tools": None, **CASES[case]}
    expected = prompt_ids(ours, **arguments)
    messages = arguments.pop("messages")
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **arguments)
    assert rendered == ours.decode(expected, skip_special_tokens=False)
    if not case.startswith(("tools", "calls")):  # without a token of its own, the markup is split with its neighbours
        found = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **arguments)
        assert found == expected


def test_the_template_writes_answers_as_they_are_trained_on(exported) -> None:
    ours, theirs, _ = exported
    record = {"messages": [user("1+1?"), assistant("2", "easy")], "thinking": True}
    (document,) = documents(read_conversation(record, "f", 1), "f", 1)
    text = "".join(part.spelling if isinstance(part, Control) else part for part in document.parts)
    rendered = theirs.apply_chat_template(record["messages"], thinking=True, tokenize=False)
    assert rendered == theirs.bos_token + text + theirs.eos_token
    assert EFFORT.format(75) in rendered


def test_the_exported_tokenizer_is_the_same_for_the_data(exported) -> None:
    ours, _, folder = exported
    again = load_tokenizer(DataConfig(tokenizer=str(folder)))
    text = "a <think> b é 語\n"
    assert again.encode(text, add_special_tokens=False).ids == ours.encode(text, add_special_tokens=False).ids
    assert again.get_vocab() == ours.get_vocab() and special_ids(again) == special_ids(ours)


def test_a_tokenizer_that_came_with_files_keeps_them(exported, tmp_path) -> None:
    ours, _, folder = exported
    cfg = DataConfig(tokenizer=str(folder / "tokenizer.json"))
    files = tokenizer_files(cfg, ours)
    assert json.loads(files[CONFIG])["bos_token"] == "<｜begin▁of▁sentence｜>" and TEMPLATE in files
    (tmp_path / CONFIG).write_text("{}")
    assert tokenizer_files(DataConfig(tokenizer=str(tmp_path)), ours) == {CONFIG: "{}"}


def test_text_arguments_are_refused_by_the_template(exported) -> None:
    _, theirs, _ = exported
    messages = [user("a"), assistant("", tool_calls=[call("1", '{"a": 1}')]), result("1", "x")]
    with pytest.raises(Exception, match="must be a mapping"):
        theirs.apply_chat_template(messages, tokenize=False)


MASKED = {
    "chat": dict(messages=[user("a"), assistant("b"), user("c"), assistant("d")]),
    "system and weight": dict(
        messages=[{"role": "system", "content": "s"}, user("a"), assistant("b", weight=0), user("c"), assistant("d")]
    ),
    "thinking": dict(messages=[user("a"), assistant("b", "because")], thinking=True),
    "calls without ids": dict(
        messages=[
            user("a"),
            assistant("b", "why", tool_calls=[{"function": {"name": "weather", "arguments": {"days": 3}}}]),
            {"role": "tool", "name": "weather", "content": "sun"},
            assistant("Sunny."),
        ],
        thinking=True,
    ),
}


@pytest.mark.parametrize("case", MASKED)
def test_the_assistant_mask_is_what_fine_tuning_supervises(exported, case: str) -> None:
    """Qwen3 1522, transformers 34172."""
    ours, theirs, _ = exported
    record = MASKED[case]
    (document,) = documents(read_conversation(record, "f", 1), "f", 1)
    encoder = Encoder(ours, 1000, None, count_bytes=False, conversations=True)
    (encoded,) = encoder.encode([document], BadRecordPolicy("stop"))
    options = {key: value for key, value in record.items() if key != "messages"}
    found = theirs.apply_chat_template(
        record["messages"], return_assistant_tokens_mask=True, return_dict=True, **options
    )
    if case != "calls without ids":  # without a token of its own, the markup is split with its neighbours
        assert found["input_ids"] == encoded.ids.tolist()
        assert found["assistant_masks"] == encoded.loss_mask.astype(int).tolist()
    supervised = [token for token, mask in zip(found["input_ids"], found["assistant_masks"], strict=True) if mask]
    expected = encoded.ids[encoded.loss_mask].tolist()
    assert ours.decode(supervised, skip_special_tokens=False) == ours.decode(expected, skip_special_tokens=False)


def test_a_rendered_conversation_already_begins_with_bos(exported) -> None:
    """DeepSeek-R1 151, OpenRLHF 393: encoding it as a text would add a second one."""
    _, theirs, _ = exported
    text = theirs.apply_chat_template([user("a")], tokenize=False)
    direct = theirs.apply_chat_template([user("a")], return_dict=False)
    assert theirs(text, add_special_tokens=False).input_ids == direct and direct.count(theirs.bos_token_id) == 1
    assert theirs(text).input_ids == [theirs.bos_token_id, *direct], "as docs/interop.md says"
