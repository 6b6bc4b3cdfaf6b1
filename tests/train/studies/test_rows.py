"""What the study of rare rows reads from a run: how often rows were read, and the loss of the tokens by that."""

from __future__ import annotations

import pytest

from train.build import build
from train.studies.rows import GROUPS, count_reads, finished_jobs, main, measured, report
from train.studies.runner import Job, read_state
from train.studies.settings import StudyError
from train.tasks import pretrain


@pytest.mark.slow
def test_losses_by_reads_are_the_validation_loss_in_groups(make_config) -> None:
    config = make_config("task.tokens=1200", "optim=report", "optim.schedule.peak=0.01")
    pretrain.run(config)
    state = read_state(config.run_dir)
    found = measured(Job("arm", None, 0, (), config))
    for kind in ("by Engram rows", "by token"):
        losses, tokens = found[kind]["loss"], found[kind]["tokens"]
        assert len(losses) == len(tokens) == len(GROUPS) and sum(count > 0 for count in tokens) >= 2
        mean = sum(loss * count for loss, count in zip(losses, tokens, strict=True) if count) / sum(tokens)
        assert sum(tokens) == state["last_valid"]["targets"]
        assert mean == pytest.approx(state["last_valid"]["loss"], rel=1e-5)
    run = build(config)
    text = run.model_config.text
    rows, words = count_reads(run, state["tokens"])
    assert state["tokens"] == int(words.sum())
    assert int(rows.sum()) == state["tokens"] * text.engram_hash_heads * len(text.engram_layer_ids)
    used = rows[rows > 0]
    assert found["rows read"] == len(used)
    assert found["rows read at most three times"] == pytest.approx(float((used <= 3).double().mean()))
    assert found["optimizer state"] > 0 and found["step CPU seconds"] > found["optimizer CPU seconds"] > 0


def test_the_report_has_means_over_seeds(tmp_path) -> None:
    losses = {"loss": [None, 4.0, 3.0, 2.0, 1.0], "tokens": [0, 10, 20, 30, 1000]}
    cost = {"optimizer state": 2**20, "step CPU seconds": 0.5, "optimizer CPU seconds": 0.1}
    one = {"by Engram rows": losses, "by token": losses, "rows read at most three times": 0.75, **cost}
    two = {**one, "by token": {**losses, "loss": [None, 5.0, 3.0, 2.0, 1.0]}, "step CPU seconds": 0.7}
    lines = report({"AdamW": {"0": one, "1": two}}).splitlines()
    assert "| AdamW | - | 4.0000 | 3.0000 | 2.0000 | 1.0000 |" in lines
    assert "| AdamW | - | 4.5000 | 3.0000 | 2.0000 | 1.0000 |" in lines
    assert "| AdamW | 75.0% | 1.0 MiB | 0.600 | 0.100 |" in lines
    with pytest.raises(StudyError, match="run the study first: python -m train.studies rare_rows"):
        finished_jobs("rare_rows", tmp_path / "rare_rows.json", [])
    assert main(["--output", str(tmp_path)]) == 2
