"""``task=check``: the table against counts by hand, refusals, samples."""

from __future__ import annotations

import json

import pytest

from train.__main__ import load_task
from train.config.parse import parse
from train.errors import InputError
from train.logging.text import visible


@pytest.fixture
def checked(compose_raw, overrides, tmp_path, capsys):
    """``checked(records, "key=value")``: what is printed about a file of conversations."""

    def run(records: list[dict], *changes: str) -> str:
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "held", "completion": "out"}) + "\n")
        small = [
            text for text in overrides if not text.startswith(("data.source", "data.paths", "data.validation_paths"))
        ]
        options = ["task=check", "data=chat", f"data.paths=[{path}]", f"data.validation_paths=[{tmp_path}/held.jsonl]"]
        tokenizer = [f"data.tokenizer={path.parent / 'tokenizer.json'}"]
        config = parse(compose_raw(*options, *small, *tokenizer, *changes))
        load_task("check")(config)
        return capsys.readouterr().out

    from data import DataConfig, load_tokenizer

    corpus = next(text for text in overrides if text.startswith("data.paths=")).partition("[")[2].rstrip("]")
    cfg = DataConfig(source="text", paths=[corpus], vocab_size=512, cache_dir=str(tmp_path))
    cfg.validation_share = 0.2
    load_tokenizer(cfg).save(str(tmp_path / "tokenizer.json"))
    return run


RECORDS = [
    {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}], "id": 7},
    {"messages": [{"role": "user", "content": "a\x1b[31m"}, {"role": "assistant", "content": "b"}] * 2},
]


def test_what_is_printed(checked) -> None:
    out = checked(RECORDS)
    lines = {line.split("  ")[0].strip(): line.split()[-2:] for line in out.splitlines() if "  " in line}
    assert lines["records"] == ["2", "1"] and lines["turns"] == ["6", "2"] and lines["refused"] == ["0", "0"]
    assert (
        "1 records were read as messages" in out
        and "1 records were read as sharegpt" in out
        and "keys of records that are not used: id (1)" in out
    )
    assert "\nan epoch is 1 step of " in out
    assert "</think>⟦two<｜end▁of▁sentence｜>⟧" in out and "⟦b<｜end▁of▁sentence｜>⟧<｜User｜>" in out
    assert "a\\x1b[31m" in out and "\x1b" not in out, "escape sequences are spelled out"
    assert "documents by length in tokens (a row has 64 tokens)" in out and out.count("█") >= 40


def test_what_is_refused_is_counted_and_ends_the_command(checked) -> None:
    bad = [*RECORDS, {"messages": [{"role": "user", "content": "x"}]}, {"text": "x"}, {"text": "y"}]
    out = checked(bad, "data.on_error=skip")
    assert "refused 2 x wrong field" in out and "chats.jsonl:4: wrong field" in out
    assert "refused 1 x no supervised token" in out
    with pytest.raises(InputError, match="3 records would stop a run"):
        checked(bad)


def test_control_characters_are_made_visible() -> None:
    """The case of a sample printed raw to the terminal, after which grep takes the log for binary."""
    assert visible("a\x1b[2J\x00\x07\r\x9b\x7f") == "a\\x1b[2J\\x00\\x07\\x0d\\x9b\\x7f"
    assert visible("\u202eabc\u2066\ud800") == "\\u202eabc\\u2066\\ud800"
    plain = "é 語\n\ta 👩\u200d👩 \u00ad ｜"
    assert visible(plain) == plain
