"""A file of conversations, from the configuration to batches."""

import base64
import json
from collections import Counter

import pytest
import torch

from data import DataConfig, DataError, build_loaders, special_ids
from data.errors import BadRecordPolicy
from data.images import VisionSettings, plan_grid
from data.open import open_sources
from data.tokenizer import guard
from tests.data.conftest import VISION

from .records import ASSISTANT, BOS, EOS, USER, assistant, expected, picture, user


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
    train, valid = build_loaders(cfg, tokenizer, seq_len=40, batch_rows=len(lines), vision=VISION)
    batch = next(iter(train))
    image = "<｜deepseek_image｜>"
    ids, mask = expected(tokenizer, BOS, USER, *[image] * span, "\n\nColour?", ASSISTANT, "</think>", ["Red."], [EOS])
    assert len(ids) < 40 < 2 * len(ids), "one to a row"
    for row in range(len(lines)):
        assert batch["input_ids"][row, : len(ids)].tolist() == ids
        assert (batch["labels"][row, : len(ids)] >= 0).tolist() == mask
        assert (batch["vision_token_types"][row] >= 0).sum() == span
    patches = batch["pixel_values"].view(len(lines), -1)
    assert (patches == patches[0]).all() and len(batch["image_grid_hws"]) == len(lines)
    assert valid.target_tokens == sum(mask) and valid.target_bytes == len("Red.")


def test_batches_supervise_every_answer_once_an_epoch(chats, tokenizer):
    train, valid = build_loaders(chats, tokenizer, seq_len=256, batch_rows=1, seed=3)
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
    sides = [{d.line for d, _ in source.read(BadRecordPolicy("stop"))} for source in open_sources(chats)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 60 and len(sides[1]) > 3


def test_bits_per_byte_count_supervised_bytes(chats, tokenizer):
    _, valid = build_loaders(chats, tokenizer, seq_len=256, batch_rows=2)
    labels = torch.cat([batch["labels"].flatten() for batch in valid])
    assert valid.target_tokens == (labels >= 0).sum()
    text = tokenizer.decode(labels[labels >= 0].tolist(), skip_special_tokens=True)
    assert valid.target_bytes == len(text.encode())


def test_a_position_is_exact_and_the_cache_is_read_again(chats, tokenizer):
    first, _ = build_loaders(chats, tokenizer, seq_len=256, batch_rows=2, seed=3)
    for _ in range(5):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    second, _ = build_loaders(chats, tokenizer, seq_len=256, batch_rows=2, seed=3)
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
        build_loaders(chats, tokenizer, seq_len=256, batch_rows=2)
    chats.on_error = "skip"
    train, _ = build_loaders(chats, tokenizer, seq_len=256, batch_rows=2)
    assert train.stats.skipped == {"no supervised token": 1, "conversation longer than a row": 2}
    assert "skipped 2 x conversation longer than a row" in str(train.stats)
    train, _ = build_loaders(chats, tokenizer, seq_len=1024, batch_rows=2)
    assert train.stats.skipped == {"no supervised token": 1}, "what is too long depends on the row"
    path.write_text(json.dumps(long) + "\n")
    chats.on_error = "stop"
    too_long = r"chats\.jsonl:1: conversation longer than a row: it has \d+ tokens, a row has 256"
    with pytest.raises(DataError, match=too_long):
        build_loaders(chats, tokenizer, seq_len=256, batch_rows=2)


def test_settings_that_do_not_fit_are_refused(chats, tokenizer):
    chats.format = "text"
    assert "must be one of auto, messages, sharegpt" in str(chats.problems())
    chats.format = "auto"
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] != USER]
    state["model"]["vocab"]["no user"] = state["model"]["vocab"].pop(USER)
    poorer = guard(type(tokenizer).from_str(json.dumps(state)), "test")
    with pytest.raises(ValueError, match="has no <｜User｜>; add these tokens to it or use another tokenizer"):
        build_loaders(chats, poorer, seq_len=256, batch_rows=2)


def several_answers(count):
    """Records that become one to three documents each."""
    turns = [[user(f"Q {n} {t}"), assistant(f"A {n} {t}", f"because {t}")] for n in range(count) for t in range(3)]
    return [{"messages": sum(turns[3 * n : 3 * n + 1 + n % 3], [])} for n in range(count)]


def saved(folder, records):
    """The records as JSONL, as Parquet and as `datasets` saves them: the paths by name."""
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(records)
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data.to_parquet(folder / "a.parquet", batch_size=7)
    data.save_to_disk(folder / "set", num_shards=2)
    (folder / "held.jsonl").write_text(json.dumps({"messages": [user("held"), assistant("out")]}) + "\n")
    return {name: str(folder / name) for name in ("a.jsonl", "a.parquet", "set")}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "set"])
@pytest.mark.parametrize("streaming", [False, True])
def test_conversations_can_be_read_on_from_within_a_record(name, streaming, tmp_path):
    paths = saved(tmp_path, several_answers(20))
    cfg = DataConfig("chat", [paths[name]], field="messages", streaming=streaming, validation_rows=1)
    source, _ = open_sources(cfg)
    source = source.source  # both sides of the split

    def read(position=None):
        return [
            (d.text, json.loads(json.dumps(after()))) for d, after in source.read(BadRecordPolicy("stop"), position)
        ]

    whole = read()
    assert len(whole) == sum(1 + n % 3 for n in range(20))
    for done, (_, position) in enumerate(whole, 1):
        assert [text for text, _ in read(position)] == [text for text, _ in whole[done:]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "set"])
def test_a_stream_of_conversations_trains_and_resumes_exactly(name, tokenizer, tmp_path):
    paths = saved(tmp_path, several_answers(40))
    cfg = DataConfig(
        "chat", [paths[name]], field="messages", streaming=True, validation_rows=2, validation_share=0.2,
        window_tokens=600, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    first, _ = build_loaders(cfg, tokenizer, seq_len=128, batch_rows=2)
    states, batches = [], []
    while first.epoch < 2:
        states.append(json.loads(json.dumps(first.state_dict())))
        batches.append(next(first))
    second, _ = build_loaders(cfg, tokenizer, seq_len=128, batch_rows=2)
    for number in range(0, len(states), 3):
        second.load_state_dict(states[number])
        for batch in batches[number : number + 3]:
            again = next(second)
            assert all(torch.equal(batch[key], again[key]) for key in batch)
    assert all((batch["labels"] >= 0).any() for batch in batches)


def test_every_file_of_records_gives_the_same_conversations(tokenizer, tmp_path):
    paths = saved(tmp_path, several_answers(20))
    found = {}
    for name, path in paths.items():
        source, held = open_sources(DataConfig("chat", [path], field="messages"))
        sides = [sorted(d.text for d, _ in side.read(BadRecordPolicy("stop"))) for side in (source, held)]
        found[name] = sides
    assert found["a.jsonl"] == found["a.parquet"] == found["set"], "the split is by content, too"


def test_nulls_that_arrow_put_into_tools_and_calls_are_absent(tmp_path):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": {"type": "string"}}}}
    other = {"type": "function", "function": {"name": "g", "parameters": {"b": {"type": "string"}}}}
    records = [
        {"messages": [user("x"), assistant(None, tool_calls=[{"function": {"name": "f", "arguments": {"a": "1"}}}])],
         "tools": [tool]},
        {"messages": [user("y"), assistant(None, tool_calls=[{"function": {"name": "g", "arguments": {"b": "2"}}}])],
         "tools": [other]},
    ]  # fmt: skip
    paths = saved(tmp_path, records)
    texts = {
        name: sorted(
            d.text
            for side in open_sources(DataConfig("chat", [path], field="messages"))
            for d, _ in side.read(BadRecordPolicy("stop"))
        )
        for name, path in paths.items()
    }
    assert texts["a.jsonl"] == texts["a.parquet"] == texts["set"] and "null" not in str(texts)


def test_pretokenised_records_say_what_is_supervised(tokenizer, tmp_path):
    special = special_ids(tokenizer)
    ids = tokenizer.encode("one two three").ids
    masked = [-100, *ids[1:]]
    lines = [{"input_ids": ids, "labels": masked}, {"input_ids": [special.bos, *ids, special.eos]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cfg = DataConfig("chat", [str(tmp_path / "a.jsonl")], [str(tmp_path / "a.jsonl")], field="messages")
    cfg.validation_paths = [str(tmp_path / "b.jsonl")]
    (tmp_path / "b.jsonl").write_text(json.dumps(lines[0]) + "\n")
    cfg.cache_dir, cfg.shuffle, cfg.window_tokens = str(tmp_path / "cache"), False, 1000
    train, valid = build_loaders(cfg, tokenizer, seq_len=len(ids) + 3, batch_rows=2)
    batch = next(train)
    rows = sorted(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True), key=str)
    whole = [special.bos, *ids, special.eos]
    assert all(row[: len(whole)] == whole for row, _ in rows), "BOS and EOS once"
    labels = sorted(str(label[: len(whole)]) for _, label in rows)
    assert labels == sorted([str([-100, -100, *ids[1:], special.eos]), str([-100, *ids, special.eos])])
    assert valid.target_bytes == len("one two three") - len(tokenizer.decode([ids[0]]))
    assert train.stats.formats == {"tokens": 2} and "read as tokens: 2 records" in str(train.stats)
