"""``task=dpo``: the loss is the formula, the chosen answers gain, and a stopped run continues alike."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import logsigmoid

from model import load_pretrained
from tests.model.tiny import no_rounding  # noqa: F401
from tests.train.test_resume import numbers
from train.build import build
from train.checkpoint.run_state import TrainerState
from train.config.dpo import DpoConfig
from train.config.parse import parse
from train.config.problems import ConfigError
from train.dpo.evaluate import evaluate
from train.dpo.objective import PreferenceObjective, answer_numbers, pair_count
from train.session import begin
from train.tasks import dpo, pretrain


@pytest.fixture(scope="module")
def base(compose_raw, overrides, tmp_path_factory) -> Path:
    """The export of a short pre-training run, with its weights quantised."""
    output = tmp_path_factory.mktemp("base")
    changes = [f"output={output}", "name=base", "task.tokens=300", "checkpoint.export=released"]
    config = parse(compose_raw(*overrides, *changes))
    pretrain.run(config)
    return config.run_dir / "export"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Sums; the preferred answer is a sentence, the rejected one a refusal."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    lines = [{"prompt": f"{n} + 1", "chosen": f"It is {n + 1}.", "rejected": f"No, not {n}!"} for n in range(60)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def make(compose_raw, overrides, base: Path, pairs: Path, tmp_path: Path):
    kept = [
        text
        for text in overrides
        if not text.startswith(("model=", "data.source", "data.paths", "data.valid", "task.sample"))
    ]

    def made(*changes: str):
        fixed = ["task=dpo", f"output={tmp_path}", f"init_from={base}", f"data.paths=[{pairs}]"]
        fixed += ["data.validation_share=0.2", "optim.schedule.peak=1.0e-2", "optim.schedule.floor=0.0"]
        return parse(compose_raw(*kept, *fixed, *changes))

    return made


def by_hand(model, reference, pairs: list, beta: float, smoothing: float) -> tuple[torch.Tensor, list[dict]]:
    """The formula, from whole logits of every conversation alone: (mean loss, values of each pair)."""
    found, total = [], 0.0
    for sides in pairs:
        ratios = []
        for ids, labels in sides:
            logs = [
                torch.log_softmax(m(ids[None]).logits[0, :-1].double(), -1).gather(1, ids[1:, None])[:, 0]
                for m in (model, reference)
            ]
            ratios.append((logs[0] - logs[1])[labels[1:] >= 0].sum())
        margin = beta * (ratios[0] - ratios[1])
        loss = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
        found.append({"loss": loss.item(), "margin": margin.item(), "reward_chosen": beta * ratios[0].item()})
        total = total + loss / len(pairs)
    return total, found


def conversations(batch: dict) -> list:
    """The pairs of a batch as ((ids, labels) of the chosen, (ids, labels) of the rejected answer)."""
    found = []
    for ids, labels, lengths in zip(batch["input_ids"], batch["labels"], batch["seq_lens"].tolist(), strict=True):
        real = [length for length in lengths if length]
        parts = list(
            zip(ids.split([*real, len(ids) - sum(real)]), labels.split([*real, len(ids) - sum(real)]), strict=True)
        )
        found += [tuple(parts[n : n + 2]) for n in range(0, len(real), 2)]
    return found


@pytest.mark.usefixtures("no_rounding")
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_and_gradients_are_the_formula(make, smoothing: float) -> None:
    """Within 1e-5 of the sums over whole logits in fp64, with the router and indexer losses switched off."""
    config = make(
        "loss.router_balance=0", "loss.indexer_kl=0",
        "optim.clip=1e9", f"dpo.label_smoothing={smoothing}", "task.global_batch_rows=4", "runtime.train_indexer=false",
    )  # fmt: skip
    run = build(config)
    begin(run)
    reference = dpo.make_reference(run)
    with torch.no_grad():  # so that policy and reference differ
        for parameter in run.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    batches = iter(run.train_batches)
    read = [next(batches) for _ in range(run.micro_batches)]
    with reference.model() as frozen:
        total, expected = by_hand(
            run.model, frozen, [p for b in read for p in conversations(b)], config.dpo.beta, smoothing
        )
    trained = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
    gradients = dict(zip(trained, torch.autograd.grad(total, list(trained.values()), allow_unused=True), strict=True))
    record = dpo.step(run, reference, TrainerState(), read, 0.0, 0.0)
    assert record["pairs"] == len(expected) > run.micro_batches
    for name in ("loss", "margin", "reward_chosen"):
        mean = sum(pair[name] for pair in expected) / len(expected)
        assert record[name] == pytest.approx(mean, rel=1e-4, abs=1e-5), name
    assert record["accuracy"] == sum(pair["margin"] > 0 for pair in expected) / len(expected)
    norm = torch.stack([g.norm() for g in gradients.values() if g is not None]).norm()
    assert record["grad_norm"] == pytest.approx(float(norm), rel=1e-3)


def test_answers_are_numbered_in_pairs() -> None:
    lengths = torch.tensor([[2, 3, 0, 0], [1, 1, 2, 1]])
    expected = torch.tensor([[0, 0, 1, 1, 1, 0], [2, 3, 4, 4, 5, 0]])
    assert torch.equal(answer_numbers(lengths, 6), expected)
    assert pair_count(lengths) == 3 and pair_count(torch.tensor([[1, 0]])) == 0


def test_a_policy_that_is_the_reference_has_the_loss_of_a_coin() -> None:
    objective = PreferenceObjective(DpoConfig(0.1, 0.0), torch.tensor([[0, 0, 1]]), torch.zeros(1, 3), 1)
    hidden, weight, targets = torch.zeros(3, 4), torch.ones(5, 4), torch.tensor([1, 2, 3])
    objective.reference = torch.full((1, 3), -torch.log(torch.tensor(5.0)).item())
    loss = objective(hidden, weight, targets, torch.arange(3))
    assert float(loss) == pytest.approx(0.693147, abs=1e-6) and float(objective.sums["margin"]) == pytest.approx(0)


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["", "lora=all"])
def test_the_chosen_answers_gain(make, lora: str) -> None:
    """The first evaluation has the loss ln 2, since policy and reference are one; the last a lower one."""
    config = make("task.tokens=4000", *filter(None, [lora]), "checkpoint.export=plain")
    dpo.run(config)
    records = numbers(config.run_dir)
    first, last = (record for record in records if record["kind"] == "valid")
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5) and first["margin"] == pytest.approx(0, abs=1e-5)
    assert last["accuracy"] > 0.9 and last["loss"] < 0.7 * first["loss"]
    assert last["reward_chosen"] > last["reward_rejected"]
    assert (config.run_dir / "dpo.png").is_file()
    exported = load_pretrained(config.run_dir / "export")
    run = build(dataclasses.replace(config, name="again"))
    begin(run)
    reference = dpo.make_reference(run)  # before the policy is replaced
    if not lora:
        run.model.load_state_dict(exported.state_dict())
        found = evaluate(run, reference)
        assert found["margin"] == pytest.approx(last["margin"], abs=1e-4)


@pytest.mark.slow
def test_resumed_runs_are_the_same(make) -> None:
    whole = make("name=whole", "task.tokens=1600")
    dpo.run(whole)
    dpo.run(make("name=parts", "task.tokens=700"))
    parts = make("name=parts", "task.tokens=1600")
    dpo.run(parts)
    steps = [[r for r in numbers(c.run_dir) if r["kind"] == "train"] for c in (whole, parts)]
    assert len(steps[0]) > 4 and steps[0] == steps[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data=chat", "task=dpo trains on pairs of answers"),
        ("dpo=null", "dpo = null: task=dpo needs this section"),
        ("dpo.beta=0.0", "dpo.beta"),
        ("dpo.label_smoothing=0.5", "dpo.label_smoothing"),
        ("init_from=null", "task=dpo starts from a checkpoint"),
    ],
)
def test_what_cannot_be_trained_is_refused(make, pairs: Path, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(change, *([f"data.paths=[{pairs}]"] if change.startswith("data=") else []))


def test_other_tasks_refuse_pairs(make_config, pairs: Path) -> None:
    with pytest.raises(ConfigError, match="only task=dpo trains"):
        make_config(
            "data.source=preference", "data.field=messages", f"data.paths=[{pairs}]", "data.validation_paths=[]"
        )
