"""What task=plan says of two processes, against what they really hold and send."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.bench_plan import compare

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return compare(Path(tmp_path_factory.mktemp("plan")) / "run")


def test_memory_is_what_two_processes_hold(both: dict) -> None:
    """Issue: parameter and optimizer memory within 2 %."""
    for layout, (planned, measured) in both.items():
        for term in planned:
            if not term.startswith("sent"):
                assert planned[term] == pytest.approx(measured[term], rel=0.02), f"{layout}: {term}"
    weights = [planned["weights"] for planned, _ in both.values()]
    assert len(set(weights)) == len(weights), "the layouts do not differ"


def test_bytes_sent(both: dict) -> None:
    """The plan supposes even routing, and lookups of as many different rows as possible."""
    planned, measured = both["experts over 2"]
    sent = "sent by the model and to owners"
    assert 0 < measured["remote share"] < 1
    assert measured[sent] == pytest.approx(planned[sent] * 2 * measured["remote share"], rel=0.01)
    planned, measured = both["Engram tables over 2"]
    assert 0.3 * planned[sent] < measured[sent] < planned[sent]
    planned, measured = both["dense matrices over 2"]
    assert measured[sent] == pytest.approx(planned[sent], rel=0.1)
    planned, measured = both["experts, tables, embedding and head over 2"]
    assert measured[sent] == pytest.approx(planned[sent], rel=0.2)
