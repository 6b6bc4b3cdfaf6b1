"""A small corpus with a warm cache, and the ten steps of a single process to compare with."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import steps  # noqa: E402

from train.distributed.world import World  # noqa: E402

MODULES = ("abc", "bisect", "copy", "glob", "heapq", "operator", "queue", "shlex", "string", "textwrap", "token")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text/*.txt; what the ranks leave for the test goes there too."""
    folder = tmp_path_factory.mktemp("distributed")
    (folder / "text").mkdir()
    for name in MODULES:
        text = Path(os.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        (folder / "text" / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def alone(corpus: Path) -> Callable[[str], dict]:
    """``alone(case)``: what one process finds."""
    return cache(lambda case: steps.ten_steps(case, World(torch.device("cpu")), corpus))
