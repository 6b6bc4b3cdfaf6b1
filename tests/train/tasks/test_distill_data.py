"""``task=distill_data``: the loss is the formula, a packed teacher teaches, and a stopped run continues alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model import save_pretrained
from model.packed import holds_packed
from tests.model.tiny import no_rounding  # noqa: F401
from tests.train.test_resume import numbers
from train.build import build
from train.checkpoint.run_state import TrainerState
from train.config.parse import parse
from train.config.problems import ConfigError
from train.session import begin
from train.tasks import distill_data
from train.teacher import Teacher


@pytest.fixture(scope="module")
def teacher(compose_raw, overrides, tmp_path_factory) -> Path:
    """A released-format folder of random weights far from the initial ones, with a window twice the student's."""
    output = tmp_path_factory.mktemp("teacher")
    run = build(parse(compose_raw(*overrides, f"output={output}", "model.text_config.sliding_window=16")))
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    save_pretrained(run.model, output / "export", run.tokenizer, format="released")
    return output / "export"


@pytest.fixture
def make(compose_raw, overrides, teacher: Path, tmp_path: Path):
    kept = [text for text in overrides if not text.startswith("task.sample")]

    def made(*changes: str):
        fixed = [
            "task=distill_data",
            f"output={tmp_path}",
            f"distill_data.teacher={teacher}",
            "checkpoint.export=false",
        ]
        return parse(compose_raw(*kept, *fixed, *changes))

    return made


@pytest.mark.usefixtures("no_rounding")
@pytest.mark.parametrize("top_k", [None, 5])
def test_the_numbers_of_a_step_are_the_formula(make, top_k: int | None) -> None:
    """From whole logits of each row, in fp64; the teacher's weights stay packed."""
    config = make("loss.router_balance=0", "loss.indexer_kl=0", "distill_data.weight=0.25",
                  f"distill_data.top_k={top_k or 'null'}", "runtime.train_indexer=false")  # fmt: skip
    run = build(config)
    begin(run)
    guide = Teacher(run)
    assert holds_packed(guide.model)
    read = [next(iter(run.train_batches)) for _ in range(run.micro_batches)]
    ce, kl = [], []
    with torch.no_grad():
        for batch in read:
            own, other = (m(**batch).logits[:, :-1].double().log_softmax(-1) for m in (run.model, guide.model))
            targets = batch["labels"][:, 1:]
            seen = targets >= 0
            own, other, targets = own[seen], other[seen], targets[seen]
            ce.append(-own.gather(1, targets[:, None])[:, 0])
            if top_k:
                best = other.topk(top_k).indices
                q, p = own.exp().gather(1, best), other.exp().gather(1, best)
                q, p = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (q, p))
                kl.append((p * (p / q).log()).sum(-1))
            else:
                kl.append((other.exp() * (other - own)).sum(-1))
    record = distill_data.step(run, guide, TrainerState(), read, 0.0, 0.0)
    means = [float(torch.cat(values).mean()) for values in (ce, kl)]
    assert [record["loss"], record["kl"]] == pytest.approx(means, rel=1e-4)
    assert record["total_loss"] == pytest.approx(0.75 * means[0] + 0.25 * means[1], rel=1e-4)


def trained(directory: Path) -> list[dict]:
    """The records of the steps of a run."""
    return [record for record in numbers(directory) if record["kind"] == "train"]


@pytest.mark.slow
def test_a_student_comes_nearer_to_its_teacher_and_continues_alike(make) -> None:
    lr = ("optim.schedule.peak=0.01", "distill_data.weight=1.0")
    whole = make(*lr, "name=whole", "task.tokens=2400")
    distill_data.run(whole)
    steps = trained(whole.run_dir)
    assert len(steps) > 8 and steps[-1]["kl"] < 0.9 * steps[0]["kl"]
    distill_data.run(make(*lr, "name=parts", "task.tokens=1200"))
    parts = make(*lr, "name=parts", "task.tokens=2400")
    distill_data.run(parts)
    assert trained(parts.run_dir) == steps


def test_what_cannot_teach_is_refused(make, teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"distill_data.teacher = .*nowhere.*is not a folder"):
        make(f"distill_data.teacher={tmp_path}/nowhere")
    with pytest.raises(ConfigError, match="distill_data: has no effect with task=pretrain|distill_data = "):
        make("task.kind=pretrain")
    with pytest.raises(ConfigError, match="vocabulary has 512 entries, but the student's has 640"):
        Teacher(build(make("model.text_config.vocab_size=640")))
