"""Reasoning effort in the reward: the length term and the groups (V4.1 report, arXiv 2609.19969, post-training).

The reward of a response with ``len`` reasoning tokens under effort b is its task's reward plus

    r_len = -min(C_max, k(b) * len / L_norm),    k(b) = k0 * exp(-(b - b_min) / tau),    tau = lambda * mean spacing

where b_min and the mean spacing are those of the efforts being trained: the lower the effort, the more a token costs.
Rewards are compared only inside a group, the responses to one prompt under one effort, so efforts never compete with
each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from train.config.rl import LengthTerm


def price(term: LengthTerm, effort: Tensor, trained: Sequence[int]) -> Tensor:
    """k(b) of efforts [N], given the trained efforts. With a single trained effort there is no spacing; the price
    is k0.
    """
    lowest, spacing = min(trained), mean_spacing(trained)
    if not spacing:
        return torch.full_like(effort, term.k0, dtype=torch.float64)
    return term.k0 * torch.exp(-(effort.double() - lowest) / (term.spread * spacing))


def length_reward(term: LengthTerm, length: Tensor, effort: Tensor, trained: Sequence[int]) -> Tensor:
    """r_len, fp64 [N], of responses with ``length`` [N] reasoning tokens under ``effort`` [N]."""
    same_vector(length=length, effort=effort)
    return -(price(term, effort, trained) * length.double() / term.l_norm).clamp(max=term.c_max)


def mean_spacing(efforts: Sequence[int]) -> float:
    """Mean distance between neighbouring efforts; 0 for a single one."""
    return (max(efforts) - min(efforts)) / max(len(efforts) - 1, 1)


def group_relative_advantages(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """(advantages fp64 [N], informative bool [N]) of rewards [N] in the groups int64 [N].

    An advantage is the reward minus the mean of its group, not divided by the standard deviation. A group of
    equal rewards gives no gradient and is not informative.
    """
    same_vector(rewards=rewards, group=group)
    _, member, count = group.unique(return_inverse=True, return_counts=True)
    rewards = rewards.double()
    zeros = rewards.new_zeros(len(count))
    mean = zeros.index_add(0, member, rewards) / count
    highest = zeros.scatter_reduce(0, member, rewards, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, member, rewards, "amin", include_self=False)
    return rewards - mean[member], (highest > lowest)[member]


def same_vector(**tensors: Tensor) -> None:
    """Raise ValueError unless all have one shape [N]: (N,) with (N, N) or (N, 1) would broadcast silently."""
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    first = next(iter(tensors.values()))
    if first.dim() != 1 or any(tensor.shape != first.shape for tensor in tensors.values()):
        raise ValueError(f"each needs one value per response, all of one shape [N], got {shapes}")
