"""A run on frozen weights that stay packed is the run on their values, to the last bit, and holds less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model import save_pretrained
from model.packed import PackedWeight, holds_packed
from tests.train.tasks.test_sft import write_chats
from train.build import build
from train.config.parse import parse
from train.config.schema import Config
from train.tasks import pretrain


@pytest.fixture(scope="module")
def quantised(compose_raw, overrides, tmp_path_factory) -> Path:
    """A checkpoint in the released format."""
    folder = tmp_path_factory.mktemp("quantised")
    run = build(parse(compose_raw(*overrides, f"output={folder}")))
    save_pretrained(run.model, folder / "export", run.tokenizer, format="released")
    return folder / "export"


@pytest.fixture
def make(compose_raw, overrides, quantised: Path, tmp_path: Path):
    """``make("key=value", ...)``: the configuration of a short run with an adapter on every kind of weight."""
    kept = [text for text in overrides if not text.startswith(("model=", "data.source", "data.paths", "data.valid"))]
    chats = write_chats(tmp_path, 60)

    def configure(*changes: str) -> Config:
        fixed = ["task=sft", "lora.targets=[attention,compressor,indexer,shared_experts,experts,engram,embed,head]"]
        fixed += ["lora.rank=4", f"output={tmp_path}", f"init_from={quantised}", "task.sample_tokens=3"]
        fixed += [f"data.paths=[{chats}]", "data.validation_share=0.2", "task.tokens=600", "checkpoint.export=released"]
        return parse(compose_raw(*kept, *fixed, "optim.schedule.peak=1.0e-2", *changes))

    return configure


def losses(config: Config) -> list[float]:
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    return [value for line in lines for key, value in json.loads(line).items() if key in ("loss", "grad_norm")]


def test_an_adapter_on_packed_weights_is_the_one_on_their_values(make) -> None:
    packed, values = (make(f"name={kind}", f"runtime.frozen={kind}") for kind in ("packed", "values"))
    for config in (packed, values):
        pretrain.run(config)
    assert len(losses(packed)) > 4 and losses(packed) == losses(values)
    for file in ("adapter/adapter_model.safetensors", "adapter/router_biases.safetensors"):
        ours, theirs = (load_file(config.run_dir / file) for config in (packed, values))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    ours, theirs = (load_file(config.run_dir / "export/model.safetensors") for config in (packed, values))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor.float(), theirs[name].float()), name


def test_only_what_is_frozen_and_stored_so_stays_packed(make, make_config) -> None:
    run = build(make())
    assert holds_packed(run.model) and not any(
        isinstance(parameter, PackedWeight) for parameter in run.model.parameters() if parameter.requires_grad
    )
    whole = build(make("runtime.frozen=values"))
    assert not holds_packed(whole.model) and run.memory()["weights"] < 0.6 * whole.memory()["weights"]
    assert not holds_packed(build(make("lora.targets=[]")).model), "full fine-tuning trains values"


@pytest.mark.slow
def test_a_run_on_packed_weights_is_continued(make) -> None:
    for tokens in (600, 1200):
        pretrain.run(make("name=split", f"task.tokens={tokens}", "checkpoint.every=1"))
    pretrain.run(make("name=whole", "task.tokens=1200", "checkpoint.every=1"))
    split, whole = ((losses(make(f"name={name}"))[-2:]) for name in ("split", "whole"))
    assert split == whole
