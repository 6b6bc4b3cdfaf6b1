"""``task=dspark``: the backbone stays bit for bit, the drafter learns, and whatever stops a run, it continues alike."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from model import Request, Sample, build_drafter, convert_checkpoint, load_drafter, load_pretrained, save_pretrained
from model.generation import generate
from model.packed import holds_packed
from tests.model.tiny import no_rounding  # noqa: F401
from tests.train.tasks.test_sft import write_chats
from tests.train.test_resume import numbers
from tests.train.test_vision import DIGITS
from train import loop
from train.build import build
from train.checkpoint.init_from import find_pretrained
from train.checkpoint.run_state import TrainerState
from train.config.parse import parse
from train.config.problems import ConfigError
from train.dspark.anchors import HELD_OUT, candidates, with_anchors
from train.dspark.evaluate import evaluate, measures
from train.logging.records import scalars
from train.studies import drafter as study
from train.tasks import dspark, pretrain

SHAPE = (
    "{num_nextn_predict_layers: 2, dspark_block_size: 4, dspark_noise_token_id: 511, dspark_markov_rank: 8, "
    "dspark_target_layer_ids: [2, 4, 5], dspark_n_routed_experts: 4, dspark_num_experts_per_tok: 2}"
)


@pytest.fixture(scope="module")
def origin(compose_raw, overrides, tmp_path_factory) -> Path:
    """The export of a short pretraining run."""
    folder = tmp_path_factory.mktemp("backbone")
    config = parse(
        compose_raw(
            *overrides, f"output={folder}", "task.tokens=2000", "optim.schedule.peak=5.0e-3", "checkpoint.export=plain"
        )
    )
    pretrain.run(config)
    return config.run_dir / "export"


@pytest.fixture
def make(compose_raw, overrides, origin, tmp_path):
    """The configuration of a drafter's run on the backbone; `None` as a drafter: the one that is there."""
    plain = [text for text in overrides if not text.startswith(("model=", "task.sample"))]

    def made(*changes: str, drafter: str | None = SHAPE, init_from: Path | None = None):
        shape = [f"dspark.drafter={drafter}"] if drafter else []
        where = [f"output={tmp_path}", f"init_from={init_from or origin}"]
        return parse(compose_raw("task=dspark", *plain, *where, *shape, *changes))

    return made


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def test_the_backbone_stays_and_the_drafter_learns(make, origin: Path, capsys) -> None:
    config = make("task.tokens=8000", "optim.schedule.peak=1.0e-2", "optim.router_bias_rate=0.01")
    dspark.run(config)
    before, after = stored(origin), stored(config.run_dir / "export")
    own = {name for name in after if name.startswith("mtp.")}
    assert after.keys() - own == before.keys() and own
    assert all(torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in before.items())
    records = numbers(config.run_dir)
    first, last = (record for record in records if record["kind"] == "valid")
    assert last["loss"] < 0.9 * first["loss"] and last["tau"] > first["tau"] > 1
    steps = [record for record in records if record["kind"] == "train"]
    assert all(len(record["alpha"]) == 4 and record["blocks"] > 20 for record in steps)
    assert all(len(record["expert_load"]["text"]["entropy"]) == 2 for record in steps)
    logged = dict(scalars(steps[-1]))  # what W&B gets
    assert {"tau", "ece", "alpha.0", "alpha.3", "expert_load.text.entropy.1", "confidence"} <= logged.keys()
    assert any(after[f"mtp.{stage}.ffn.gate.bias"].any() for stage in range(2))
    assert not any(after[f"mtp.{stage}.ffn.gate.bias_vl"].any() for stage in range(2))
    printed = capsys.readouterr().out
    assert "not trained: " in printed and "expected accepted length on held-out rows: first" in printed
    assert (config.run_dir / "tau.png").is_file()
    exported = load_pretrained(config.run_dir / "export")
    result = evaluate_folder(make, config.run_dir / "export")
    assert result["tau"] == pytest.approx(last["tau"], abs=1e-6)
    assert load_drafter(config.run_dir / "export", exported).block_size == 4


def evaluate_folder(make, folder: Path) -> dict:
    """The drafter of a folder, before anything is trained."""
    run = build(make("name=again", drafter=None, init_from=folder))
    assert any("its training continues from" in note for note in run.notes)
    return evaluate(run)


@pytest.mark.slow
def test_resumed_runs_are_the_same(make, monkeypatch) -> None:
    whole = make("name=whole")
    dspark.run(whole)
    shorter = make("name=parts", "task.tokens=700")
    dspark.run(shorter)
    assert numbers(shorter.run_dir)[-1]["step"] == 3
    original = loop.train_step

    def crash(run, batches, done, *rest, **given):
        if done == 5:
            raise MemoryError
        return original(run, batches, done, *rest, **given)

    config = make("name=parts")
    with monkeypatch.context() as patch:
        patch.setattr(dspark, "train_step", crash)
        with pytest.raises(MemoryError):
            dspark.run(config)
    dspark.run(config)
    kept = [r for r in numbers(config.run_dir) if not (r["kind"] == "valid" and r["step"] == 3)]
    assert kept == numbers(whole.run_dir)
    state = stored(config.run_dir / "checkpoints" / f"step-{kept[-1]['step']:08d}")
    assert all(name.startswith(("model.mtp.", "optimizer.mtp.", "random.")) for name in state)


@pytest.mark.slow
def test_a_packed_backbone_is_the_one_on_its_values(make, origin: Path, tmp_path: Path, no_rounding) -> None:  # noqa: F811
    """The same numbers and drafters; the backbone's bytes go from folder to folder; decoding with it works."""
    released = tmp_path / "released"
    convert_checkpoint(origin, released, "released")
    shutil.copy(origin / "tokenizer.json", released)
    settings = ("task.tokens=700", "checkpoint.export=released")
    packed, values = (
        make(f"name={kind}", f"runtime.frozen={kind}", *settings, init_from=released) for kind in ("packed", "values")
    )
    for config in (packed, values):
        dspark.run(config)
        assert holds_packed(build(config).backbone) == (config is packed)
    assert len(numbers(packed.run_dir)) > 4 and numbers(packed.run_dir) == numbers(values.run_dir)
    before, after, other = map(stored, (released, packed.run_dir / "export", values.run_dir / "export"))
    for name, tensor in after.items():
        assert torch.equal(other[name].view(torch.uint8), tensor.view(torch.uint8)), name
        if not name.startswith("mtp."):
            assert torch.equal(before[name].view(torch.uint8), tensor.view(torch.uint8)), name
    backbones = [load_pretrained(packed.run_dir / "export", torch.float32, packed=kind) for kind in (True, False)]
    assert holds_packed(backbones[0])
    requests = [Request((9, 8, 7, number), 10, temperature=0) for number in range(4)]
    drafted = [generate(m, requests, drafter=load_drafter(packed.run_dir / "export", m)) for m in backbones]
    plain = [generate(m, requests) for m in backbones]
    tokens = [[sample.tokens for sample in samples] for samples in (*drafted, *plain)]
    assert all(found == tokens[0] for found in tokens) and all(sample.accepted for sample in drafted[0])


def test_micro_batches_are_the_larger_batch(make) -> None:
    """Same anchors, so the same sums and gradients, however a step is cut."""
    found = []
    for rows in (1, 4):
        run = build(make(f"task.micro_batch={rows}", "task.global_batch_rows=4", "optim.clip=1000.0"))
        batches = iter(run.train_batches)
        found.append(dspark.step(run, TrainerState(), [next(batches) for _ in range(run.micro_batches)], 0.0, 0.0))
    for name in ("loss", "ce", "l1", "confidence", "tau", "ece", "grad_norm", "blocks"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4), name
    assert found[0]["alpha"] == pytest.approx(found[1]["alpha"], rel=1e-4)
    assert found[0]["expert_load"] == found[1]["expert_load"]


@pytest.mark.parametrize("rules", ["report", "adamw"])
def test_every_parameter_has_a_method(make, rules: str) -> None:
    run = build(make(f"optim={rules}"))
    methods = {row.parameter: (row.method, row.blocks, row.weight_decay) for row in run.optimizer.table()}
    assert methods.keys() == {name for name, _ in run.model.named_parameters()}
    if rules == "adamw":
        assert {method for method, *_ in methods.values()} == {"adamw"}
        return
    for name, expected in {
        "mtp.0.main_proj.weight": ("muon", "whole", 0.1),
        "mtp.0.main_norm.weight": ("adamw", "", 0.1),
        "mtp.1.norm.weight": ("adamw", "", 0.1),
        "mtp.1.attn.wq_b.weight": ("muon", "4 x [16, 16]", 0.1),
        "mtp.0.ffn.experts.w1": ("muon", "4 x [32, 32]", 0.1),
        "mtp.1.markov_head.embed.weight": ("sinkhorn", "", 0.0),
        "mtp.1.markov_head.head.weight": ("sinkhorn", "", 0.0),
        "mtp.1.confidence_head.proj.weight": ("adamw", "", 0.0),
        "mtp.0.attn.attn_sink": ("adamw", "", 0.0),
    }.items():
        method, blocks, decay = methods[name]
        assert (method, decay) == (expected[0], expected[2]), name
        assert not expected[1] or blocks == expected[1], name


def test_bf16_and_recomputation(make) -> None:
    """Recomputation changes no number; bf16 stays near."""
    found = []
    for changes in ((), ("runtime.recompute=true",), ("parallel.precision=bf16",)):
        run = build(make(*changes))
        batches = iter(run.train_batches)
        found.append(dspark.step(run, TrainerState(), [next(batches) for _ in range(run.micro_batches)], 0.0, 0.0))
    plain, again, rounded = found
    assert plain["loss"] == again["loss"] and plain["grad_norm"] == again["grad_norm"]
    assert rounded["loss"] == pytest.approx(plain["loss"], rel=0.02)


def test_terms_of_the_loss_can_be_left_out(make) -> None:
    run = build(make("dspark.l1=0.0", "dspark.confidence=0.0", "dspark.ce=1.0"))
    batches = iter(run.train_batches)
    record = dspark.step(run, TrainerState(), [next(batches) for _ in range(run.micro_batches)], 0.0, 0.0)
    assert record["loss"] == record["ce"] and record["l1"] > 0
    before = {n: p.clone() for n, p in build(make()).model.named_parameters()}
    head = "mtp.1.confidence_head.proj.weight"
    assert torch.equal(before[head], dict(run.model.named_parameters())[head])


# --- conversations and images


@pytest.mark.slow
def test_on_conversations_drafts_begin_in_answers(make, tmp_path: Path) -> None:
    chats = write_chats(tmp_path, 60)
    data = (
        "data=chat",
        "data.source=chat",
        f"data.paths=[{chats}]",
        "data.validation_paths=[]",
        "data.validation_share=0.2",
    )
    config = make(*data, "task.tokens=3000", "dspark.tokens_per_anchor=1", "optim.schedule.peak=1.0e-2")
    run = build(config)
    batch = with_anchors(next(iter(run.train_batches)), 0, 0, 1)
    rows, at = (batch["anchors"] >= 0).nonzero(as_tuple=True)
    labels = batch["labels"][rows, batch["anchors"][rows, at]]
    assert len(labels) > 20 and (labels >= 0).all() and (batch["labels"] < 0).any()
    dspark.run(config)
    first, last = (record for record in numbers(config.run_dir) if record["kind"] == "valid")
    assert last["loss"] < 0.9 * first["loss"] and last["tau"] > first["tau"]


@pytest.mark.slow
def test_on_images(compose_raw, overrides, tmp_path: Path) -> None:
    """Behind an image as in text: the drafter learns, the backbone's tower stays, and a resumed run is the same."""
    kept = [text for text in overrides if not text.startswith(("model=", "task.sample", "data.paths", "data.valid"))]
    base = build(parse(compose_raw(*kept, f"output={tmp_path}", *DIGITS)))
    save_pretrained(base.model, tmp_path / "base", base.tokenizer)
    keys = ["task=dspark", "data.source=digits", f"init_from={tmp_path}/base", f"output={tmp_path}"]
    shape = SHAPE.replace("[2, 4, 5]", "[2, 4]")
    keys += [f"dspark.drafter={shape}", "dspark.tokens_per_anchor=1", "optim.schedule.peak=1.0e-2"]

    def configured(*changes: str):
        return parse(compose_raw(*kept, *keys, "task.seq_len=128", *changes))

    whole = configured("name=whole", "task.tokens=4000", "checkpoint.export=plain")
    assert any("pixel_values" in batch for batch in build(whole).valid_batches)
    dspark.run(whole)
    before, after = stored(tmp_path / "base"), stored(whole.run_dir / "export")
    assert any(name.startswith("vision.") for name in before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    first, last = (record for record in numbers(whole.run_dir) if record["kind"] == "valid")
    assert last["loss"] < 0.95 * first["loss"] and last["tau"] > first["tau"]
    assert set(last["expert_load"]) == {"text"}, "drafts are text"
    dspark.run(configured("name=parts", "task.tokens=1500"))
    config = configured("name=parts", "task.tokens=4000")
    stopped = numbers(config.run_dir)[-1]["step"]
    dspark.run(config)
    assert [r for r in numbers(config.run_dir) if (r["kind"], r["step"]) != ("valid", stopped)] == numbers(
        whole.run_dir
    )


# --- anchors


def row(lengths: list[int], width: int, hidden: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    labels = torch.arange(width)[None].clone()
    at = 0
    for length in lengths:
        labels[0, at] = -100  # of the first token of a piece
        at += length
    labels[0, at:] = -100
    labels[0, list(hidden)] = -100
    return {"input_ids": labels.clamp(min=0), "labels": labels, "seq_lens": torch.tensor([lengths])}


def test_candidates_are_supervised_and_so_is_the_next() -> None:
    batch = row([6, 5, 2], 16, hidden=(3,))
    # document 0: places 0..5, 3 is hidden; document 1: 6..10; document 2: 11, 12
    assert candidates(batch["labels"][0].numpy(), [6, 5, 2]).tolist() == [4, 8, 9]
    assert candidates(row([16], 16)["labels"][0].numpy(), [16, 0]).tolist() == list(range(2, 15))


def test_anchors_depend_on_seed_and_row_alone() -> None:
    one = row([30, 50], 96)
    two = {name: torch.cat([tensor, tensor]) for name, tensor in one.items()}
    first = with_anchors(two, 3, 10, 8)["anchors"]
    assert first.shape == (2, 10) and torch.equal(first, first.sort(1).values) and not torch.equal(first[0], first[1])
    assert torch.equal(with_anchors(one, 3, 11, 8)["anchors"][0], first[1])
    for other in (with_anchors(one, 4, 11, 8), with_anchors(one, 3, 12, 8), with_anchors(one, 3, 11, 8, HELD_OUT)):
        assert not torch.equal(other["anchors"][0], first[1])
    every = np.concatenate([with_anchors(one, 0, n, 8)["anchors"][0].numpy() for n in range(200)])
    assert set(every.tolist()) == set(candidates(one["labels"][0].numpy(), [30, 50]).tolist())


def test_a_row_without_a_place_has_no_anchor() -> None:
    batch = row([2, 3], 8, hidden=(4,))
    assert with_anchors(batch, 0, 0, 8)["anchors"].tolist() == [[-1]]


def test_measures_by_hand() -> None:
    """Two blocks of two slots, of which the second block has one."""
    weight = 2 + np.exp(-0.25)
    calibration = torch.zeros(10, 3, dtype=torch.float64)
    calibration[2], calibration[7] = torch.tensor([1, 0.25, 0.5]), torch.tensor([2, 1.5, 1.0])
    found = measures({
        "slots": torch.tensor([2, 1]),
        "ce_sum": torch.tensor(3.0),
        "l1_sum": torch.tensor(1.0),
        "bce_sum": torch.tensor(0.5),
        "alpha_sum": torch.tensor([1.0, 0.5]),
        "accepted_sum": torch.tensor(3.5),
        "calibration": calibration,
        "expert_load": torch.ones(1, 2, 4, dtype=torch.int64),
    })  # fmt: skip
    assert found["ce"] == pytest.approx(3 / weight) and found["confidence"] == pytest.approx(0.5 / weight)
    assert found["tau"] == 1.75 and found["alpha"] == [0.5, 0.5] and found["blocks"] == 2
    assert found["ece"] == pytest.approx((0.25 + 0.5) / 3)


# --- refusals


def test_what_cannot_be_trained_is_refused(make, compose_raw, overrides, origin: Path) -> None:
    for changes, kinds, message in (
        (
            ("parallel.expert_parallel=2", "parallel.world_size=2"),
            {"drafter": SHAPE.replace("experts: 4", "experts: 5")},
            "must divide dspark_n_routed_experts = 5",
        ),
        ((), {"drafter": "{block_size: 3}"}, "unknown keys: block_size; the known keys are num_nextn_predict_layers"),
        ((), {"drafter": None}, "num_nextn_predict_layers: is 0, must be positive. Describe a drafter"),
        (("lora=attention",), {}, "keeps the backbone frozen, so it cannot train LoRA"),
        (("task.sample_tokens=5",), {}, "task.sample_tokens = 5: has no effect with task=dspark"),
        (("dspark.ce=0.0", "dspark.l1=0.0"), {}, "no loss trains the draft tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(*changes, **kinds)
    with pytest.raises(ConfigError, match="task=dspark starts from a checkpoint"):
        parse(compose_raw("task=dspark", *overrides))


def test_a_run_of_a_drafter_is_no_origin(make) -> None:
    config = make("task.tokens=300")
    dspark.run(config)
    with pytest.raises(ValueError, match="only a drafter, without the model it belongs to; name the run's export"):
        find_pretrained(str(config.run_dir))
    assert json.loads((config.run_dir / "export" / "config.json").read_text())["text_config"]["compress_ratios"][
        -2:
    ] == [0, 0]
    find_pretrained(str(config.run_dir / "export"))


# --- what it is worth


@pytest.mark.slow
def test_the_study_of_a_finished_run(make, capsys) -> None:
    """Accepted lengths of three drafters and speeds; the Markov head alone is nothing but that."""
    config = make("name=drafter", "task.tokens=2000", "optim.schedule.peak=1.0e-2")
    dspark.run(config)
    capsys.readouterr()
    options = ["--tokens", "300", "--contexts", "40", "--batches", "1", "2", "--pieces", "1"]
    assert study.main([str(config.run_dir), *options]) == 0
    printed = capsys.readouterr().out
    assert printed == (config.run_dir / "drafter.md").read_text()
    found = json.loads((config.run_dir / "drafter.json").read_text())
    assert list(found["quality"]) == ["trained", "Markov head alone", "without training"]
    for result in found["quality"].values():
        for kind in ("greedy", "drawn"):
            low, high = result[kind]["interval"]
            assert 0 <= low <= result[kind]["accepted"] <= high <= 4 and len(result[kind]["by_slot"]) == 4
    assert found["quality"]["trained"]["expected"]["tau"] > found["quality"]["without training"]["expected"]["tau"]
    assert [(row["context"], row["batch"]) for row in found["speed"]] == [(40, 1), (40, 2)]
    alone = study.markov_alone(build(config))
    drafted = alone(torch.tensor([[5, 9, 2]]), *(torch.tensor(x) for x in ([3], [7], [[7, 8, 9, 10]])))
    assert not drafted.base_logits.any() and drafted.logits.any()
    assert study.main([str(config.run_dir / "nowhere")]) == 2


def test_accepted_lengths_by_hand() -> None:
    samples = [Sample(Request((1,), 9), accepted=lengths) for lengths in ([0, 2, 1], [3, 0])]
    found = study.accepted_lengths(samples, 3)
    assert found["accepted"] == 6 / 5 and found["passes"] == 5
    assert found["by_slot"] == [3 / 5, 2 / 3, 1 / 2]


@pytest.mark.slow
def test_an_adapted_backbone_drafts_alike(compose_raw, overrides, make_config, origin, tmp_path, no_rounding) -> None:  # noqa: F811
    """Beside LoRA, experts, embedding and head included: the greedy tokens of the adapted model."""
    changes = [text for text in overrides if not text.startswith("model=")]
    config = parse(
        compose_raw(*changes, f"output={tmp_path}", "lora=all", f"init_from={origin}", "task.sample_tokens=0")
    )
    run = build(config)
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0.0, 0.1)
    keys = {"num_nextn_predict_layers": 2, "dspark_target_layer_ids": (2, 5), "dspark_noise_token_id": 511}
    run.model.config = replace(run.model.config, text=replace(run.model.config.text, **keys))
    drafter = build_drafter(run.model)
    requests = [Request((9, 8, 7, number), 12, temperature=0) for number in range(4)]
    plain = generate(run.model, requests)
    assert [s.tokens for s in generate(run.model, requests, drafter=drafter)] == [s.tokens for s in plain]
    assert [s.tokens for s in generate(build(make_config()).model, requests)] != [s.tokens for s in plain]
