"""Fine-tuning on conversations, and runs that begin with another's weights."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model import load_pretrained, save_pretrained
from train import loop
from train.build import build
from train.checkpoint.init_from import find_pretrained
from train.checkpoint.run_state import latest
from train.config.parse import parse
from train.config.problems import ConfigError
from train.config.schema import Config, to_dict
from train.evaluation.evaluate import evaluate
from train.session import begin
from train.tasks import pretrain


def write_chats(folder: Path, count: int) -> Path:
    """Sums, of which the answers can be learned."""
    lines = [
        {"messages": [{"role": "user", "content": f"{n} + 1"}, {"role": "assistant", "content": f"It is {n + 1}."}]}
        for n in range(count)
    ]
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def base(compose_raw, overrides, tmp_path_factory) -> Config:
    """A finished pre-training run with an export."""
    output = tmp_path_factory.mktemp("base")
    changes = [f"output={output}", "name=base", "task.tokens=300", "checkpoint.export=plain"]
    config = parse(compose_raw(*overrides, *changes))
    pretrain.run(config)
    return config


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats"), 60)


@pytest.fixture
def make_sft(compose_raw, overrides, base: Config, chats: Path, tmp_path: Path):
    kept = [text for text in overrides if not text.startswith(("model=", "data.source", "data.paths", "data.valid"))]

    def make(*changes: str) -> Config:
        fixed = ["task=sft", f"output={tmp_path}", f"init_from={base.run_dir}/export", f"data.paths=[{chats}]"]
        fixed += ["data.validation_share=0.2", "optim.schedule.peak=1.0e-2", "optim.schedule.floor=0.0"]
        return parse(compose_raw(*kept, *fixed, *changes))

    return make


def weights(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(latest(folder / "checkpoints") / "rank-00000.safetensors")
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}


def test_fine_tuning_begins_with_the_checkpoint_and_learns_the_answers(make_sft, base: Config) -> None:
    config = make_sft("task.tokens=3000")
    assert config.model["text_config"]["hidden_size"] == 32, "the checkpoint's, not that of conf/train.yaml"
    pretrain.run(config)
    records = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record for record in records if "bits_per_byte" in record]
    first, last = evaluations[0]["loss"], evaluations[-1]["loss"]
    assert last < 0.7 * first
    run = build(config)
    run.model.load_state_dict(weights(base.run_dir))
    assert evaluate(run)["loss"] == first, "the first evaluation is the checkpoint's"
    asked = run.tokenizer.decode(pretrain._prompt(run), skip_special_tokens=False)
    assert asked == "<｜begin▁of▁sentence｜><｜User｜>Hello!<｜Assistant｜></think>"
    log = (config.run_dir / "train.log").read_text()
    assert f"weights: {base.run_dir}/export" in log and "sample: 'Hello!' is answered" in log
    assert f"ask it:     python -m train task=chat init_from={config.run_dir}/export\n" in log
    epoch = int(re.search(r"^train data: documents \d+ tokens (\d+)", log, re.MULTILINE)[1])
    advice = "; lower task.tokens if the validation loss rises" if 3000 / epoch > 10 else ""
    assert f"\nthe run reads the training data {3000 / epoch:.2f} times (task.tokens=3000){advice}\n" in log


def test_the_export_is_the_model_and_can_be_named_again(make_sft, base: Config, tmp_path: Path) -> None:
    config = make_sft("task.tokens=200")
    pretrain.run(config)
    exported = load_pretrained(config.run_dir / "export").state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights(config.run_dir).items())
    again = make_sft(f"init_from={config.run_dir}/export", "name=again")
    assert again.data.tokenizer == f"{config.run_dir}/export/tokenizer.json"
    names = (base.run_dir, config.run_dir, config.run_dir / "export")
    tokens = [find_pretrained(str(name)).tokens() for name in names]
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize("where", ["", "checkpoints"])
def test_a_run_directory_or_one_of_its_checkpoints_can_be_named(make_sft, base: Config, where: str) -> None:
    folder = latest(base.run_dir / where) if where else base.run_dir
    run = build(make_sft(f"init_from={folder}"))
    before = run.model.embed.weight.clone()
    begin(run)
    saved = weights(base.run_dir)
    assert not torch.equal(before, run.model.embed.weight)
    assert all(torch.equal(saved[name], tensor) for name, tensor in run.model.state_dict().items())


def test_pre_training_continues_from_a_quantised_checkpoint(make_config, base: Config, tmp_path: Path) -> None:
    released = tmp_path / "released"
    run = build(make_config())
    run.model.load_state_dict(weights(base.run_dir))
    save_pretrained(run.model, released, run.tokenizer, format="released")
    config = make_config(f"init_from={released}", "model=demo", "name=next", "task.tokens=300")
    pretrain.run(config)
    record = json.loads((config.run_dir / "metrics.jsonl").read_text().splitlines()[0])
    run.model.load_state_dict(load_pretrained(released).state_dict())
    assert record["loss"] == evaluate(run)["loss"]


@pytest.mark.slow
def test_resuming_does_not_begin_again(make_sft, base: Config, tmp_path: Path) -> None:
    """Nor does it where the checkpoint has another name by then."""
    renamed = shutil.copytree(base.run_dir / "export", tmp_path / "renamed")
    pretrain.run(make_sft("name=split", "task.tokens=600", "checkpoint.every=1"))
    pretrain.run(make_sft("name=split", "task.tokens=1200", "checkpoint.every=1", f"init_from={renamed}"))
    pretrain.run(make_sft("name=whole", "task.tokens=1200", "checkpoint.every=1"))
    split, whole = (weights(make_sft(f"name={name}").run_dir) for name in ("split", "whole"))
    assert all(torch.equal(split[name], tensor) for name, tensor in whole.items())


def test_loss_counts_answers_alone(make_sft) -> None:
    run = build(make_sft())
    batches = list(itertools.islice(run.train_batches, 2))
    numbers = loop.train_step(run, batches, 0, 0)
    assert numbers["supervised"] == sum((batch["labels"] >= 0).sum() for batch in batches)
    assert 0 < numbers["supervised"] < 0.8 * numbers["num_tokens"]
    for batch in batches:
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            text = run.tokenizer.decode(ids[labels >= 0].tolist(), skip_special_tokens=False)
            assert text.startswith("It is ") and "+" not in text and text.endswith("<｜end▁of▁sentence｜>")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["init_from=/nowhere"], r"init_from = \"/nowhere\": /nowhere is not a folder"),
        (["init_from={chats}"], "holds neither config.json nor state.json"),
        (["data.tokenizer=x.json"], 'data.tokenizer = "x.json": must not be set with init_from'),
        (["init_from=null"], "init_from = null: task=sft starts from a checkpoint"),
        (["data=stdlib", "data.paths=[]"], 'data.source = "stdlib": task=sft trains on conversations'),
    ],
)
def test_what_does_not_fit_is_refused(make_sft, chats: Path, changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_sft(*(change.format(chats=chats.parent) for change in changes))


def test_a_checkpoint_with_another_tokenizer_or_tensor_is_refused(make_sft, base: Config, tmp_path: Path) -> None:
    run = build(make_sft())
    folder = tmp_path / "damaged"
    save_pretrained(run.model, folder, run.tokenizer)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["engram_compressed_vocab_size"] -= 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match="its Engram tables were trained for .* compressed token ids, its tokenizer.json gives"
    ):
        build(make_sft(f"init_from={folder}"))
    config["text_config"]["engram_compressed_vocab_size"] += 1
    config["text_config"]["num_attention_heads"] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"does not contain this model:\n.*attn_sink"):
        begin(build(make_sft(f"init_from={folder}")))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer.json does not exist"):
        make_sft(f"init_from={folder}")


def test_a_run_without_init_from_is_configured_as_before(make_config) -> None:
    saved = to_dict(make_config())
    assert saved.pop("init_from") is None and saved["checkpoint"].pop("export") is False
