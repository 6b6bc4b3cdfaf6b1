"""A run on frozen weights that stay packed is the run on their values, to the last bit, and holds less."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import model.huggingface  # noqa: F401  registers the class
from model import save_pretrained
from model.packed import PackedWeight, holds_packed
from tests.train.tasks.test_sft import write_chats
from train.build import build
from train.config.parse import parse
from train.config.problems import ConfigError
from train.config.schema import Config
from train.lora import inject
from train.lora.peft_format import read_changes
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


@pytest.mark.slow
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


@pytest.fixture
def adapter(make, tmp_path: Path) -> Path:
    """Our adapter on linear layers (target_modules of peft) and on experts and wo_a (target_parameters)."""
    run = build(make("lora.targets=[attention,shared_experts,experts]", "runtime.frozen=values"))
    draw = torch.Generator().manual_seed(0)
    for parameter in inject.trained_parameters(run.model).values():
        parameter.data.normal_(std=0.1, generator=draw)
    inject.save_adapter(run.model, tmp_path / "peft", "base", biases=False)
    return tmp_path / "peft"


def test_peft_loads_and_trains_our_adapter_on_packed_weights(quantised: Path, adapter: Path, tmp_path: Path) -> None:
    """On the transformers class: losses, gradients and the trained adapter are those on the unpacked weights."""
    ids = torch.randint(5, 500, (2, 24), generator=torch.Generator().manual_seed(1))
    found = []
    for packed in (True, False):
        language_model = AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.float32, packed=packed)
        assert holds_packed(language_model) == packed
        tuned = peft.PeftModel.from_pretrained(language_model, str(adapter), is_trainable=True).train()
        assert holds_packed(tuned) == packed
        trained = {name: p for name, p in tuned.named_parameters() if p.requires_grad}
        wrapped = {name.split(".lora_")[0] for name in trained}
        assert any("experts.base_layer" in name for name in wrapped) and any(".wq_a" in name for name in wrapped)
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
        losses = []
        for _ in range(2):
            loss = tuned(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
            gradients = {name: parameter.grad.clone() for name, parameter in trained.items()}
            optimizer.step()
            optimizer.zero_grad()
        found.append((losses, gradients, {name: parameter.detach() for name, parameter in trained.items()}))
        if packed:
            for merge in (tuned.merge_and_unload, tuned.merge_adapter):
                with pytest.raises(RuntimeError, match="python -m train task=convert src=BASE adapter=ADAPTER"):
                    merge()
            tuned.save_pretrained(tmp_path / "trained")
            assert read_changes(tmp_path / "trained", language_model.model.config.text.n_routed_experts)
    (losses, gradients, after), (theirs, their_gradients, their_after) = found
    assert losses == theirs and losses[1] != losses[0] and gradients.keys() == their_gradients.keys()
    for name in gradients:
        assert torch.equal(gradients[name], their_gradients[name]) and torch.equal(after[name], their_after[name]), name
    assert all(gradient.abs().max() > 0 for name, gradient in gradients.items() if ".experts." not in name)


def test_packed_weights_are_not_trained_by_mistake(quantised: Path) -> None:
    language_model = AutoModelForCausalLM.from_pretrained(quantised).train()
    ids = torch.arange(5, 15)[None]
    with pytest.raises(ValueError, match=r"are kept packed and are not trained.*from_pretrained\(..., packed=False\)"):
        language_model(input_ids=ids, labels=ids)
    language_model.requires_grad_(False)
    language_model.model.head.weight.requires_grad_(True)
    language_model(input_ids=ids, labels=ids).loss.backward()
    assert language_model.model.head.weight.grad.abs().max() > 0


@pytest.mark.slow
def test_a_run_with_tables_on_the_host_is_the_run_on_packed_ones(make) -> None:
    device, host = (make(f"name={kind}", f"runtime.tables={kind}", "task.tokens=300") for kind in ("device", "host"))
    for config in (device, host):
        pretrain.run(config)
    assert len(losses(device)) > 2 and losses(device) == losses(host)
    ours, theirs = (load_file(config.run_dir / "adapter/adapter_model.safetensors") for config in (device, host))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    tables = sum(p.packed_bytes for p in build(host).model.parameters() if getattr(p, "on_host", False))
    assert tables > 0 and build(device).memory()["weights"] - build(host).memory()["weights"] == tables


def test_tables_that_are_trained_cannot_stay_on_the_host(make) -> None:
    with pytest.raises(ConfigError, match='runtime.tables = "host": maps tables that are not trained'):
        make("runtime.tables=host", "lora.targets=[]")


@pytest.mark.slow
def test_a_run_on_packed_weights_is_continued(make) -> None:
    for tokens in (600, 1200):
        pretrain.run(make("name=split", f"task.tokens={tokens}", "checkpoint.every=1"))
    pretrain.run(make("name=whole", "task.tokens=1200", "checkpoint.every=1"))
    split, whole = ((losses(make(f"name={name}"))[-2:]) for name in ("split", "whole"))
    assert split == whole
