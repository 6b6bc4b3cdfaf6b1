"""Processes that the command itself starts: what they write together is what one process writes, and their errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from model import build_model, convert_checkpoint, merge_checkpoints, open_folder, save_pretrained
from model.parallel.ranks import ONE_RANK, RankGroup
from tests.model.tiny import tiny_config
from train.distributed.workers import work_together
from train.errors import InputError

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def write_all(folder: Path, ranks: RankGroup, done: Callable[[float], None]) -> int:
    """Quantise, unpack, write in shards and average."""
    to = folder / f"by-{ranks.size}"
    convert_checkpoint(folder / "plain", to / "released", "released", done=done, ranks=ranks)
    convert_checkpoint(to / "released", to / "bf16", "bf16", shard_bytes=30_000, ranks=ranks)
    convert_checkpoint(to / "bf16", to / "back", "released", ranks=ranks)
    with open_folder(to / "released") as a, open_folder(folder / "plain") as b:
        merge_checkpoints([a, b], [0.25, 0.75], tiny_config(vision=True), to / "merged", ranks=ranks)
    return ranks.size


def test_three_processes_write_the_bytes_of_one(tmp_path: Path) -> None:
    save_pretrained(build_model(tiny_config(vision=True)), tmp_path / "plain")
    shares: list[float] = []
    assert work_together(3, write_all, tmp_path, shares.append) == 3
    assert sum(shares) == pytest.approx(1.0) and len(shares) > 50
    assert work_together(1, write_all, tmp_path) == 1
    alone = {path.relative_to(tmp_path / "by-1"): path for path in (tmp_path / "by-1").rglob("*") if path.is_file()}
    assert len(alone) > 12
    for name, path in alone.items():
        assert path.read_bytes() == (tmp_path / "by-3" / name).read_bytes(), name
    assert len(list((tmp_path / "by-3").rglob("*"))) == len(list((tmp_path / "by-1").rglob("*")))


def fail(how: str, ranks: RankGroup, done: Callable[[float], None]) -> None:
    if ranks.rank == 1 and how == "error":
        raise InputError("no such thing")
    if ranks.rank == 1:
        os.kill(os.getpid(), 9)


@pytest.mark.parametrize("how, message", [("error", "no such thing"), ("kill", "process 1 ended with exit code -9")])
def test_an_error_of_one_process_ends_the_work(how: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        work_together(2, fail, how)
    assert work_together(1, fail, how) is None and ONE_RANK.rank == 0
