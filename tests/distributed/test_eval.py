"""``task=eval`` on two processes, which divide the questions, finds what it finds on one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import steps
import torch
from ranks import Group

from model import save_pretrained
from train.build import build
from train.config.problems import ConfigError
from train.distributed.world import World
from train.tasks import eval as evaluation

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def command(corpus: Path) -> list[str]:
    """The command of an evaluation with five conversations and six questions, whose results go to ``dst``."""
    run = build(steps.configure("plain", 1, 1, corpus), World(torch.device("cpu")))
    save_pretrained(run.model, corpus / "evaluated", run.tokenizer)
    lines = [
        {"messages": [{"role": "user", "content": "x" * n}, {"role": "assistant", "content": f"{n} " * n}]}
        for n in range(1, 6)
    ]
    (corpus / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = f"tasks=[{{task: needle, lengths: [128], depths: [0, 0.5, 1], samples: 2}}, {corpus}/chats.jsonl]"
    return ["task=eval", f"init_from={corpus}/evaluated", "batch=2", "parallel.device=cpu", tasks]


def test_the_results_are_those_of_one_process(command: list[str], corpus: Path) -> None:
    evaluation.run(steps.parsed([*command, f"dst={corpus}/alone.json"]))
    expected = json.loads((corpus / "alone.json").read_text())["results"]
    for name, layout in {"whole": "parallel.world_size=2", "split": "parallel=ep2"}.items():
        started = ["-m", "train", *command, layout, "parallel.device=cpu", f"dst={corpus}/{name}.json"]
        with Group(2, started, corpus / name) as group:
            first, second = group.finish()
        assert (first.code, second.code) == (0, 0), first.output + second.output
        found = json.loads((corpus / f"{name}.json").read_text())["results"]
        assert found["needle"] == expected["needle"]
        assert found["chats"]["loss"] == pytest.approx(expected["chats"]["loss"], abs=1e-5)
        assert {**found["chats"], "loss": 0} == {**expected["chats"], "loss": 0}
        assert "chats: exact_match=" in first.output and "chats: exact_match=" not in second.output


def test_layouts_that_divide_no_questions_are_refused(command: list[str]) -> None:
    with pytest.raises(ConfigError, match="must divide parallel.world_size = 3") as refused:
        steps.parsed([*command, "parallel.world_size=3", "parallel.expert_parallel=2", "parallel.dense_shards=3"])
    assert "parallel.dense_shards = 3: task=eval divides questions" in str(refused.value)
    with pytest.raises(ConfigError, match="device = .*Its new name is parallel.device"):
        steps.parsed([*command, "device=cpu"])
