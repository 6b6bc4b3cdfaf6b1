"""What a run notes about the checkpoints and files of others: weights that moved, and functions that changed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from train import origin
from train.config.problems import ConfigError


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Distillation from one teacher, beginning with another checkpoint; the teacher's folder holds one file."""
    monkeypatch.setattr(origin, "find_pretrained", lambda name: SimpleNamespace(folder=Path(name)))
    for name in ("base", "teacher"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    (tmp_path / "grade.py").write_text("def grade(record, answer, reasoning):\n    return 1.0\n")
    task = SimpleNamespace(
        prompts=str(tmp_path / "prompts.jsonl"),
        reward=f"{tmp_path}/grade.py:grade",
        teacher=str(tmp_path / "teacher"),
    )
    rl = SimpleNamespace(tasks=[task], loss=SimpleNamespace(kl=0.0))
    given = SimpleNamespace(teacher=str(tmp_path / "teacher"), weight=1.0)
    fixed = dict(
        run_dir=tmp_path, distill_data=given, init_from=str(tmp_path / "base"), frozen_base=False, dpo=None, rl=rl
    )
    made = SimpleNamespace(**fixed, data=SimpleNamespace(tokenizer=None))
    origin.record(made)
    return made


def saved(config: SimpleNamespace) -> dict:
    """The part of the saved configuration that names checkpoints."""
    given = {"distill_data": {"teacher": config.distill_data.teacher}}
    tasks = [{"teacher": task.teacher} for task in config.rl.tasks]
    return {"init_from": config.init_from, "data": {"tokenizer": None}, "rl": {"tasks": tasks}, **given}


def test_checkpoints_that_moved_count_under_their_new_paths(config: SimpleNamespace, tmp_path: Path) -> None:
    before = saved(config)
    for name in ("base", "teacher"):
        (tmp_path / name).rename(tmp_path / f"new-{name}")
    config.init_from, teacher = str(tmp_path / "new-base"), str(tmp_path / "new-teacher")
    config.rl.tasks[0].teacher = config.distill_data.teacher = teacher
    assert origin.renamed(before, config) == saved(config) != before


def test_only_what_is_read_again_must_have_the_same_content(config: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "base" / "model.safetensors").write_text("trained on")
    assert origin.check(config) == {"rl.tasks[0].teacher", "distill_data.teacher"}, (
        "of the first checkpoint nothing is read again"
    )
    config.rl.loss.kl = 0.1  # the divergence from the first checkpoint
    (tmp_path / "teacher" / "model.safetensors").write_text("trained on")
    with pytest.raises(ConfigError) as refused:
        origin.check(config)
    keys = [text.split(" = ")[0] for text in refused.value.problems]
    assert keys == ["init_from", "rl.tasks[0].teacher", "distill_data.teacher"]


def test_a_reward_that_changed_is_told(config: SimpleNamespace, tmp_path: Path) -> None:
    assert origin.changed_files(config) == []
    (tmp_path / "grade.py").write_text("def grade(record, answer, reasoning):\n    return 0.0\n")
    assert origin.changed_files(config) == [
        f"rl.tasks[0].reward: {tmp_path}/grade.py has other content than when the run began"
    ]
    (tmp_path / "grade.py").unlink()
    assert len(origin.changed_files(config)) == 1
