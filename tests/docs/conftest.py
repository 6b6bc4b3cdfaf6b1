"""A folder in which the commands of the pages find what they name: checkpoints, texts, prompts, rewards."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from PIL import Image

from data import DataConfig, load_tokenizer
from data.tokenizer_files import tokenizer_files
from model import ModelConfig, build_model, save_pretrained
from train.build import fit_to_tokenizer
from train.config.compose import CONF_DIR

CHECKPOINTS = ("FOLDER", "A", "B", "runs/demo/export", "runs/sft/export", "runs/math/export", "runs/code/export")
CHAT = {"messages": [{"role": "user", "content": "2 plus 3?"}, {"role": "assistant", "content": "5"}]}
REWARD = """
def grade(record, answer, reasoning):
    return float(answer.strip() == record["sum"])

run = grade
"""


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder: tiny checkpoints of every name that the pages use, of the demo's vocabulary size."""
    folder = tmp_path_factory.mktemp("workplace")
    _write_data(folder)
    cache = str(folder / ".cache/data")
    data = DataConfig(source="text", paths=[str(folder / "texts")], vocab_size=4096, cache_dir=cache)
    tokenizer = load_tokenizer(data)
    raw = yaml.safe_load((CONF_DIR / "model/tiny.yaml").read_text(encoding="utf-8"))
    # As many experts as the layouts of the pages divide.
    raw["text_config"] |= {"vocab_size": 4096, "max_position_embeddings": 32768, "n_routed_experts": 384}
    raw["text_config"]["moe_intermediate_size"] = 8
    config, token_map, _ = fit_to_tokenizer(ModelConfig.from_dict(raw), tokenizer)
    model = build_model(config, token_map=token_map)
    companions = tokenizer_files(data, tokenizer)
    save_pretrained(model, folder / CHECKPOINTS[0], tokenizer, format="plain", companions=companions)
    for name in CHECKPOINTS[1:]:
        shutil.copytree(folder / CHECKPOINTS[0], folder / name, copy_function=os.link)
    vision = {**raw, **yaml.safe_load((CONF_DIR / "model/study_vision.yaml").read_text(encoding="utf-8"))}
    del vision["defaults"]
    config, token_map, _ = fit_to_tokenizer(ModelConfig.from_dict(vision), tokenizer)
    seeing = build_model(config, token_map=token_map)
    save_pretrained(seeing, folder / "runs/vision-base/export", tokenizer, format="plain", companions=companions)
    return folder


def _write_data(folder: Path) -> None:
    texts = folder / "texts"
    texts.mkdir()
    library = Path(os.__file__).parent
    for name in ("argparse", "ast", "copy", "glob", "inspect", "shlex", "statistics", "textwrap", "typing"):
        (texts / f"{name}.txt").write_text((library / f"{name}.py").read_text(encoding="utf-8"), encoding="utf-8")
    whole = [file.read_text(encoding="utf-8") for file in sorted(texts.iterdir())]
    records = [{"text": text[at : at + 2000]} for text in whole for at in range(0, min(len(text), 20000), 2000)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), folder / "texts.parquet")
    Image.new("RGB", (28, 28), "orange").save(folder / "cat.png")
    pairs = [
        {"parts": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": f"A cat, number {number}."}]}
        for number in range(32)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    (folder / "scans").mkdir()
    for number in range(32):
        Image.new("RGB", (8, 8), (8 * number, 0, 0)).save(folder / f"scans/page{number}.png")
        (folder / f"scans/page{number}.txt").write_text(f"Page {number}.", encoding="utf-8")
    chats = "".join(
        json.dumps({"messages": [{"role": "user", "content": f"{n} plus 3?"}, *CHAT["messages"][1:]]}) + "\n"
        for n in range(64)
    )
    for name in ("chats.jsonl", "runs/rl-demo/chats.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(chats, encoding="utf-8")
    for name in ("my.jsonl", "math.jsonl", "code.jsonl", "prompts.jsonl"):
        (folder / name).write_text(json.dumps({"prompt": "2 plus 3?", "sum": "5"}) + "\n", encoding="utf-8")
    preferences = (json.dumps({"prompt": f"{n} plus 3?", "chosen": "5", "rejected": "six"}) + "\n" for n in range(64))
    (folder / "preferences.jsonl").write_text("".join(preferences), encoding="utf-8")
    (folder / "my.py").write_text(REWARD, encoding="utf-8")
