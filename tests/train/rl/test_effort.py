"""The length term and the groups, on numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from train.config.rl import LengthTerm, training_efforts
from train.rl.effort import group_relative_advantages, length_reward, mean_spacing, price

TERM = LengthTerm(c_max=0.4, k0=0.8, l_norm=100.0, spread=2.0)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_price_falls_by_e_over_spread_mean_spacings_from_the_lowest_effort() -> None:
    trained = [20, 50, 60, 95]  # mean spacing 25, tau 50
    assert mean_spacing(trained) == 25.0
    prices = price(TERM, vector(20, 70, 95, 45), trained)
    torch.testing.assert_close(prices, 0.8 * vector(1, math.exp(-1), math.exp(-1.5), math.exp(-0.5)))
    torch.testing.assert_close(price(TERM, vector(20, 70), list(reversed(trained))), prices[:2])


def test_reward_of_length() -> None:
    trained = [25, 75]  # spacing 50, tau 100
    lengths, efforts = torch.tensor([10, 10, 0, 49, 51, 1000]), torch.tensor([25, 75, 25, 25, 25, 75])
    reward = length_reward(TERM, lengths, efforts, trained)
    expected = vector(-0.08, -0.08 * math.exp(-0.5), 0.0, -0.392, -0.4, -0.4)  # the cap is reached at 50 tokens
    torch.testing.assert_close(reward, expected)


def test_an_effort_below_the_lowest_trained_one_costs_more() -> None:
    torch.testing.assert_close(price(TERM, vector(0), [50, 100]), 0.8 * vector(math.exp(0.5)))


def test_a_single_effort_has_no_spacing() -> None:
    torch.testing.assert_close(price(TERM, vector(60, 30), [60]), vector(0.8, 0.8))


def test_rewards_are_centred_in_their_group_and_not_scaled() -> None:
    rewards, group = vector(1, 0, 0, 5, 9, 3, 3), torch.tensor([7, 7, 7, 2, 2, 4, 4])
    advantages, informative = group_relative_advantages(rewards, group)
    torch.testing.assert_close(advantages, vector(2 / 3, -1 / 3, -1 / 3, -2, 2, 0, 0))
    assert informative.tolist() == [True] * 5 + [False] * 2


def test_equal_rewards_teach_nothing_whatever_their_mean_rounds_to() -> None:
    advantages, informative = group_relative_advantages(vector(0.1, 0.1, 0.1), torch.zeros(3, dtype=torch.int64))
    assert not informative.any(), f"their advantages are {advantages}"


@pytest.mark.parametrize("shapes", [((4,), (4, 4)), ((4,), (4, 1)), ((4, 1), (4, 1)), ((4,), (3,))])
def test_what_would_broadcast_is_refused(shapes) -> None:
    a, b = (torch.ones(shape) for shape in shapes)
    with pytest.raises(ValueError, match=r"one value per response, shape \[N\]"):
        length_reward(TERM, a, b, [1, 100])
    with pytest.raises(ValueError, match=r"one value per response, shape \[N\]"):
        group_relative_advantages(a, b.long())


def test_efforts_by_name_and_number() -> None:
    assert training_efforts([25, "low", "high", "max"]) == [25, 50, 75, 100]


@pytest.mark.parametrize("wrong", [True, 0, 101, -1, "50abc", "50", 50.0, None, "medium"])
def test_what_is_no_effort_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match="must be one of low, high, max or a whole number from 1 to 100"):
        training_efforts([25, wrong])


@pytest.mark.parametrize("wrong", [[], [50, 50], ["low", 50]])
def test_efforts_must_be_there_and_differ(wrong) -> None:
    with pytest.raises(ValueError, match="must contain at least one effort, and no effort twice"):
        training_efforts(wrong)
