"""An evaluation on tasks asks the same model the same on two processes, whole on each of them or split over them."""

from __future__ import annotations

from pathlib import Path

import asked
import pytest
import torch
from ranks import Group

from train.distributed.world import World

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_two_processes_find_what_one_finds(corpus: Path) -> None:
    likelihoods, answers = asked.asked(World(torch.device("cpu")), 1, corpus)
    with Group(2, ["tests/distributed/asked.py", str(corpus), "1", "2"], corpus / "asked") as group:
        for rank, ended in enumerate(group.finish()):
            assert ended.code == 0, f"rank {rank}:\n{ended.output}"
    assert len(set(answers)) > 1
    for parts in (1, 2):
        theirs, texts = torch.load(corpus / f"asked-2-{parts}.pt")
        assert texts == answers, parts
        assert [hit for _, hit in theirs] == [hit for _, hit in likelihoods]
        for (value, _), (expected, _) in zip(theirs, likelihoods, strict=True):
            assert abs(value - expected) < 1e-4, parts
