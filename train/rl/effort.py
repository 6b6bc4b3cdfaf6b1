"""The length penalty of the reward, and group-relative advantages (V4.1 report, arXiv 2609.19969, post-training).

The reward of a response with ``len`` reasoning tokens under effort b is its task's reward plus

    r_len = -min(C_max, k(b) * len / L_norm),    k(b) = k0 * exp(-(b - b_min) / tau),    tau = lambda * mean spacing

where b_min is the lowest trained effort and the mean spacing is the mean distance between neighbouring trained efforts.
By this formula, a lower effort has a higher penalty per token. Rewards are compared only inside a group (the responses
to one prompt under one effort), never between efforts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from train.config.rl import LengthTerm


def price(term: LengthTerm, effort: Tensor, trained: Sequence[int]) -> Tensor:
    """Compute k(b), the penalty for L_norm tokens, for each effort b in ``effort`` [N]. If only one effort is trained,
    k(b) is k0.
    """
    lowest, spacing = min(trained), mean_spacing(trained)
    if not spacing:
        return torch.full_like(effort, term.k0, dtype=torch.float64)
    return term.k0 * torch.exp(-(effort.double() - lowest) / (term.spread * spacing))


def length_reward(term: LengthTerm, length: Tensor, effort: Tensor, trained: Sequence[int]) -> Tensor:
    """Compute r_len (fp64 [N]) of responses with ``length`` [N] reasoning tokens, written under ``effort`` [N]."""
    same_vector(length=length, effort=effort)
    return -(price(term, effort, trained) * length.double() / term.l_norm).clamp(max=term.c_max)


def mean_spacing(efforts: Sequence[int]) -> float:
    """Return the mean distance between neighbouring efforts, or 0 if there is only one effort."""
    return (max(efforts) - min(efforts)) / max(len(efforts) - 1, 1)


def group_relative_advantages(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Compute advantages (fp64 [N]) from rewards [N], given the index of each response's group (int64 [N]).

    An advantage is the reward minus the mean reward of its group; it is not divided by the standard deviation. Also
    returns which responses are informative (bool [N]): those in a group whose rewards are not all equal. Groups with
    equal rewards give no gradient.
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
    """Raise ValueError unless all tensors have the same shape [N], because other shapes would broadcast silently."""
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    first = next(iter(tensors.values()))
    if first.dim() != 1 or any(tensor.shape != first.shape for tensor in tensors.values()):
        raise ValueError(f"each tensor must have one value per response, shape [N]; got {shapes}")
