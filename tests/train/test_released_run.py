"""A run that begins with a quantised checkpoint gives back the bytes of every weight that it did not train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import train.build
from model import load_pretrained, save_pretrained
from train.checkpoint.run_state import latest
from train.config.problems import ConfigError
from train.session import begin
from train.tasks import pretrain

E8M0 = torch.float8_e8m0fnu


def bytes_of(folder: Path) -> dict[str, torch.Tensor]:
    """Codes and scales."""
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor.view(torch.uint8) for name, tensor in tensors.items() if tensor.dtype.itemsize == 1}


def released_folder(folder: Path, run: train.build.Run) -> dict[str, torch.Tensor]:
    """A quantised checkpoint of the run's model whose codes and scales follow no rule."""
    save_pretrained(run.model, folder, run.tokenizer, format="released")
    draw = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dtype == E8M0:
            tensors[name] = torch.randint(112, 118, tensor.shape, dtype=torch.uint8, generator=draw).view(E8M0)
        elif tensor.dtype.itemsize == 1:
            codes = torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=draw)
            if tensor.dtype != torch.int8:
                codes[codes & 127 == 127] = 0x80  # NaN
            tensors[name] = codes.view(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return bytes_of(folder)


@pytest.mark.slow
def test_the_export_of_a_run_that_rounds_its_weights_has_its_logits(make_config) -> None:
    """Quantisation-aware training of everything that the released format rounds loses nothing in the export."""
    rounding = [f"runtime.{kind}_quant=true" for kind in ("expert", "dense", "engram")]
    config = make_config(*rounding, "optim=report", "optim.schedule.peak=0.01", "checkpoint.export=released")
    before = train.build.build(config).model
    pretrain.run(config)
    run = train.build.build(config)
    run.resume(latest(config.run_dir / "checkpoints"))
    ids = next(iter(run.valid_batches))["input_ids"]
    with torch.no_grad():
        logits = run.model(ids).logits
        assert not torch.allclose(logits, before(ids).logits, atol=0.1), "it has trained"
        for packed in (False, True):
            assert torch.equal(logits, load_pretrained(config.run_dir / "export", packed=packed)(ids).logits)


def test_what_was_not_trained_has_its_bytes_again(make_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms are trained, in two parts with a restart between, one of them written in the background."""
    source = released_folder(tmp_path / "released", train.build.build(make_config()))
    assert len(source) > 100

    def freeze(config, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)

    monkeypatch.setattr(train.build, "freeze", freeze)
    given = [f"init_from={tmp_path}/released", "checkpoint.export=released", "task.sample_tokens=0"]
    pretrain.run(make_config(*given, "task.tokens=400", "checkpoint.asynchronous=true"))
    config = make_config(*given, "task.tokens=900")
    first = latest(config.run_dir / "checkpoints")
    pretrain.run(config)
    last = latest(config.run_dir / "checkpoints")
    assert first.name < last.name
    out = bytes_of(config.run_dir / "export")
    assert out.keys() == source.keys() and all(torch.equal(out[name], tensor) for name, tensor in source.items())
    before, after = (load_file(folder / "rank-00000.safetensors")["model.norm.weight"] for folder in (first, last))
    assert not torch.equal(before, after)
    again = make_config(f"init_from={last}", "name=again")
    run = train.build.build(again)
    begin(run)
    save_pretrained(run.model, tmp_path / "again", format="released")
    out = bytes_of(tmp_path / "again")
    assert all(torch.equal(out[name], tensor) for name, tensor in source.items()), "a run's checkpoint keeps them too"


def test_the_layout_of_the_export_is_checked(make_config) -> None:
    with pytest.raises(ConfigError, match="checkpoint.export = true: should be False, 'plain' or 'released'"):
        make_config("checkpoint.export=true")


def test_a_model_that_cannot_be_quantised_is_refused_before_training(make_config) -> None:
    odd = ("model.text_config.moe_intermediate_size=31", "checkpoint.export=released")
    with pytest.raises(ValueError, match=r"released layout:\n  layers.0.ffn.experts.0.w2.weight has 31 columns"):
        train.build.build(make_config(*odd))
