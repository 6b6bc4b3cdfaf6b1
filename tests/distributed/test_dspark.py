"""``task=dspark`` on two processes, the drafter's experts split: the numbers of one process, one folder from both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from ranks import Group
from safetensors.torch import load_file

from train.config.compose import CONF_DIR, open_overrides
from train.config.parse import parse
from train.tasks import dspark, pretrain

pytestmark = pytest.mark.distributed

SHAPE = (
    "{num_nextn_predict_layers: 2, dspark_block_size: 3, dspark_noise_token_id: 511, dspark_markov_rank: 8, "
    "dspark_target_layer_ids: [2, 5], dspark_n_routed_experts: 4, dspark_num_experts_per_tok: 2}"
)
MEASURED = ("loss", "ce", "l1", "confidence", "tau", "ece", "grad_norm")


def settings(corpus: Path, output: Path) -> list[str]:
    return [
        "data.source=text", f"data.paths=[{corpus}/text]", f"data.validation_paths=[{corpus}/text/token.txt]",
        f"data.cache_dir={corpus}/cache", "data.vocab_size=512", "data.validation_rows=3", f"output={output}",
        "task.seq_len=64", "task.micro_batch=2", "task.global_batch_rows=4",
        "task.sample_tokens=0", "logger.progress=false",
        "parallel.device=cpu", "checkpoint.export=plain", "optim.schedule.warmup_steps=0",
        "optim.settings.adamw.eps=1.0e-8",
    ]  # fmt: skip


def parsed(overrides: list[str]):
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return parse(compose("train", overrides=open_overrides(overrides)))


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "export" / "model.safetensors")


@pytest.mark.slow
def test_two_processes_are_one(corpus: Path, tmp_path: Path) -> None:
    """Three steps on two, then two more on one that continues; and five on one."""
    common = settings(corpus, tmp_path)
    base = parsed([*common, "model=tiny", "name=base", "task.tokens=1000"])
    pretrain.run(base)
    mine = [*common, "task=dspark", "optim.schedule.peak=1.0e-4", "optim.schedule.floor=1.0e-5"]
    mine += [f"init_from={base.run_dir}/export", f"dspark.drafter={SHAPE}"]
    whole = parsed([*mine, "name=whole", "task.tokens=1100"])
    dspark.run(whole)
    split = ["parallel.world_size=2", "parallel.expert_parallel=2", "parallel.table_shards=2"]
    command = ["-m", "train", *mine, *split, "parallel.shard_embeddings=true", "name=parts", "task.tokens=700"]
    with Group(2, command, tmp_path / "logs") as group:
        for rank, ended in enumerate(group.finish()):
            assert ended.code == 0, f"rank {rank}:\n{ended.output}"
    export = tensors(tmp_path / "parts")
    for name, tensor in tensors(base.run_dir).items():
        assert torch.equal(export[name], tensor), name
    dspark.run(parsed([*mine, "name=parts", "task.tokens=1100"]))
    found, expected = records(tmp_path / "parts"), records(whole.run_dir)
    found = [record for record in found if (record["kind"], record["step"]) != ("valid", 3)]
    assert [(r["kind"], r["step"]) for r in found] == [(r["kind"], r["step"]) for r in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["expert_load"] == theirs["expert_load"] and ours["blocks"] == theirs["blocks"]
        for name in MEASURED if ours["kind"] == "train" else MEASURED[:-1]:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3), (ours["step"], name)
    export, alone = tensors(tmp_path / "parts"), tensors(whole.run_dir)
    assert export.keys() == alone.keys()
    for name, tensor in alone.items():
        assert (export[name] - tensor).abs().max() <= 3e-4 * max(1.0, tensor.abs().max().item()), name


@pytest.mark.slow
def test_rows_split_over_two_processes(corpus: Path, tmp_path: Path) -> None:
    """Context parallelism: the records of one process, with documents and blocks of drafts on both sides of the cut."""
    common = settings(corpus, tmp_path)
    base = parsed([*common, "model=tiny", "name=base", "task.tokens=300"])
    pretrain.run(base)
    mine = [*common, "task=dspark", "optim.schedule.peak=1.0e-4", "optim.schedule.floor=1.0e-5", "task.tokens=700"]
    mine += [f"init_from={base.run_dir}/export", f"dspark.drafter={SHAPE}"]
    whole = parsed([*mine, "name=whole"])
    dspark.run(whole)
    split = ["parallel.world_size=2", "parallel.context_parallel=2", "parallel.expert_parallel=2", "name=parts"]
    with Group(2, ["-m", "train", *mine, *split, "parallel.table_shards=2"], tmp_path / "logs") as group:
        for rank, ended in enumerate(group.finish()):
            assert ended.code == 0, f"rank {rank}:\n{ended.output}"
    found, expected = records(tmp_path / "parts"), records(whole.run_dir)
    assert [(r["kind"], r["step"]) for r in found] == [(r["kind"], r["step"]) for r in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["tokens"] == theirs["tokens"] and ours["blocks"] == theirs["blocks"]
        for name in MEASURED if ours["kind"] == "train" else MEASURED[:-1]:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3), (ours["step"], name)


@pytest.mark.slow
def test_two_processes_share_the_generation_of_own_answers(corpus: Path, tmp_path: Path) -> None:
    """``data.answers=own``: the files that one process writes, and the same first step."""
    common = settings(corpus, tmp_path)
    base = parsed([*common, "model=tiny", "name=base", "task.tokens=300"])
    pretrain.run(base)
    talks = [[{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "a"}] for n in range(20)]
    lines = [json.dumps({"messages": talk}) for talk in talks]
    (tmp_path / "chats.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    mine = [text for text in common if not text.startswith(("data.source", "data.paths", "data.valid", "data.cache"))]
    mine += ["task=dspark", "data=chat", f"data.paths=[{tmp_path}/chats.jsonl]", "data.validation_share=0.3"]
    mine += ["data.answers=own", "dspark.answer_tokens=5", "dspark.answer_temperature=0.0", "task.tokens=100"]
    mine += [f"init_from={base.run_dir}/export", f"dspark.drafter={SHAPE}", "dspark.tokens_per_anchor=1"]
    dspark.run(parsed([*mine, "name=alone", f"data.cache_dir={tmp_path}/one"]))
    command = ["-m", "train", *mine, "parallel.world_size=2", "name=both", f"data.cache_dir={tmp_path}/two"]
    with Group(2, command, tmp_path / "logs") as group:
        for rank, ended in enumerate(group.finish()):
            assert ended.code == 0, f"rank {rank}:\n{ended.output}"
    (one,), (two,) = ((tmp_path / name).glob("answers-*") for name in ("one", "two"))
    assert one.name == two.name and len(list(two.glob("train.part-*"))) == 2
    assert all((one / name).read_text() == (two / name).read_text() for name in ("train.jsonl", "held-out.jsonl"))
    alone, both = (records(tmp_path / name) for name in ("alone", "both"))
    for name in MEASURED:
        assert both[1][name] == pytest.approx(alone[1][name], rel=1e-3), name
