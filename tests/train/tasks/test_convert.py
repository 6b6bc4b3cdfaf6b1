"""``task=convert`` from the command line's configuration to the folder."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from model import ModelConfig, build_model, load_pretrained, save_pretrained
from train.__main__ import load_task
from train.config.parse import parse
from train.config.problems import ConfigError
from train.config.schema import Conversion


@pytest.fixture
def plain(tmp_path, compose_raw):
    raw = parse(compose_raw("model=tiny", "data.vocab_size=512")).model
    raw["text_config"] |= {"engram_layer_ids": [], "engram_num_embeddings": []}
    save_pretrained(build_model(ModelConfig.from_dict(raw)), tmp_path / "plain")
    return tmp_path / "plain"


def test_there_and_back(tmp_path, compose_raw, plain, capsys) -> None:
    def run(src, dst, format) -> None:
        config = parse(compose_raw("task=convert", f"src={src}", f"dst={dst}", f"format={format}"))
        assert isinstance(config, Conversion)
        load_task(config.task.kind)(config)

    first, back, again = (tmp_path / name for name in ("first", "back", "again"))
    run(plain, first, "released")
    assert "format=released" in capsys.readouterr().out
    assert json.loads((first / "config.json").read_text())["quantization_config"]["expert_dtype"] == "fp4"
    run(first, back, "bf16")
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    run(back, again, "released")
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    stored = load_file(first / "model.safetensors")
    assert stored["layers.0.ffn.experts.0.w1.weight"].dtype == torch.int8
    ids = torch.arange(10)[None]
    assert torch.equal(load_pretrained(first)(ids).logits, load_pretrained(back)(ids).logits)
    with pytest.raises(ValueError, match="again already exists"):
        run(first, again, "released")
    with pytest.raises(FileNotFoundError, match="nowhere/config.json does not exist"):
        run(tmp_path / "nowhere", tmp_path / "x", "bf16")


def test_all_problems_are_reported_at_once(compose_raw) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(compose_raw("task=convert", "scr=a", "format=int4", "task.tokens=5"))
    text = str(caught.value)
    for expected in (
        'scr = "a": no such key. Did you mean src?',
        "src is missing",
        "dst is missing",
        "format = \"int4\": should be 'released' or 'bf16'",
        "task.tokens = 5: no such key. The keys in task are: kind",
    ):
        assert expected in text, text
    assert len(caught.value.problems) == 5
