"""Reading and writing the released layout: names, shards, exact round trips, refusals, nothing half-written."""

from __future__ import annotations

import json

import pytest
import torch
from golden_files import golden
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import tiny_model, tokens
from tokenizers import Tokenizer

import model.checkpoint.released
from model import DeepseekV41, load_pretrained, load_weights, save_pretrained
from model.checkpoint.released import INDEX, SINGLE


def same(a: DeepseekV41, b: DeepseekV41) -> bool:
    theirs = b.state_dict()
    return all(t.dtype == theirs[k].dtype and torch.equal(t, theirs[k]) for k, t in a.state_dict().items())


def test_golden_names_come_back_bit_for_bit(tmp_path) -> None:
    """Read the oracle's checkpoint, write ours: same names, shapes, types and bits, same tokenizer."""
    source = golden("vision")
    loaded = load_pretrained(source)
    save_pretrained(loaded, tmp_path / "out", Tokenizer.from_file(str(source / "tokenizer.json")))
    ours, theirs = load_file(tmp_path / "out" / SINGLE), load_file(source / SINGLE)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
    again = load_pretrained(tmp_path / "out")
    assert same(loaded, again) and torch.equal(loaded.token_map, again.token_map) and again.config == loaded.config


def test_round_trip_in_bf16_keeps_fp32_where_the_report_does(tmp_path) -> None:
    built = tiny_model(vision=True)
    save_pretrained(built, tmp_path / "bf16", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "bf16" / SINGLE)
    fp32 = ("layers.0.hc_attn_fn", "layers.0.hc_ffn_scale", "layers.1.attn.attn_sink", "layers.0.ffn.gate.bias_vl")
    assert {stored[name].dtype for name in fp32} == {torch.float32}
    for name in ("embed.weight", "layers.2.ffn.experts.3.w2.weight", "layers.0.attn.wo_a.weight"):
        assert stored[name].dtype == torch.bfloat16
    assert torch.equal(stored["layers.2.ffn.experts.3.w2.weight"], built.layers[2].ffn.experts.w2[3].bfloat16())
    wide = load_pretrained(tmp_path / "bf16")
    assert torch.equal(wide.embed.weight, built.embed.weight.bfloat16().float())
    assert torch.equal(wide.layers[0].hc_attn.fn, built.layers[0].hc_attn.fn)
    narrow = load_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)
    assert narrow.embed.weight.dtype == torch.bfloat16 and narrow.layers[0].hc_attn.fn.dtype == torch.float32
    save_pretrained(narrow, tmp_path / "again")
    assert same(narrow, load_pretrained(tmp_path / "again", dtype=torch.bfloat16))


def test_shards_with_index(tmp_path) -> None:
    built = tiny_model()
    save_pretrained(built, tmp_path / "m", shard_bytes=20_000)
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 3 and not (tmp_path / "m" / SINGLE).exists()
    assert [f.name for f in files] == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    size = 0
    for file in files:
        tensors = load_file(file)
        assert all(index["weight_map"][name] == file.name for name in tensors)
        bytes_here = sum(t.numel() * t.element_size() for t in tensors.values())
        assert bytes_here <= 20_000 or len(tensors) == 1
        size += bytes_here
    assert index["metadata"]["total_size"] == size
    assert same(built, load_pretrained(tmp_path / "m"))


def changed(folder, change) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


REFUSED = [
    (lambda t: t.pop("layers.2.ffn.experts.3.w1.weight"), "missing: layers.2.ffn.experts.3.w1.weight .16, 32."),
    (lambda t: t.update({"layers.0.attn.wx.weight": torch.zeros(1)}), "extra: layers.0.attn.wx.weight"),
    (lambda t: t.update({"norm.weight": torch.zeros(31)}), r"shape: norm.weight is \[31\], must be \[32\]"),
    (lambda t: t.update({"norm.weight": torch.zeros(32, dtype=torch.int8)}), "type: norm.weight is I8"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_tensor_that_does_not_fit_is_named_and_nothing_is_copied(tmp_path, change, message) -> None:
    save_pretrained(tiny_model(seed=1), tmp_path / "m")
    changed(tmp_path / "m", change)
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path / "m")
    target = tiny_model(seed=2)
    with pytest.raises(ValueError, match=message):
        load_weights(target, tmp_path / "m")
    assert same(target, tiny_model(seed=2))


def test_every_problem_is_listed(tmp_path) -> None:
    save_pretrained(tiny_model(), tmp_path / "m")
    for change, _ in REFUSED[:3]:
        changed(tmp_path / "m", change)
    with pytest.raises(ValueError) as error:
        load_pretrained(tmp_path / "m")
    assert all(word in str(error.value) for word in ("missing: ", "extra: ", "shape: "))


def test_drafter_tensors_are_left_out(tmp_path) -> None:
    built = tiny_model()
    save_pretrained(built, tmp_path / "m")
    changed(tmp_path / "m", lambda t: t.update({"mtp.0.norm.weight": torch.zeros(3)}))
    assert same(built, load_pretrained(tmp_path / "m"))


def test_missing_and_truncated_files_are_named(tmp_path) -> None:
    save_pretrained(tiny_model(), tmp_path / "m", shard_bytes=20_000)
    shard = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"{shard.name} is not a complete"):
        load_pretrained(tmp_path / "m")
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        load_pretrained(tmp_path / "m")
    shard.write_bytes(whole)
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    index["weight_map"]["norm.weight"] = next(
        f for f in index["weight_map"].values() if f != index["weight_map"]["norm.weight"]
    )
    (tmp_path / "m" / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="norm.weight is in .* does not contain it"):
        load_pretrained(tmp_path / "m")
    for file in (tmp_path / "m").glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=f"neither {INDEX} nor {SINGLE}"):
        load_pretrained(tmp_path / "m")


def test_engram_needs_its_tokenizer(tmp_path) -> None:
    save_pretrained(tiny_model(engram=True), tmp_path / "m")
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        load_pretrained(tmp_path / "m")


def test_a_failed_save_leaves_the_old_folder_and_nothing_else(tmp_path, monkeypatch) -> None:
    old = tiny_model(seed=1)
    save_pretrained(old, tmp_path / "m")
    written = []

    def full_disk(path, layout):
        if written:
            path.write_bytes(b"half")
            raise OSError("no space left on device")
        written.append(path)
        return fill(path, layout)

    fill = model.checkpoint.released._fill
    monkeypatch.setattr(model.checkpoint.released, "_fill", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_pretrained(tiny_model(seed=2), tmp_path / "m", shard_bytes=20_000)
    with pytest.raises(OSError, match="no space"):
        save_pretrained(tiny_model(seed=2), tmp_path / "new", shard_bytes=20_000)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert same(old, load_pretrained(tmp_path / "m"))


def test_a_save_replaces_the_folder_whole(tmp_path) -> None:
    save_pretrained(tiny_model(seed=1), tmp_path / "m", shard_bytes=20_000)
    new = tiny_model(seed=2)
    save_pretrained(new, tmp_path / "m")
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["config.json", "generation_config.json", SINGLE]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert same(new, load_pretrained(tmp_path / "m"))


def test_shards_hold_no_views(tmp_path) -> None:
    """A stacked expert is written alone, not with the storage of all of them; loading is exact for the logits."""
    built = tiny_model()
    save_pretrained(built, tmp_path / "m")
    with safe_open(tmp_path / "m" / SINGLE, framework="pt") as file:
        assert file.get_tensor("layers.0.ffn.experts.1.w1.weight").untyped_storage().nbytes() == 16 * 32 * 4
    ids = tokens(1, 20)
    assert torch.equal(built(ids).logits, load_pretrained(tmp_path / "m")(ids).logits)
