"""Weights that are kept elsewhere until they are used: the same numbers, and nothing that cannot work is tried."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM

import model.huggingface
import model.placement
from model import ForwardOptions, load_pretrained, save_pretrained
from model.packed import PackedWeight, holds_packed
from model.placement import choose_places, load_offloaded, part_sizes
from tests.model.tiny import DRAFTER, image_batch, tiny_drafter, tiny_model, tokens

SHAPE = dict(vision=True, engram=True, engram_compressed_vocab_size=64)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A model with everything, with its drafter and tokenizer: its weights in fp32, and quantised."""
    drafter = tiny_drafter(**SHAPE, **DRAFTER)
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(61)}, unk_token="w0"))
    root = tmp_path_factory.mktemp("offload")
    for format in ("plain", "released"):
        save_pretrained(drafter.backbone, root / format, tokenizer, format=format, drafter=drafter)
    return {format: root / format for format in ("plain", "released")}


def sizes_of(folder: Path) -> dict[str, int]:
    dtype = torch.bfloat16 if folder.name == "released" else torch.float32
    return part_sizes(load_pretrained(folder, dtype, packed=True))


def offloaded(folder: Path, tmp_path: Path, budget: int, **options):
    return AutoModelForCausalLM.from_pretrained(
        folder, device_map="auto", max_memory={"cpu": budget}, offload_folder=tmp_path / "offload", **options
    )


@pytest.mark.parametrize("format", ["plain", "released"])
@pytest.mark.parametrize("blocks", [0, 3])
def test_weights_on_disk_give_the_same_logits(folders, tmp_path, format: str, blocks: int) -> None:
    folder = folders[format]
    sizes = sizes_of(folder)
    budget = sizes[""] + sum(sizes[f"layers.{layer}"] for layer in range(blocks))
    there = offloaded(folder, tmp_path, budget)
    here = AutoModelForCausalLM.from_pretrained(folder, packed=False)
    places = there.hf_device_map
    assert [places[f"model.layers.{n}"] for n in range(6)] == ["cpu"] * blocks + ["disk"] * (6 - blocks)
    assert places["model.layers.1.engram.embed"] == "disk" and places["model"] == "cpu"
    assert holds_packed(there.model) == (format == "released") and not holds_packed(here.model)
    away = {name for name, p in there.model.named_parameters() if p.device.type == "meta"}
    assert all(name.startswith("layers.") for name in away) and "layers.5.attn.wq_b.weight" in away
    assert not os.listdir(tmp_path / "offload"), "the files have no names"
    for batch in ({"input_ids": tokens(2, 40)}, {k: v for k, v in image_batch().items() if k != "labels"}):
        with torch.no_grad():
            ours, theirs = (m(**batch).logits for m in (there, here))
        assert torch.equal(ours, theirs) and ours.isfinite().all()
    assert away == {name for name, p in there.model.named_parameters() if p.device.type == "meta"}, "dropped again"


def test_generation_and_the_drafter(folders, tmp_path) -> None:
    there = offloaded(folders["plain"], tmp_path, sizes_of(folders["plain"])[""])
    here = AutoModelForCausalLM.from_pretrained(folders["plain"])
    assert there.drafter is not None
    ids = tokens(2, 9)
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=2, eos_token_id=60)
    assert torch.equal(there.generate(ids, **options), here.generate(ids, **options))


def test_a_teacher_on_disk_teaches_the_same(folders, tmp_path) -> None:
    """The gradient of a student that learns from its logits."""
    found = []
    for teacher in (
        offloaded(folders["released"], tmp_path, sizes_of(folders["released"])[""]),
        AutoModelForCausalLM.from_pretrained(folders["released"], packed=False),
    ):
        student = tiny_model(seed=5)
        batch = tokens(2, 20)
        with torch.no_grad():
            wanted = teacher(batch).logits.softmax(-1)
        logits = student(input_ids=batch).logits
        (-(wanted * logits.log_softmax(-1)).sum(-1).mean()).backward()
        found.append(student.head.weight.grad)
    assert torch.equal(*found) and found[0].abs().max() > 0


def test_what_fits_is_loaded_as_always(folders) -> None:
    whole = AutoModelForCausalLM.from_pretrained(folders["plain"], device_map="auto", max_memory={"cpu": "1GiB"})
    assert not hasattr(whole, "hf_device_map") and all(p.requires_grad for p in whole.parameters())
    assert whole.device == torch.device("cpu")


def test_places_are_filled_in_order() -> None:
    sizes = {"": 10, "layers.0": 5, "layers.1": 5, "layers.2": 5, "layers.3": 5, "layers.1.engram.embed": 7}
    assert choose_places(sizes, {"cpu": 100}) == dict.fromkeys(sizes, "cpu")
    gpu = choose_places(sizes, {0: 21, 1: 9, "cpu": 8})  # room for a block that is brought there: 5
    assert gpu == {"": 0, "layers.0": 0, "layers.1": 1, "layers.2": "cpu", "layers.3": "disk",
                   "layers.1.engram.embed": "disk"}  # fmt: skip
    assert choose_places(sizes, {0: 37})["layers.1.engram.embed"] == 0, "all of it"
    with pytest.raises(ValueError, match="the head and one block need 0.00 GiB there"):
        choose_places(sizes, {0: 14, "cpu": 100})


def test_what_cannot_work_is_refused(folders, tmp_path, monkeypatch) -> None:
    folder = folders["plain"]
    enough = sizes_of(folder)[""]
    with pytest.raises(ValueError, match=r"max_memory\['cpu'\] = 0.00 GiB is too little"):
        offloaded(folder, tmp_path, enough // 2)
    with pytest.raises(ValueError, match="give offload_folder="):
        AutoModelForCausalLM.from_pretrained(folder, device_map="auto", max_memory={"cpu": enough})
    with pytest.raises(ValueError, match="must be one device or 'auto'"):
        AutoModelForCausalLM.from_pretrained(folder, device_map={"model.embed": "cpu"})
    with pytest.raises(ValueError, match="decoder_replay is not supported"):
        offloaded(folder, tmp_path, enough, runtime=ForwardOptions(decoder_replay=True))
    there = offloaded(folder, tmp_path, enough)
    with pytest.raises(ValueError, match="the weights are offloaded"):
        there.save_pretrained(tmp_path / "new")
    with pytest.raises(ValueError, match="offloaded weights cannot be trained"):
        there.train()(tokens(1, 8), labels=tokens(1, 8))

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model.placement.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        offloaded(folder, tmp_path, enough)


def test_packed_weights_on_disk_are_the_bytes_of_the_checkpoint(folders, tmp_path) -> None:
    there, _ = load_offloaded(
        folders["released"], torch.float32, {"cpu": 2 * sizes_of(folders["released"])[""]}, tmp_path
    )
    here = load_pretrained(folders["released"], packed=True)
    block = there.layers[2]
    stored = block._hf_hook.weights["ffn.experts.w1"]
    expected = here.layers[2].ffn.experts.w1
    assert isinstance(stored, PackedWeight) and torch.equal(stored.codes, expected.codes)
    assert torch.equal(stored.scale.view(torch.uint8), expected.scale.view(torch.uint8))
