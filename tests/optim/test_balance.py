from __future__ import annotations

from math import log

import pytest
import torch

from optim import balance_step_, load_statistics


def move(bias: torch.Tensor, load: torch.Tensor) -> None:
    """A step of one layer with text alone."""
    balance_step_([(bias, torch.zeros_like(bias))], torch.stack([load, torch.zeros_like(load)])[None], 0.001)


def test_bias_moves_against_the_load():
    bias = torch.tensor([0.5, 0.0, -0.5, 0.0])
    move(bias, torch.tensor([10, 0, 4, 2]))  # mean 4
    torch.testing.assert_close(bias, torch.tensor([0.499, 0.001, -0.5, 0.001]))


def test_equality_with_the_mean_is_exact():
    """A mean of thirds: in floating point some of these would move."""
    bias = torch.zeros(3)
    big = 2**40 + 1
    move(bias, torch.tensor([big, big, big]))
    assert bias.eq(0).all()
    move(bias, torch.tensor([big, big, big + 1]))
    torch.testing.assert_close(bias, torch.tensor([0.001, 0.001, -0.001]))


def test_each_modality_moves_its_own_bias_and_an_absent_one_nothing():
    buffers = [(torch.zeros(2), torch.zeros(2)) for _ in range(2)]
    load = torch.tensor([[[3, 1], [0, 0]], [[2, 2], [0, 5]]])
    balance_step_(buffers, load, 0.5)
    assert [[b.tolist() for b in pair] for pair in buffers] == [[[-0.5, 0.5], [0, 0]], [[0, 0], [0.5, -0.5]]]


def test_wrong_shapes_and_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"must both be \[experts\]"):
        move(torch.zeros(3), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match="integer token counts"):
        move(torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match=r"load must be \[layers=1, 2, experts\]"):
        balance_step_([(torch.zeros(3), torch.zeros(3))], torch.zeros(2, 2, 3, dtype=torch.long), 0.1)


def test_statistics():
    ratio, entropy = load_statistics(torch.tensor([[5, 5, 5, 5], [20, 0, 0, 0], [10, 10, 0, 0], [0, 0, 0, 0]]))
    assert ratio[:3].tolist() == [1.0, 4.0, 2.0]
    assert entropy[:3].tolist() == pytest.approx([log(4), 0.0, log(2)])
    assert ratio[3].isnan() and entropy[3].isnan()
