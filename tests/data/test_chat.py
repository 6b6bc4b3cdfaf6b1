import base64
import io
import json
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from data import DataConfig, DataError, build_loaders, special_ids
from data.chat import effort_budget, prompt_ids, read_conversation
from data.errors import Policy
from data.images import VisionSettings, plan_grid
from data.sources import open_sources
from data.tokenizer import CONTROL_TOKENS, _guarded
from data.tokens import Encoder
from tests.data.conftest import VISION

EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, SYSTEM = "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, reasoning=None, **more):
    return {"role": "assistant", "content": content, **({"reasoning_content": reasoning} if reasoning else {}), **more}


def call(id, arguments, name="weather"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(id, content):
    return {"role": "tool", "tool_call_id": id, "content": content}


def encode(tokenizer, record, policy=None, vision=None, seq_len=2000):
    """The documents of a record, each as (ids, taught)."""
    documents = list(read_conversation(record, "f.jsonl", 1).documents("f.jsonl", 1))
    encoder = Encoder(tokenizer, seq_len, vision, count_bytes=True, conversations=True)
    return [(e.ids.tolist(), e.taught.tolist()) for e in encoder.encode(documents, policy or Policy("stop"))]


def expected(tokenizer, *parts):
    """Ids and mask written by hand: a control token or text is not taught, one in a list is."""
    ids, taught = [], []
    for part in parts:
        text = part[0] if isinstance(part, list) else part
        new = [tokenizer.token_to_id(text)] if text in CONTROL_TOKENS else tokenizer.encode(text).ids
        ids += new
        taught += [isinstance(part, list)] * len(new)
    return ids, taught


# The format, token by token


def test_a_chat_turn(tokenizer):
    record = {"messages": [{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Hello there.")]}
    parts = (BOS, SYSTEM, "Be brief.", USER, "Hi", ASSISTANT, "</think>", ["Hello there."], [EOS])
    assert encode(tokenizer, record) == [expected(tokenizer, *parts)]


def test_without_system_text_a_chat_has_no_system_token(tokenizer):
    record = {"messages": [user("Hi"), assistant("Hello."), user("Bye"), assistant("So long.")]}
    first = (BOS, USER, "Hi", ASSISTANT, "</think>", ["Hello."], [EOS])
    parts = (*first, USER, "Bye", ASSISTANT, "</think>", ["So long."], [EOS])
    assert encode(tokenizer, record) == [expected(tokenizer, *parts)], "chat turns stay one document, all taught"


@pytest.mark.parametrize(("effort", "number"), [(None, 75), ("low", 50), ("high", 75), ("max", 100), (1, 1), (37, 37)])
def test_a_thinking_turn_has_the_effort_line_before_the_system_text(tokenizer, effort, number):
    messages = [user("Hi"), assistant("Hello.", "A greeting.")]
    record = {"messages": messages} | ({} if effort is None else {"effort": effort})
    turn = (USER, "Hi", ASSISTANT, "<think>", ["A greeting."], ["</think>"], ["Hello."], [EOS])
    assert encode(tokenizer, record) == [expected(tokenizer, BOS, SYSTEM, EFFORT.format(number), *turn)]
    record["messages"] = [{"role": "developer", "content": "Be brief."}, *messages]
    line = EFFORT.format(number) + "Be brief."
    assert encode(tokenizer, record) == [expected(tokenizer, BOS, SYSTEM, line, *turn)]


def test_efforts_by_name_and_number():
    assert [effort_budget(value) for value in ("low", "high", "max", 1, 100)] == [50, 75, 100, 1, 100]
    for value in (True, False, 0, 101, "50abc", "50", 50.0, None, "", "Low", [50]):
        with pytest.raises(ValueError, match="must be one of low, high, max or a whole number from 1 to 100"):
            effort_budget(value)


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
    [(ids, taught)] = encode(tokenizer, record)
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
    shown = tokenizer.decode(np.array(ids)[taught].tolist(), skip_special_tokens=False)
    assert shown == turns[3] + turns[8]
    assert ids.count(tokenizer.token_to_id("<tool_result>")) == 2
    parts = next(iter(read_conversation(record, "f.jsonl", 1).documents("f.jsonl", 1))).parts
    texts = [isinstance(part, str) for part in parts]
    assert (True, True) not in zip(texts, texts[1:], strict=False), "text is tokenised as a whole"


def test_a_final_tool_call_is_taught_and_no_arguments_are_none(tokenizer):
    record = {"messages": [user("Go"), assistant(None, tool_calls=[call("x", "")])], "tools": [TOOL]}
    [(ids, taught)] = encode(tokenizer, record)
    shown = tokenizer.decode(np.array(ids)[taught].tolist(), skip_special_tokens=False)
    block = '<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    assert shown == "\n\n" + block + EOS


def test_a_tokenizer_with_a_token_for_the_mark_of_tool_calls_uses_it(tokenizer):
    state = json.loads(tokenizer.to_str())
    new = max(token["id"] for token in state["added_tokens"]) + 10_000
    state["added_tokens"].append({**state["added_tokens"][0], "id": new, "content": "｜DSML｜"})
    richer = _guarded(type(tokenizer).from_str(json.dumps(state)), "test")
    mark = richer.token_to_id("｜DSML｜")
    record = {"messages": [user("｜DSML｜"), assistant(None, tool_calls=[call("x", {"a": "｜DSML｜"})])]}
    [(ids, taught)] = encode(richer, record)
    assert ids.count(mark) == 6 and sum(np.array(ids)[taught] == mark) == 6, "the two in text are text"
    with pytest.raises(DataError, match="text spells a mark of the format"):
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


def test_a_prompt_is_the_document_up_to_its_answer(tokenizer):
    messages = [user("1"), assistant("a1", "t1"), user("2"), assistant("a2", "t2")]
    for thinking in (False, True):
        ids, taught = encode(tokenizer, {"messages": messages, "thinking": thinking, "effort": 9})[-1]
        start = len(taught) - taught[::-1].index(False)
        assert prompt_ids(tokenizer, messages[:-1], thinking=thinking, effort=9) == ids[:start]
    with pytest.raises(DataError, match="a prompt must end with a user message"):
        prompt_ids(tokenizer, messages)


# Images


def picture(color=(200, 10, 10), size=(24, 16)):
    data = io.BytesIO()
    Image.new("RGB", size, color).save(data, "PNG")
    return data.getvalue()


def image_records(folder):
    (folder / "red.png").write_bytes(picture())
    encoded = base64.b64encode(picture()).decode()
    return [
        {"type": "image", "image": "red.png"},
        {"type": "image", "image": {"path": "red.png"}},
        {"type": "image", "image": {"bytes": encoded}},
        {"type": "image", "base64": encoded},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
        {"type": "image_url", "image_url": "red.png"},
    ]


def test_images_as_path_bytes_and_base64_become_the_same_spans(tokenizer, tmp_path):
    span = plan_grid(24, 16, VisionSettings.from_config(VISION)).num_tokens
    images = image_records(tmp_path)
    lines = [{"messages": [user([image, {"type": "text", "text": "Colour?"}]), assistant("Red.")]} for image in images]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "held.jsonl").write_text(json.dumps(lines[0]) + "\n")
    cfg = DataConfig("chat", [str(tmp_path / "a.jsonl")], [str(tmp_path / "held.jsonl")], field="messages")
    cfg.cache_dir = str(tmp_path / "cache")
    train, valid = build_loaders(cfg, tokenizer, seq_len=40, batch_size=len(lines), vision=VISION)
    batch = next(iter(train))
    image = "<｜deepseek_image｜>"
    ids, taught = expected(tokenizer, BOS, USER, *[image] * span, "\n\nColour?", ASSISTANT, "</think>", ["Red."], [EOS])
    assert len(ids) < 40 < 2 * len(ids), "one to a row"
    for row in range(len(lines)):
        assert batch["input_ids"][row, : len(ids)].tolist() == ids
        assert (batch["labels"][row, : len(ids)] >= 0).tolist() == taught
        assert (batch["vision_token_types"][row] >= 0).sum() == span
    patches = batch["pixel_values"].view(len(lines), -1)
    assert (patches == patches[0]).all() and len(batch["image_grid_hws"]) == len(lines)
    assert valid.target_tokens == sum(taught) and valid.target_bytes == len("Red.")


def test_images_that_cannot_be_used_are_refused_by_name(tokenizer, tmp_path):
    images = [
        ("missing image", "none.png"),
        ("unknown image format", {"bytes": base64.b64encode(b"no image").decode()}),
        ("corrupt image", {"base64": "###"}),
        ("corrupt image", {"base64": "é"}),
        ("image is not on this machine", {"url": "https://example.org/a.png"}),
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


# What is refused

BAD = [
    ({"messages": []}, "messages are no list of objects"),
    ({"messages": "hi"}, "messages are no list of objects"),
    ({"messages": [user("a"), "b"]}, "messages are no list of objects"),
    ({"text": "x"}, "wrong field"),
    ([], "record is no object"),
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


# The source


@pytest.fixture
def chats(tmp_path):
    """Conversations of one to three turns, with and without reasoning."""
    lines = []
    for n in range(60):
        messages = []
        for turn in range(1 + n % 3):
            reasoning = f"I add {turn}." if n % 2 else None
            messages += [user(f"Question {n} {turn}"), assistant(f"Answer {n} {turn}!", reasoning)]
        lines.append({"messages": messages})
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DataConfig(
        "chat",
        [str(tmp_path / "chats.jsonl")],
        field="messages",
        cache_dir=str(tmp_path / "cache"),
        validation_share=0.2,
        window_tokens=8000,
    )


def test_batches_teach_every_answer_once_an_epoch(chats, tokenizer):
    train, valid = build_loaders(chats, tokenizer, seq_len=256, batch_size=1, seed=3)
    special, seen = special_ids(tokenizer), Counter()
    for loader in (train, valid):
        for batch in loader:
            if loader is train and train.epoch:
                break
            assert ((batch["labels"] == batch["input_ids"]) | (batch["labels"] == -100)).all()
            for ids, labels, lengths in zip(batch["input_ids"], batch["labels"], batch["seq_lens"], strict=True):
                used = int(lengths.sum())
                assert (labels[used:] == -100).all()
                ends = lengths[lengths > 0].cumsum(0)
                assert (ids[ends - 1] == special.eos).all() and (labels[ends - 1] == special.eos).all()
                assert (ids[torch.cat([ends.new_zeros(1), ends[:-1]])] == special.bos).all(), "no document is cut"
                text = tokenizer.decode(ids[labels >= 0].tolist(), skip_special_tokens=False)
                seen.update(text.replace("</think>", "").split(EOS)[:-1])
    wanted = Counter(
        (f"I add {turn}." if n % 2 else "") + f"Answer {n} {turn}!" for n in range(60) for turn in range(1 + n % 3)
    )
    assert seen == wanted and seen.total() == 120
    assert not train.stats.split_documents and not valid.stats.split_documents


def test_the_documents_of_a_conversation_stay_on_one_side_of_the_split(chats):
    sides = [{d.line for d, _ in source.read(Policy("stop"))} for source in open_sources(chats)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 60 and len(sides[1]) > 3


def test_bits_per_byte_count_taught_bytes(chats, tokenizer):
    _, valid = build_loaders(chats, tokenizer, seq_len=256, batch_size=2)
    labels = torch.cat([batch["labels"].flatten() for batch in valid])
    assert valid.target_tokens == (labels >= 0).sum()
    text = tokenizer.decode(labels[labels >= 0].tolist(), skip_special_tokens=True)
    assert valid.target_bytes == len(text.encode())


def test_a_position_is_exact_and_the_cache_is_read_again(chats, tokenizer):
    first, _ = build_loaders(chats, tokenizer, seq_len=256, batch_size=2, seed=3)
    for _ in range(5):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    second, _ = build_loaders(chats, tokenizer, seq_len=256, batch_size=2, seed=3)
    second.load_state_dict(state)
    for _ in range(8):
        one, two = next(first), next(second)
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_bad_and_overlong_conversations_stop_or_are_counted(chats, tokenizer, tmp_path):
    path = tmp_path / "chats.jsonl"
    long = {"messages": [user("long " * 300), assistant("yes")]}
    path.write_text(path.read_text() + "".join(json.dumps(x) + "\n" for x in ({"messages": [user("a")]}, long, long)))
    chats.validation_paths = [str(tmp_path / "held.jsonl")]
    (tmp_path / "held.jsonl").write_text(path.read_text().splitlines()[0] + "\n")
    with pytest.raises(DataError, match=r"chats\.jsonl:61: no supervised token"):
        build_loaders(chats, tokenizer, seq_len=256, batch_size=2)
    chats.on_error = "skip"
    train, _ = build_loaders(chats, tokenizer, seq_len=256, batch_size=2)
    assert train.stats.skipped == {"no supervised token": 1, "conversation longer than a row": 2}
    assert "skipped 2 x conversation longer than a row" in str(train.stats)
    train, _ = build_loaders(chats, tokenizer, seq_len=1024, batch_size=2)
    assert train.stats.skipped == {"no supervised token": 1}, "what is too long depends on the row"
    path.write_text(json.dumps(long) + "\n")
    chats.on_error = "stop"
    with pytest.raises(DataError, match=r"chats\.jsonl:1: conversation longer than a row: \d+ tokens for 256"):
        build_loaders(chats, tokenizer, seq_len=256, batch_size=2)


def test_settings_that_do_not_fit_are_refused(chats, tokenizer):
    chats.streaming, chats.validation_rows = True, 4
    assert "only text, jsonl, parquet and hub can be read while training" in str(chats.problems())
    chats.streaming = False
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] != USER]
    state["model"]["vocab"]["no user"] = state["model"]["vocab"].pop(USER)
    poorer = _guarded(type(tokenizer).from_str(json.dumps(state)), "test")
    with pytest.raises(ValueError, match="the tokenizer has no <｜User｜>; add them or use another"):
        build_loaders(chats, poorer, seq_len=256, batch_size=2)
