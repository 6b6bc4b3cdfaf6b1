"""What task=plan says of two processes, against what they really hold and send."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.bench_plan import SEEN, SENT_TO, SENT_TO_ALL, compare

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return compare(Path(tmp_path_factory.mktemp("plan")) / "run")


def test_memory_is_what_two_processes_hold(both: dict) -> None:
    """Parameter, gradient and optimizer memory within 1 %."""
    for layout, (planned, measured) in both.items():
        for term in planned:
            if not term.startswith("sent"):
                assert planned[term] == pytest.approx(measured[term], rel=0.01), f"{layout}: {term}"
    weights = {layout: planned["weights"] for layout, (planned, _) in both.items() if "rows" not in layout}
    assert len(set(weights.values())) == len(weights), "the layouts do not differ"


def test_bytes_sent(both: dict) -> None:
    """The plan supposes even routing, and lookups of as many different rows as possible."""
    planned, measured = both["experts over 2"]
    assert 0 < measured["remote share"] < 1
    assert measured[SENT_TO] == pytest.approx(planned[SENT_TO] * 2 * measured["remote share"], rel=0.01)
    planned, measured = both["Engram tables over 2"]
    assert 0.3 * planned[SENT_TO] < measured[SENT_TO] < planned[SENT_TO]
    for layout in ("dense matrices over 2", "rows over 2"):
        planned, measured = both[layout]
        for term in SEEN:
            assert measured[term] == pytest.approx(planned[term], rel=0.01), (layout, term)
    for layout in ("experts, tables, embedding and head over 2", "experts and rows over 2"):
        planned, measured = both[layout]
        assert measured[SENT_TO] == pytest.approx(planned[SENT_TO], rel=0.2), layout
        assert measured[SENT_TO_ALL] == pytest.approx(planned[SENT_TO_ALL], rel=0.01), layout
