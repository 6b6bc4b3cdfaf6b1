"""Context parallelism in rows of more than 16,384 entries, where the released candidate pool restricts an indexer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import processes
from tests.model.candidate_pool import Row, compare, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# The last 1,024 queries see more blocks than the pool holds. For 65,536 tokens: bench_million.py --equal.
ROW = Row(length=17_408, ratio=1)


def test_two_ranks_equal_one_process_where_the_pool_restricts() -> None:
    (alone,), ranks = processes.run(1, train, ROW, 1), processes.run(2, train, ROW, 2)
    assert [one["seen"].restricted for one in ranks] == [0, ROW.length - 16_384]
    compare(alone, ranks)
    # what `compare` would say of a rank that kept another block, or of a pool that does not restrict
    other = [candidates.clone() for candidates in ranks[1]["seen"].candidates]
    other[0][-1, 0] += 1
    wrong = [ranks[0], {**ranks[1], "seen": replace(ranks[1]["seen"], candidates=other)}]
    with pytest.raises(AssertionError, match="candidates 0: 1 of 17,408 queries differ"):
        compare(alone, wrong)
    free = {**alone, "seen": replace(alone["seen"], otherwise=0)}
    with pytest.raises(AssertionError, match="the pool changes no selection"):
        compare(free, ranks)
    assert all(torch.isfinite(gradient).all() for gradient in alone["gradients"].values())
