from __future__ import annotations

from math import log

import pytest
import torch

from optim import balance_step_, load_statistics, move_bias_


def test_bias_moves_against_the_load():
    bias = torch.tensor([0.5, 0.0, -0.5, 0.0])
    move_bias_(bias, torch.tensor([10, 0, 4, 2]), 0.001)  # mean 4
    torch.testing.assert_close(bias, torch.tensor([0.499, 0.001, -0.5, 0.001]))


def test_equality_with_the_mean_is_exact():
    """A mean of thirds: in floating point some of these would move."""
    bias = torch.zeros(3)
    big = 2**40 + 1
    move_bias_(bias, torch.tensor([big, big, big]), 0.001)
    assert bias.eq(0).all()
    move_bias_(bias, torch.tensor([big, big, big + 1]), 0.001)
    torch.testing.assert_close(bias, torch.tensor([0.001, 0.001, -0.001]))


def test_each_modality_moves_its_own_bias_and_an_absent_one_nothing():
    buffers = [(torch.zeros(2), torch.zeros(2)) for _ in range(2)]
    load = torch.tensor([[[3, 1], [0, 0]], [[2, 2], [0, 5]]])
    balance_step_(buffers, load, 0.5)
    assert [[b.tolist() for b in pair] for pair in buffers] == [[[-0.5, 0.5], [0, 0]], [[0, 0], [0.5, -0.5]]]


def test_wrong_shapes_and_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"must both be \[experts\]"):
        move_bias_(torch.zeros(3), torch.zeros(4, dtype=torch.long), 0.1)
    with pytest.raises(ValueError, match="integer token counts"):
        move_bias_(torch.zeros(3), torch.zeros(3), 0.1)
    with pytest.raises(ValueError, match=r"load must be \[layers=1, 2, experts\]"):
        balance_step_([(torch.zeros(3), torch.zeros(3))], torch.zeros(2, 2, 3, dtype=torch.long), 0.1)


def test_statistics():
    ratio, entropy = load_statistics(torch.tensor([[5, 5, 5, 5], [20, 0, 0, 0], [10, 10, 0, 0], [0, 0, 0, 0]]))
    assert ratio[:3].tolist() == [1.0, 4.0, 2.0]
    assert entropy[:3].tolist() == pytest.approx([log(4), 0.0, log(2)])
    assert ratio[3].isnan() and entropy[3].isnan()
