"""``task=merge`` from the command line's configuration to the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from model import ModelConfig, build_model, save_pretrained
from train.__main__ import load_task
from train.checkpoint import storage
from train.checkpoint.run_state import latest
from train.config.parse import parse
from train.config.problems import ConfigError
from train.config.schema import Merger
from train.errors import InputError
from train.tasks import pretrain

QUANTISED = "layers.0.attn.wq_a"
FILE = "model.safetensors"


@pytest.fixture
def merge(tmp_path: Path, compose_raw):
    """Merge into a new folder and return it."""

    def run(*checkpoints: Path, weights: str = "null", format: str = "plain", name: str = "merged") -> Path:
        listed = ",".join(str(checkpoint) for checkpoint in checkpoints)
        settings = (f"checkpoints=[{listed}]", f"weights={weights}", f"dst={tmp_path / name}", f"format={format}")
        config = parse(compose_raw("task=merge", *settings))
        assert isinstance(config, Merger)
        load_task(config.task.kind)(config)
        return tmp_path / name

    return run


@pytest.fixture
def make(tmp_path: Path, compose_raw):
    """Write a tiny model's checkpoint folder."""

    def write(name: str, seed: int = 0, format: str = "plain", dtype=None, token: str = "a", **text: object) -> Path:
        raw = parse(compose_raw("model=tiny", "data.vocab_size=512")).model
        raw["text_config"] |= {"engram_layer_ids": [], "engram_num_embeddings": [], **text}
        model = build_model(ModelConfig.from_dict(raw), seed=seed)
        generator = torch.Generator().manual_seed(seed)
        for bias, other in model.router_biases():
            bias.normal_(generator=generator), other.normal_(generator=generator)
        tokenizer = Tokenizer(models.WordLevel({token: 0, "[UNK]": 1}, "[UNK]"))
        save_pretrained(model, tmp_path / name, tokenizer, dtype=dtype, format=format)
        return tmp_path / name

    return write


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / FILE)


def same_bytes(first: Path, second: Path) -> bool:
    return (first / FILE).read_bytes() == (second / FILE).read_bytes()


def test_a_model_with_itself_is_itself(make, merge) -> None:
    plain, released = make("plain"), make("released", format="released")
    assert same_bytes(merge(plain, plain, name="a"), plain)
    assert same_bytes(merge(plain, plain, plain, name="b"), plain), "thirds have no exact fp64"
    assert same_bytes(merge(released, released, format="released", name="c"), released)
    assert same_bytes(merge(plain, format="released", name="d"), released)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert json.loads((plain.parent / "a" / name).read_text()) == json.loads((plain / name).read_text())


def test_the_average_is_that_of_fp64(make, merge) -> None:
    first, second = make("first", seed=1), make("second", seed=2)
    a, b, merged = stored(first), stored(second), stored(merge(first, second, weights="[0.3,0.7]"))
    assert merged.keys() == a.keys() and "layers.1.ffn.gate.bias_vl" in merged and "layers.0.hc_attn_fn" in merged
    for name, tensor in merged.items():
        exact = 0.3 * a[name].double() + 0.7 * b[name].double()
        assert tensor.dtype == a[name].dtype and torch.equal(tensor, exact.to(tensor.dtype)), name
    beyond = stored(merge(first, second, weights="[-1,2]", name="beyond"))
    assert torch.equal(beyond["norm.weight"], 2 * b["norm.weight"] - a["norm.weight"])


def test_the_widest_type_of_each_tensor_is_kept(make, merge) -> None:
    wide, narrow = make("wide", seed=1), make("narrow", seed=2, dtype=torch.bfloat16)
    a, b = stored(wide), stored(narrow)
    mixed = stored(merge(narrow, wide, weights="[0.5,0.5]", name="mixed"))
    assert torch.equal(mixed["embed.weight"], (0.5 * a["embed.weight"].double() + 0.5 * b["embed.weight"]).float())
    alone = stored(merge(narrow, narrow, name="alone"))
    assert all(alone[name].dtype == b[name].dtype and torch.equal(alone[name], b[name]) for name in b)


def test_weight_one_and_zero_is_the_first(make, merge) -> None:
    first, second = make("first", seed=1, format="released"), make("second", seed=2, format="released")
    damaged = stored(second)
    damaged["norm.weight"][0] = torch.nan  # what takes no part may hold anything
    save_file(damaged, second / FILE)
    assert same_bytes(merge(first, second, weights="[1,0]", format="released"), first)


def test_quantised_models_keep_the_scales_of_what_did_not_change(make, merge) -> None:
    folder = make("odd", format="released")
    tensors = stored(folder)
    tensors[f"{QUANTISED}.weight"] = torch.ones_like(tensors[f"{QUANTISED}.weight"].float()).to(torch.float8_e4m3fn)
    tensors[f"{QUANTISED}.scale"] = torch.ones_like(tensors[f"{QUANTISED}.scale"].float()).to(torch.float8_e8m0fnu)
    save_file(tensors, folder / FILE)  # scales that no rule would find
    again = stored(merge(folder, folder, format="released", name="again"))
    through = stored(merge(merge(folder, folder, name="plain"), format="released", name="through"))
    for found in (again, through):
        assert all(torch.equal(found[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in tensors)
    other = make("other", seed=5, format="released")
    mixed = stored(merge(folder, other, name="mixed"))[f"{QUANTISED}.weight"]
    theirs = stored(merge(other, name="theirs"))[f"{QUANTISED}.weight"]
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(mixed, (0.5 + 0.5 * theirs.double()).bfloat16())


@pytest.mark.slow
def test_runs_and_folders_mix(make_config, merge) -> None:
    """The tiny model with Engram and stacked experts: a run directory, its checkpoint and another run's export."""
    first = make_config("name=first", "checkpoint.export=plain", "task.tokens=500")
    second = make_config("name=second", "checkpoint.export=plain", "task.tokens=500", "seed=1")
    for config in (first, second):
        pretrain.run(config)
    exports = [config.run_dir / "export" for config in (first, second)]
    newest = latest(first.run_dir / "checkpoints")
    assert same_bytes(merge(first.run_dir, newest, name="self"), exports[0])
    a, b = map(stored, exports)
    mixed = merge(first.run_dir, exports[1], weights="[0.25,0.75]", name="mixed")
    for name, tensor in stored(mixed).items():
        assert torch.equal(tensor, (0.25 * a[name].double() + 0.75 * b[name].double()).float()), name
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        assert (mixed / name).read_text() == (exports[0] / name).read_text(), name
    pretrain.run(make_config("name=third", f"init_from={mixed}", "task.tokens=300"))


def test_rows_come_from_whichever_chunk_holds_them(tmp_path: Path) -> None:
    """As a run of several processes leaves them: a tensor in pieces, and one without axes."""
    whole = torch.arange(24.0).reshape(8, 3)
    pieces = {0: whole[:3].clone(), 3: whole[3:6].clone(), 6: whole[6:].clone()}
    tensors = {
        "x": storage.ShardedTensor((8, 3), torch.float32, pieces),
        "n": storage.ShardedTensor.whole(torch.tensor(7)),
    }
    storage.save(tmp_path / "saved", tensors, lambda folder, index: None)
    index = storage.read_index(tmp_path / "saved")
    with storage.open_rows(tmp_path / "saved", index) as read:
        assert torch.equal(read("x", None), whole) and read("n", None) == 7
        for start, stop in ((0, 3), (2, 7), (4, 5), (6, 8), (0, 8)):
            assert torch.equal(read("x", slice(start, stop)), whole[start:stop]), (start, stop)
    file = tmp_path / "saved" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(storage.CheckpointError, match="rank-00000.safetensors cannot be read"):
        storage.open_rows(tmp_path / "saved", index).__enter__()


def test_drafter_tensors_are_merged_where_all_have_them(make, merge, capsys) -> None:
    folder, without = make("with"), make("without", seed=1)
    tensors = stored(folder) | {"mtp.0.norm.weight": torch.arange(4.0)}
    save_file(tensors, folder / FILE)
    assert torch.equal(stored(merge(folder, folder, name="both"))["mtp.0.norm.weight"], torch.arange(4.0))
    assert "left out" not in capsys.readouterr().out
    assert "mtp.0.norm.weight" not in stored(merge(folder, without, name="one"))
    printed = capsys.readouterr().out
    assert "1 drafter tensors (" in printed and "are left out: not every checkpoint has them" in printed


def test_what_does_not_fit_is_named_and_nothing_is_written(make, merge, tmp_path: Path) -> None:
    folder = make("folder")
    with pytest.raises(InputError, match=r"another model: model\.text_config\.sliding_window is 16, expected \d+"):
        merge(folder, make("window", sliding_window=16))
    with pytest.raises(InputError, match=r"another tokenizer: tokenizer\.model\.vocab\.a is None, expected 0"):
        merge(folder, make("words", token="b"))
    with pytest.raises(InputError, match="nowhere is not a folder; name a checkpoint folder, a run directory or one"):
        merge(folder, tmp_path / "nowhere")
    less = make("less")
    save_file({name: tensor for name, tensor in stored(less).items() if name != "norm.weight"}, less / FILE)
    with pytest.raises(InputError, match=r"less does not contain this model:\s+missing: norm.weight"):
        merge(folder, less)
    broken = make("broken")
    save_file(stored(broken) | {"norm.weight": torch.full((32,), torch.inf)}, broken / FILE)
    with pytest.raises(InputError, match="norm.weight of the merged checkpoint has a NaN or infinite value"):
        merge(folder, broken)
    assert not (tmp_path / "merged").exists() and not list(tmp_path.glob(".merged-*"))
    with pytest.raises(InputError, match="folder exists already"):
        merge(folder, name="folder")


def test_weights_are_checked(compose_raw) -> None:
    def problems(weights: str) -> str:
        with pytest.raises(ConfigError) as caught:
            parse(compose_raw("task=merge", "checkpoints=[a,b]", "dst=c", f"weights={weights}"))
        return str(caught.value)

    assert "weights = [0.5, 0.4]: the sum of the weights must be 1, but is 0.9" in problems("[0.5,0.4]")
    assert "weights = [1.0]: must be 2 numbers, one for each checkpoint" in problems("[1.0]")
    assert "weights = []: must be 2 numbers, one for each checkpoint" in problems("[]")
    for wrong in ("inf", "nan", "x"):
        assert "weights.1 = " in problems(f"[1,{wrong}]"), wrong
    with pytest.raises(ConfigError, match=r"dst is missing(.|\s)*weihgts = .*Did you mean weights"):
        parse(compose_raw("task=merge", "checkpoints=[a]", "weihgts=[1]"))
