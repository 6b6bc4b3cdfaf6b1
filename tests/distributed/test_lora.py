"""An adapter on experts and a head that are split over two processes: trained and written as one process does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import steps
import torch
from ranks import Group
from safetensors.torch import load_file

from model import save_pretrained
from train.build import build

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_ten_steps_of_an_adapter_are_those_of_one_process(corpus: Path, alone: Callable[[str], dict]) -> None:
    base = build(steps.configure("plain", 1, 1, corpus))
    save_pretrained(base.model, corpus / "base", base.tokenizer)
    with Group(2, ["tests/distributed/steps.py", str(corpus), "lora@2"], corpus / "lora") as group:
        for rank, ended in enumerate(group.finish()):
            assert ended.code == 0, f"rank {rank}:\n{ended.output}"
    found, expected = torch.load(corpus / "2-lora@2.pt"), alone("lora")
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(expected["losses"]), rtol=1e-6, atol=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=2e-5)
    assert found["tensors"].keys() == expected["tensors"].keys()
    plain, trained = base.model.state_dict(), 0
    for name, tensor in expected["tensors"].items():
        if ".lora_" in name:
            trained += 1
            assert tensor.abs().max() > 0, f"{name} has not moved"
            assert (found["tensors"][name] - tensor).abs().max() < 1e-5, name
        elif ".gate.bias" not in name:
            assert torch.equal(found["tensors"][name], plain[name.replace(".base_layer", "")]), name
    assert trained == 2 * (5 * 6 + 3 * 6 + 1)
    written = [load_file(corpus / f"adapter-{size}" / "adapter_model.safetensors") for size in (1, 2)]
    assert written[0].keys() == written[1].keys() and len(written[0]) == trained
    for name, tensor in written[0].items():
        assert (written[1][name] - tensor).abs().max() < 1e-5, name


def test_packed_frozen_weights_split_over_two_processes_train_as_their_values_do(corpus: Path) -> None:
    base = build(steps.configure("plain", 1, 1, corpus))
    save_pretrained(base.model, corpus / "quantised", base.tokenizer, format="released")
    settings = [
        "-m", "train", "task=pretrain", "lora=all", "lora.rank=4", f"init_from={corpus}/quantised", "parallel=ep2",
        "parallel.device=cpu", "data.source=text", f"data.paths=[{corpus}/text]", f"output={corpus}",
        f"data.validation_paths=[{corpus}/text/token.txt]", f"data.cache_dir={corpus}/cache", "task.seq_len=64",
        "task.micro_batch=2", "task.global_batch_rows=2", "task.tokens=500", "task.sample_tokens=0",
        "data.validation_rows=2", "checkpoint.export=released", "logger.progress=false",
    ]  # fmt: skip
    for kind in ("packed", "values"):
        with Group(2, [*settings, f"name={kind}", f"runtime.frozen={kind}"], corpus / f"ranks-{kind}") as group:
            for rank, ended in enumerate(group.finish()):
                assert ended.code == 0, f"rank {rank}:\n{ended.output}"
    packed, values = (
        [json.loads(line)["loss"] for line in (corpus / kind / "metrics.jsonl").read_text().splitlines()]
        for kind in ("packed", "values")
    )
    assert len(packed) > 4 and packed == values
    ours, theirs = (load_file(corpus / kind / "export" / "model.safetensors") for kind in ("packed", "values"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].float(), theirs[name].float()) for name in ours)
