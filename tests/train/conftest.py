"""A tiny complete run on a small text folder, composed exactly as the command line composes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from train.config.compose import CONF_DIR, open_overrides
from train.config.parse import parse
from train.config.schema import Config

ROWS_PER_STEP, SEQ_LEN = 4, 64


@pytest.fixture(scope="session")
def compose_raw() -> Callable[..., DictConfig]:
    """``compose_raw("key=value", ...)``: the composed, unchecked tree for command-line overrides."""

    def compose_overrides(*overrides: str) -> DictConfig:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            return compose("train", overrides=open_overrides(list(overrides)))

    return compose_overrides


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text files of this Python's standard library, enough for a few dozen steps."""
    folder = tmp_path_factory.mktemp("corpus")
    for name in (
        "abc",
        "bisect",
        "copy",
        "glob",
        "heapq",
        "operator",
        "queue",
        "sched",
        "shlex",
        "string",
        "textwrap",
        "token",
    ):
        text = Path(os.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def overrides(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Command-line overrides of the tiny run: a step has 4 rows of 64 tokens."""
    cache = tmp_path_factory.mktemp("cache")
    return [
        "model=tiny",
        "data.source=text",
        f"data.paths=[{corpus}]",
        f"data.validation_paths=[{corpus}/token.txt]",
        f"data.cache_dir={cache}",
        f"task.tokens={6 * ROWS_PER_STEP * SEQ_LEN - SEQ_LEN}",
        f"task.seq_len={SEQ_LEN}",
        "task.micro_batch=2",
        "task.global_batch_rows=4",
        "task.eval_every=100",
        "data.validation_rows=4",
        "task.sample_tokens=3",
        "optim.schedule.warmup_steps=2",
        "optim.schedule.constant_until_tokens=1000000",
        "optim.schedule.decay_until_tokens=1000000",
        "checkpoint.every=2",
        "logger.progress=false",
        "parallel.device=cpu",
    ]


@pytest.fixture
def make_config(compose_raw: Callable[..., DictConfig], overrides: list[str], tmp_path: Path) -> Callable[..., Config]:
    """``make_config("key=value", ...)``: the tiny run with changes, writing below the test's own folder."""

    def make(*changes: str) -> Config:
        return parse(compose_raw(*overrides, f"output={tmp_path}", *changes))

    return make
