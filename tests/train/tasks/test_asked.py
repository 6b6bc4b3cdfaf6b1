"""``task=chat`` and ``task=generate``: a model that is asked on the terminal and for a file of prompts."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from model import save_pretrained
from train.build import build
from train.config.parse import parse
from train.config.problems import ConfigError
from train.errors import InputError
from train.tasks import chat, generate


@pytest.fixture(scope="module")
def folder(compose_raw, overrides, tmp_path_factory) -> Path:
    """An untrained model with its tokenizer."""
    output = tmp_path_factory.mktemp("asked")
    fresh = build(parse(compose_raw(*overrides, f"output={output}")))
    save_pretrained(fresh.model, output / "model", fresh.tokenizer)
    return output / "model"


@pytest.fixture
def generated(compose_raw, folder: Path, tmp_path: Path):
    """``generated(records, "key=value")``: the lines that are written for them, by number."""

    def run(records: list[dict], *changes: str) -> list[dict]:
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        options = [f"init_from={folder}", f"prompts={tmp_path}/prompts.jsonl", f"dst={tmp_path}/answers.jsonl"]
        generate.run(parse(compose_raw("task=generate", *options, "max_tokens=6", "batch=2", "seed=3", *changes)))
        lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
        return sorted(lines, key=lambda line: line["number"])

    return run


RECORDS = [
    {"prompt": "one?", "id": "a"},
    {"messages": [{"role": "user", "content": "two?"}], "thinking": True},
    {"text": "def main"},
    {"prompt": "four?"},
    {"prompt": "five?"},
]


def test_every_prompt_is_answered_and_a_stopped_run_goes_on(generated, tmp_path: Path, capsys) -> None:
    whole = generated(RECORDS)
    assert [line["number"] for line in whole] == list(range(5)) and whole[0]["id"] == "a"
    assert all(0 < line["tokens"] <= 6 and line["finish"] in ("stop", "length") for line in whole)
    assert "reasoning" in whole[1] and "reasoning" not in whole[0] and "reasoning" not in whole[2]
    lines = (tmp_path / "answers.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "answers.jsonl").write_text("".join(lines[:2]) + lines[2][:9])  # killed while it wrote the third
    assert generated(RECORDS, "batch=1") == whole, "whatever is asked at the same time"
    assert "holds 2 of 5 answers" in capsys.readouterr().out
    assert generated(RECORDS) == whole
    with pytest.raises(InputError, match=r"answers under other settings \(temperature\)"):
        generated(RECORDS, "temperature=0.1")
    with pytest.raises(InputError, match=r"answers under other settings \(prompts\)"):
        generated(RECORDS[:4])


@pytest.mark.parametrize(
    ("record", "message"),
    [({"question": "x"}, "prompts.jsonl:1: no prompt"), ({"messages": [{"role": "robot"}]}, "record 1: unknown role")],
)
def test_a_bad_prompt_is_named_before_anything_is_generated(generated, record, message, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        generated([record])
    assert not (tmp_path / "answers.jsonl").exists()


def test_an_answer_that_does_not_fit_is_refused(generated) -> None:
    with pytest.raises(InputError, match="positions; lower max_tokens"):
        generated(RECORDS, "max_tokens=100000000")


def test_a_chat_on_the_terminal(compose_raw, folder: Path, monkeypatch, capsys) -> None:
    said = [
        "hello",
        "/help",
        "/effort low",
        "/effort 101",
        "/undo",
        "again\x1b[31m",
        "/thinking off",
        "/new",
        "",
        "/quit",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*said, "not read"])))
    chat.run(parse(compose_raw("task=chat", f"init_from={folder}", "max_tokens=5", "temperature=1.0")))
    out = capsys.readouterr().out
    assert "/quit ends" in out and "/new: begin another conversation" in out
    assert "effort=101: must be one of" in out and "\x1b" not in out
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    chat.run(parse(compose_raw("task=chat", f"init_from={folder}", "max_tokens=5", "temperature=1.0")))
    again = capsys.readouterr().out
    assert out.splitlines()[1] == again.splitlines()[1], "the same seed gives the same answer"


def test_what_is_missing_or_wrong_is_named(compose_raw, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="init_from"):
        parse(compose_raw("task=chat"))
    with pytest.raises(ConfigError, match="top_p = 2"):
        parse(compose_raw("task=chat", f"init_from={folder}", "top_p=2"))
    shutil.copytree(folder, tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="tokenizer.json does not exist"):
        chat.run(parse(compose_raw("task=chat", f"init_from={tmp_path}/broken")))
