"""A packed base, a drafter and an adapter have the names, types and shapes that a serving engine loads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model import ModelConfig, save_pretrained
from model.checkpoint.released import read_headers
from tests.model.tiny import tiny_drafter
from tests.train.lora.serving_names import ADAPTED, VISION, accepted
from train.config.schema import LoraConfig
from train.lora import inject
from train.lora.peft_format import read_adapter
from train.lora.serving import part_of, split_for_serving, write_for_serving


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A released folder with a drafter, Engram and a vision tower, and an adapter on every kind of weight."""
    folder = tmp_path_factory.mktemp("serving")
    drafter = tiny_drafter(engram=True, vision=True)
    save_pretrained(drafter.backbone, folder / "base", format="released", drafter=drafter)
    targets = ["attention", "indexer", "compressor", "shared_experts", "experts", "engram", "embed", "head", "vision"]
    inject.add_adapter(drafter.backbone, LoraConfig(targets=targets, rank=3, alpha=6.0, dropout=0.0), seed=0)
    draw = torch.Generator().manual_seed(0)
    for parameter in inject.trained_parameters(drafter.backbone).values():
        parameter.data.normal_(generator=draw)
    inject.save_adapter(drafter.backbone, folder / "peft", "base", biases=True)
    return folder


def test_the_packed_base_and_the_drafter_are_what_an_engine_loads(written: Path) -> None:
    config = ModelConfig.load(written / "base")
    quantization = json.loads((written / "base/config.json").read_text())["quantization_config"]
    assert quantization["weight_block_size"] == [32, 32] and quantization["scale_fmt"] == "ue8m0"
    assert quantization["expert_dtype"] == "fp4" and quantization["quant_method"] == "fp8"
    table, used = accepted(config), set()
    for name, header in read_headers(written / "base").items():
        if VISION.fullmatch(name):
            continue
        rows = [row for row in table if re.fullmatch(row[0], name)]
        assert len(rows) == 1, f"{name}: {rows}"
        used.add(rows[0][0])
        assert header.dtype in rows[0][1] and header.shape == rows[0][2], f"{name}: {header}, engine {rows[0]}"
    assert {row[0] for row in table} == used, "a tensor that the engine waits for is missing"


def test_the_adapter_is_what_an_engine_loads_and_adds(written: Path, tmp_path: Path) -> None:
    experts = ModelConfig.load(written / "base").text.n_routed_experts
    adapter = read_adapter(written / "peft", experts)
    beside, rest = split_for_serving(adapter)
    write_for_serving(beside, tmp_path / "adapter", "base")
    shapes = {name: header.shape for name, header in read_headers(written / "base").items()}
    tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    for name, tensor in tensors.items():
        assert ADAPTED.fullmatch(name), name
        weight = name.removeprefix("base_model.model.").split(".lora_")[0] + ".weight"
        rows, columns = shapes[weight]
        columns *= 2 if ".experts." in weight else 1
        assert tensor.shape == ((3, columns) if ".lora_A." in name else (rows, 3)), name
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"]) == (3, 6, "none")
    assert config["target_modules"] == ["w1", "w2", "w3", "wkv", "wo_b", "wq_a", "wq_b"]
    again = read_adapter(tmp_path / "adapter", experts)
    assert again.factors.keys() == beside.factors.keys() and len(tensors) == 2 * len(beside.factors)
    for name, (b, a) in again.factors.items():
        assert torch.equal(b, beside.factors[name][0]) and torch.equal(a, beside.factors[name][1])
    left = {part_of(name) for name in rest.changes()}
    assert left == {"attention", "indexer", "compressor", "engram", "embed", "head", "vision", "router biases"}
    assert {name.split(".")[-2] for name in rest.factors if part_of(name) == "attention"} == {"wo_a"}
