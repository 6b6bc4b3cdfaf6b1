from __future__ import annotations

import pytest

from optim import Schedule

REPORT = Schedule(peak=2.6e-4, floor=2.6e-5, warmup_steps=2000, constant_until_tokens=28e12, decay_until_tokens=40e12)


@pytest.mark.parametrize(
    ("step", "tokens", "lr"),
    [
        (0, 0, 2.6e-4 / 2000),
        (999, 10**11, 1.3e-4),
        (1999, 2 * 10**11, 2.6e-4),
        (2000, 2 * 10**11, 2.6e-4),
        (278_000, 28 * 10**12, 2.6e-4),
        (300_000, 31 * 10**12, 2.6e-5 + 2.34e-4 * 0.8535533905932737),  # (1 + cos(pi/4)) / 2
        (340_000, 34 * 10**12, 1.43e-4),  # half-way
        (400_000, 40 * 10**12, 2.6e-5),
        (450_000, 45 * 10**12, 2.6e-5),
    ],
)
def test_report_schedule(step, tokens, lr):
    assert REPORT.lr(step, tokens) == pytest.approx(lr, rel=1e-9)


def test_decay_is_monotone_and_continuous():
    rates = [REPORT.lr(10**6, int(t * 1e10)) for t in range(2700, 4100)]
    assert all(a >= b for a, b in zip(rates, rates[1:], strict=False))
    assert max(a - b for a, b in zip(rates, rates[1:], strict=False)) < 4e-7


def test_vision_tower_is_frozen_until_decay_begins():
    assert REPORT.factors(0) == {"vision": 0.0}
    assert REPORT.factors(28 * 10**12 - 1) == {"vision": 0.0}
    assert REPORT.factors(28 * 10**12) == {"vision": 0.1}
    assert REPORT.factors(45 * 10**12) == {"vision": 0.1}


def test_no_warmup_and_no_decay():
    schedule = Schedule(peak=1.0, floor=0.5, warmup_steps=0, constant_until_tokens=10, decay_until_tokens=10)
    assert [schedule.lr(0, tokens) for tokens in (0, 10, 11)] == [1.0, 1.0, 0.5]


def test_all_problems_at_once():
    with pytest.raises(ValueError) as error:
        Schedule(peak=0.0, floor=1.0, warmup_steps=-1, constant_until_tokens=5, decay_until_tokens=4, vision_factor=-1)
    assert all(
        key in str(error.value) for key in ("peak", "floor", "warmup_steps", "decay_until_tokens", "vision_factor")
    )
