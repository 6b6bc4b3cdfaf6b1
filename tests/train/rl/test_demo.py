"""The conversations and the tokenizer of the effort demo."""

from __future__ import annotations

import random
import re
import statistics
from pathlib import Path

from data import DataConfig, load_tokenizer
from data.chat.conversation import EFFORT_LINE
from data.chat.prompt import prompt_ids
from data.chat.read import read_conversation
from train.checkpoint.init_from import find_pretrained
from train.rl import demo
from train.rl.rewards import builtin


def test_conversations_reason_as_described_and_answer_what_they_saw() -> None:
    draw, looked = random.Random(0), []
    for number in range(400):
        record = demo.conversation(draw)
        read_conversation(record, "made", number)
        question, answer = record["messages"]
        items = re.findall(r"([a-l])(\d)", question["content"])
        effort, last, steps = re.fullmatch(r"(\d{3})([a-l]):((?:[a-l]\d)+)", answer["reasoning_content"]).groups()
        count = len(steps) // 2
        assert int(effort) == record["effort"] and "".join(letter for letter, _ in items) == "abcdefghijkl"
        highest = [max(digit for _, digit in items[: n + 1]) for n in range(count)]
        assert steps == "".join(letter + digit for (letter, _), digit in zip(items, highest, strict=False))
        assert steps[-2] == last and answer["content"] == steps[-1]
        looked.append((record["effort"], count))
    low, high = ([count for effort, count in looked if low <= effort < low + 50] for low in (1, 51))
    assert 0.5 < statistics.mean(high) - statistics.mean(low) < 4, "it leans towards the effort, and is mostly chance"
    assert set(range(2, 10)) <= set(low) & set(high), "habits are not bound to efforts"


def test_the_solution_is_the_highest_small_letter() -> None:
    for seed in range(200):
        record = builtin.highest(random.Random(seed))
        digits = re.findall(r"[a-l](\d)", record["prompt"])
        assert len(digits) == 12 and record["solution"] == max(digits)
        assert len(re.findall(r"[XYZ]\d", record["prompt"])) == 3 and len(record["prompt"]) == 30


def test_everything_is_made_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(demo, "CONVERSATIONS", 20)
    demo.prepare(tmp_path)
    first = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    demo.prepare(tmp_path)
    assert first == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert len((tmp_path / "chats.jsonl").read_text().splitlines()) == 20
    tokenizer = load_tokenizer(DataConfig(tokenizer=str(find_pretrained(str(tmp_path / "base")).tokenizer)))
    encoded = tokenizer.encode(EFFORT_LINE.format(75), add_special_tokens=False)
    assert "7" in encoded.tokens and "5" in encoded.tokens and len(encoded.ids) < 12
    ids = prompt_ids(tokenizer, [{"role": "user", "content": "a3X9b0"}], thinking=True, effort=60)
    said = "<｜begin▁of▁sentence｜><｜System｜>" + EFFORT_LINE.format(60) + "<｜User｜>a3X9b0<｜Assistant｜><think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == said
