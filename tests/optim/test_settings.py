"""What the methods' numbers may be; every broken rule is told, not the first alone."""

from __future__ import annotations

import pytest

from optim import AdamWSettings, MuonSettings, SinkhornSettings

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        (MuonSettings, {"momentum": NAN, "update_rms": INF}),
        (MuonSettings, {"momentum": 1.0, "update_rms": 0.0}),
        (SinkhornSettings, {"momentum": -0.1, "iterations": 0, "tau": INF, "eps": NAN, "update_rms": -1.0}),
        (SinkhornSettings, {"tau": -1.0e-3, "eps": 0.0, "update_rms": INF}),
        (AdamWSettings, {"beta1": 1.0, "beta2": -0.5, "eps": INF}),
    ],
)
def test_all_problems_at_once(settings, wrong):
    with pytest.raises(ValueError) as caught:
        settings(**wrong)
    lines = str(caught.value).splitlines()[1:]
    assert [line.strip().split(":")[0] for line in lines] == list(wrong)
    assert all(line.endswith(f"got {value!r}") for line, value in zip(lines, wrong.values(), strict=True))


def test_the_edges_are_allowed():
    assert MuonSettings(momentum=0.0).momentum == SinkhornSettings(tau=0.0, iterations=1).tau == 0.0
    assert AdamWSettings(beta1=0.0, beta2=0.0).beta1 == 0.0
