"""task=distill: the KL to each task's teacher over the whole vocabulary, one teacher at a time, and what a run does."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from model import load_pretrained
from tests.model.tiny import no_rounding  # noqa: F401
from train.build import build
from train.checkpoint.run_state import TrainerState
from train.config.problems import ConfigError
from train.config.schema import Config
from train.loop import train_step
from train.rl.batch import score
from train.tasks import rl


@pytest.fixture
def make_policy(make_distill, policy_of):
    return lambda *arguments: policy_of(make_distill(*arguments))


def steps(config: Config) -> list[dict]:
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def test_the_objective_is_the_divergence_from_each_tasks_teacher(no_rounding, make_policy, teachers) -> None:  # noqa: F811
    policy = make_policy(teachers)
    model, scored = policy.run.model, score(policy.collector.collect(), None, [20, 80])
    made, counts = policy.method.batches(scored, version=0)
    taught = sum(int((batch["labels"] >= 0).sum()) for batch in made)
    assert counts == {"response_tokens": taught, "stale_tokens": 0}
    assert {int(batch["teacher"][0]) for batch in made} == {0, 1}
    expected = torch.zeros((), dtype=torch.float64)
    for batch in made:
        inputs = {"input_ids": batch["input_ids"], "seq_lens": batch["seq_lens"]}
        teacher = load_pretrained(teachers[int(batch["teacher"][0])])
        with torch.no_grad():
            own = model(**inputs, routing=batch["routing"]).logits.double().log_softmax(-1)
            other = teacher(**inputs).logits.double().log_softmax(-1)
        divergence = (own.exp() * (own - other)).sum(-1)
        expected += divergence[:, :-1][batch["labels"][:, 1:] >= 0].sum()
    sums: dict[str, torch.Tensor] = {}
    numbers = train_step(policy.run, made, 0, 0, policy.method.losses_of(sums))
    torch.testing.assert_close(sums["kl"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(numbers["lm_sum"].double(), expected, rtol=1e-4, atol=1e-5)
    assert float(expected) / taught > 1e-2


def test_a_policy_that_is_its_teacher_learns_nothing(make_policy, checkpoint_folder: Path) -> None:
    policy = make_policy([checkpoint_folder])
    record = rl.step(policy, policy.collector.collect(), TrainerState())
    assert abs(record["kl"]) < 1e-6
    assert abs(record["loss"]) < 1e-6


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """The garbage collector passes over what there is already."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
def test_one_teacher_is_in_memory_at_a_time(make_policy, teachers, quick_collections) -> None:
    policy = make_policy(teachers)
    scored = score(policy.collector.collect(), None, [20, 80])
    seen = []
    plain = policy.method.model

    def watched(name: str):
        model = plain(name)
        if all(reference() is not model for reference in seen):
            seen.append(weakref.ref(model))
        gc.collect()
        assert sum(reference() is not None for reference in seen) == 1
        return model

    policy.method.model = watched
    policy.method.batches(scored, version=0)
    policy.method.batches(scored, version=0)
    assert len(seen) == 3, "the second round begins with the teacher that the first one ended with"


@pytest.mark.slow
def test_a_run_comes_nearer_to_its_teacher_and_resumes(make_distill, teachers) -> None:
    names, lr = teachers[:1], "optim.schedule.peak=3.0e-2"
    rl.run(make_distill(names, lr, "task.tokens=2000", "name=a"))
    stopped = make_distill(names, lr, "task.tokens=6000", "name=a")
    rl.run(stopped)
    whole = make_distill(names, lr, "task.tokens=6000", "name=b")
    rl.run(whole)
    kl = [record["kl"] for record in steps(whole)]
    assert kl[-1] < 0.75 * kl[0], kl
    assert [record["kl"] for record in steps(stopped)] == kl, "stopped in between or not, the run is the same"


def test_settings_of_the_other_task_are_refused(make_distill, make_rl, teachers, checkpoint_folder, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"rl.length: has no effect with task=distill"):
        make_distill(teachers, "rl.length={c_max: 0.5, k0: 0.5, l_norm: 16.0, spread: 1.0}")
    with pytest.raises(ConfigError, match=r"rl.loss: task=rl needs this section"):
        make_rl("rl.loss=null")
    with pytest.raises(ConfigError, match=r"rl.tasks\[0\].teacher = .*nowhere is not a folder"):
        make_distill([tmp_path / "nowhere"])
    other = shutil.copytree(checkpoint_folder, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "NFC"}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = make_distill([other])
    with pytest.raises(ConfigError, match=r"rl.tasks\[0\].teacher = .*differs from the tokenizer of the policy"):
        rl.make_policy(build(config), None, None)
    wider = shutil.copytree(checkpoint_folder, tmp_path / "wider")
    released = json.loads((wider / "config.json").read_text())
    released["text_config"]["vocab_size"] += 1
    (wider / "config.json").write_text(json.dumps(released))
    config = make_distill([wider], "name=wider")
    with pytest.raises(ConfigError, match=r"rl.tasks\[0\].teacher = .*wider.*: its vocabulary has 513 entries"):
        rl.make_policy(build(config), None, None)
