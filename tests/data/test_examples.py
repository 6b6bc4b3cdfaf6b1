"""Example conversations: real lines and images, split so that nothing held out was seen."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from data import DataConfig, examples
from data.build import build_loaders
from data.open import open_sources

from .conftest import VISION


@pytest.fixture(scope="module")
def modules():
    return examples.modules()


def pairs(records):
    return [(r["messages"][0]["content"].partition("\n")[2], r["messages"][1]["content"]) for r in records]


@pytest.mark.slow
def test_the_missing_name_is_asked_for_and_nowhere_told(modules):
    for line, name in pairs(modules[0])[::50] + pairs(modules[1]):
        assert examples.BLANK in line and name not in line
    assert any(name == "os" and f"{examples.BLANK}.path.join(" in line for line, name in pairs(modules[0]))


def test_what_is_held_out_is_in_no_training_file(modules):
    train, valid = map(pairs, modules)
    assert len(train) > 20 * len(valid) > 1000
    assert not {line for line, _ in train} & {line for line, _ in valid}
    _, held_out = open_sources(DataConfig(source="stdlib"))
    text = "".join(file.path.read_text(encoding="utf-8", errors="replace") for file in held_out.files)
    assert all(line.replace(examples.BLANK, name) in text for line, name in valid)


@pytest.mark.slow
def test_digits_are_conversations_with_images(tmp_path, tokenizer):
    done = subprocess.run(
        [sys.executable, "-m", "data.examples", "digits", str(tmp_path)], capture_output=True, text=True, check=True
    )
    counts = [len((tmp_path / f"{split}.jsonl").read_text().splitlines()) for split in ("train", "valid")]
    assert f"{counts[0]} conversations" in done.stdout and sum(counts) == 1797 and counts[1] > 300
    names = {json.loads(line)["messages"][1]["content"] for line in (tmp_path / "valid.jsonl").open()}
    assert len(names) == 10
    paths = [str(tmp_path / f"{split}.jsonl") for split in ("train", "valid")]
    cfg = DataConfig(source="chat", field="messages", paths=paths[:1], validation_paths=paths[1:])
    _, valid = build_loaders(cfg, tokenizer, seq_len=128, batch_rows=2, vision=VISION)
    batch = next(iter(valid))
    assert len(batch["image_grid_hws"]) == int((batch["seq_lens"] > 0).sum())


def test_a_wrong_command_says_how_it_is_used():
    with pytest.raises(SystemExit, match="usage: python -m data.examples modules|digits FOLDER"):
        examples.main(["digits"])
