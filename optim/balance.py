"""MoE load balancing without an auxiliary loss: after every step the router bias of an overloaded expert is lowered,
and that of an underloaded expert is raised (V4.1 report, arXiv 2609.19969, load balancing).

The functions are called once per optimizer step, with token counts summed over all ranks and micro-batches. The router
biases are buffers, not parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def balance_step_(buffers: Sequence[tuple[Tensor, Tensor]], load: Tensor, rate: float) -> None:
    """Update the router biases of all layers in place: bias += rate * sign(mean load - load).

    buffers: the biases (bias, bias_vl) fp32 [E] of each layer. load: int64 [layers, 2, E], tokens routed to each expert
    by text tokens (they move bias) and by image tokens (they move bias_vl). The sign is computed in integers, so an
    expert with exactly the mean load keeps its bias; if no token was routed, no bias changes. Raises ValueError if
    shapes differ or `load` is not integer.

    `model/huggingface/modeling.py` has the same rule for other trainers, because `model` does not import `optim`.
    """
    if load.dim() != 3 or load.shape[:2] != (len(buffers), 2):
        raise ValueError(f"load must be [layers={len(buffers)}, 2, experts], got {list(load.shape)}")
    _move_against_load([bias for pair in buffers for bias in pair], list(load.flatten(0, 1)), rate)


def load_statistics(load: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two measures of how evenly tokens are spread over experts, for token counts `load` [..., E]: max/mean
    load (1 if even, E if one expert gets all tokens) and entropy in nats (ln E if even), both fp64 [...].

    The max/mean load and the entropy are NaN where `load` counts no token.
    """
    share = load.double() / load.sum(-1, keepdim=True)
    return share.amax(-1) * load.shape[-1], torch.special.entr(share).sum(-1)


def _move_against_load(biases: list[Tensor], loads: list[Tensor], rate: float) -> None:
    for bias, load in zip(biases, loads, strict=True):
        if bias.shape != load.shape or bias.dim() != 1:
            raise ValueError(f"bias and load must both be [experts], got {list(bias.shape)} and {list(load.shape)}")
        if load.is_floating_point():
            raise ValueError(
                f"load must be integer token counts, got {load.dtype}; floating-point counts would lose tokens"
            )
    stacked = torch.stack(loads)
    # sign(mean - load) without a division: E * mean is the integer sum.
    direction = torch.sign(stacked.sum(-1, keepdim=True) - stacked * stacked.shape[-1])
    torch._foreach_add_(biases, [d.to(b.dtype) for d, b in zip(direction, biases, strict=True)], alpha=rate)
