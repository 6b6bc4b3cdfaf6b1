"""A tiny model that has learned to reason for a few tokens and answer, and runs of task=rl that begin with it."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))  # for ranks.py

from model import load_pretrained, save_pretrained
from tests.train.rl.toyserver import ToyServer
from train.build import build
from train.config.parse import parse
from train.config.schema import Config
from train.rl.rewards.pool import Rewards
from train.session import begin
from train.tasks import pretrain, rl

GRADE = """
def grade(record, answer, reasoning):
    return float(len(answer.strip()) == 1)
"""


@pytest.fixture(scope="session")
def checkpoint_folder(compose_raw, overrides, tmp_path_factory) -> Path:
    """Trained on questions that are answered by one or two letters, after a reasoning of one to eight others."""
    output = tmp_path_factory.mktemp("policy")
    fresh = build(parse(compose_raw(*overrides, f"output={output}")))
    save_pretrained(fresh.model, output / "base", fresh.tokenizer)
    draw = random.Random(0)
    with open(output / "chats.jsonl", "w", encoding="utf-8") as file:
        for _ in range(200):
            reasoning = " ".join(draw.choices("abcd", k=draw.randint(1, 8)))
            answer = "".join(draw.choices("xyz", k=draw.randint(1, 2)))
            said = [{"role": "user", "content": str(draw.randrange(100))}]
            said.append({"role": "assistant", "content": answer, "reasoning_content": reasoning})
            file.write(json.dumps({"messages": said, "effort": draw.randint(1, 100)}) + "\n")
    kept = [text for text in overrides if not text.startswith(("model=", "data.source", "data.paths", "data.valid"))]
    changes = ["task=sft", f"output={output}", f"init_from={output}/base", f"data.paths=[{output}/chats.jsonl]"]
    changes += ["data.validation_share=0.1", "optim.schedule.peak=3.0e-2", "task.tokens=12000", "checkpoint.every=1000"]
    changes += ["task.seq_len=128", "task.micro_batch=4", "task.global_batch_rows=4"]
    pretrain.run(parse(compose_raw(*kept, *changes)))
    return output / "sft" / "export"


@pytest.fixture(scope="session")
def prompts(tmp_path_factory) -> Path:
    """Records and a reward function of a user's own: an answer of one letter is right."""
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "grade.py").write_text(GRADE)
    lines = [json.dumps({"prompt": str(n)}) for n in range(7)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def rl_overrides(overrides, checkpoint_folder: Path, prompts: Path, tmp_path: Path) -> list[str]:
    """2 prompts under 2 efforts, 3 responses each, in a step."""
    kept = [text for text in overrides if text.startswith(("optim.", "logger.", "parallel.", "data.cache"))]
    task = f"{{prompts: '{prompts}/prompts.jsonl', reward: '{prompts}/grade.py:grade'}}"
    fixed = [
        "task=rl",
        f"output={tmp_path}",
        f"init_from={checkpoint_folder}",
        f"rl.tasks=[{task}]",
        "rl.efforts=[20,80]",
        "rl.samples=[3,3]",
        "rl.prompts=2",
        "rl.max_tokens=24",
        "rl.length={c_max: 0.5, k0: 0.5, l_norm: 16.0, spread: 1.0}",
        "rl.in_flight=24",
        "rl.ahead=0.0",
        "rl.eval_prompts=3",
        "rl.eval_efforts=[20,50]",
        "rl.reward_workers=1",
        "rl.reward_seconds=300.0",
        "task.seq_len=128",
        "task.micro_batch=2",
        "task.tokens=1500",
        "task.eval_every=1000",
        "optim.schedule.peak=3.0e-3",
        "checkpoint.every=1",
        "checkpoint.export=false",
    ]
    return [*kept, *fixed]


@pytest.fixture
def make_rl(compose_raw, rl_overrides: list[str]) -> Callable[..., Config]:
    """``make_rl("key=value", ...)``: the configuration of ``rl_overrides`` with changes."""
    return lambda *changes: parse(compose_raw(*rl_overrides, *changes))


@pytest.fixture
def policy_of() -> Iterator[Callable[[Config], rl.Policy]]:
    """``policy_of(config)``: the objects of a run that has not begun."""
    pools: list[Rewards] = []

    def make(config: Config) -> rl.Policy:
        run = build(config)
        begin(run)
        pools.append(Rewards([task.reward for task in config.rl.tasks], 1, config.rl.reward_seconds))
        return rl.make_policy(run, pools[-1], None)

    yield make
    for pool in pools:
        pool.close()


def changed(source: Path, target: Path, noise: float, seed: int) -> Path:
    """A checkpoint whose head and last norm are others."""
    model = load_pretrained(source)
    torch.manual_seed(seed)
    with torch.no_grad():
        model.head.weight.add_(noise * torch.randn_like(model.head.weight))
    save_pretrained(model, target, Tokenizer.from_file(str(source / "tokenizer.json")))
    return target


@pytest.fixture(scope="session")
def teachers(checkpoint_folder: Path, tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("teachers")
    return [changed(checkpoint_folder, folder / str(seed), 0.3, seed) for seed in (1, 2)]


@pytest.fixture
def distill_changes(prompts: Path) -> Callable[[list[Path]], list[str]]:
    """``distill_changes(teachers)``: what makes the run of ``rl_overrides`` a task=distill, a task for each teacher."""

    def make(names: list[Path]) -> list[str]:
        entry = "{{prompts: '{0}/prompts.jsonl', reward: '{0}/grade.py:grade', teacher: '{1}'}}"
        tasks = ", ".join(entry.format(prompts, name) for name in names)
        return ["task=distill", f"rl.tasks=[{tasks}]", "rl.length=null", "rl.loss=null", "rl.prompts=4"]

    return make


@pytest.fixture
def make_distill(make_rl, distill_changes) -> Callable[..., Config]:
    """``make_distill(teachers, "key=value", ...)``: its configuration."""
    return lambda names, *changes: make_rl(*distill_changes(names), "name=distill", *changes)


@pytest.fixture
def make_server() -> Iterator[Callable[..., ToyServer]]:
    made: list[ToyServer] = []

    def make(**options: Any) -> ToyServer:
        made.append(ToyServer(**options))
        return made[-1]

    yield make
    for server in made:
        if not server.closed.is_set():
            server.close()


@pytest.fixture
def servers_of() -> Callable[..., list[str]]:
    """``servers_of(server, ...)``: the changes that have ``task=rl`` use them."""

    def changes(*servers: ToyServer) -> list[str]:
        urls = ",".join(f"'{server.url}'" for server in servers)
        waits = ["rl.rollout.backoff_seconds=0.05", "rl.rollout.retries=2", "rl.rollout.silence_seconds=600.0"]
        return ["rollout=sglang", f"rl.rollout.urls=[{urls}]", "rl.rollout.format=plain", *waits]

    return changes
