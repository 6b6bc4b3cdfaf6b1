"""The initial distributions of all parameters."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


@torch.no_grad()
def init_weights(model: nn.Module, std: float, n: int, seed: int) -> None:
    """Initialise every parameter and router bias of a model with n residual streams in place, in the order of their
    names and from one random generator.

    Matrices, embeddings and Engram tables are drawn from normal(0, std). Norm weights and Engram's key and query
    weights are 1. Biases, attention sinks and router biases are 0. The V4.1 report does not specify the initial mHC
    coefficients, so the following is our choice: `pre` starts at 1/n, `post` at 1, `comb` near the identity, and the
    input-dependent part is scaled by 0.01. A shard of a parameter gets the same values as the corresponding part of the
    whole parameter.
    """
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "scale":
            parameter.fill_(0.01)
        elif leaf == "base":
            parameter[:n] = -math.log(max(n - 1, 1e-6))  # sigmoid gives 1/n
            parameter[n : 2 * n] = 0.0
            parameter[2 * n :] = 4.0 * torch.eye(n, device=parameter.device).flatten()
        elif leaf in ("q_weight", "k_weight") or "norm" in name:
            parameter.fill_(1.0)
        elif leaf in ("bias", "attn_sink"):
            parameter.zero_()
        else:
            _draw_normal(parameter, std, generator)
    for name, buffer in model.named_buffers():
        if name.endswith((".gate.bias", ".gate.bias_vl")):
            buffer.zero_()


# The number of values drawn at once. It is a multiple of 16 because the CPU generator makes normal numbers in blocks of
# 16: drawing in parts then gives the same numbers as drawing all at once, if the last part is not shorter than a block.
DRAWN = 1 << 20


def _draw_normal(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill a contiguous parameter with normal random numbers. For a shard, random numbers are drawn for the whole
    parameter, and only the part for the shard is used.
    """
    shard = getattr(parameter, "shard", None)
    flat = parameter.view(-1)
    total, first = flat.numel(), 0
    if shard is not None:
        entry = parameter.shape[1:].numel()
        total, first = shard.total * entry, shard.start * entry
    at = 0
    while at < total:
        size = DRAWN if total - at >= DRAWN + 16 else total - at
        low, high = max(at, first), min(at + size, first + flat.numel())
        if high - low == size:
            flat[low - first : high - first].normal_(0.0, std, generator=generator)
        else:
            drawn = torch.empty(size, dtype=flat.dtype, device=flat.device).normal_(0.0, std, generator=generator)
            if high > low:
                flat[low - first : high - first] = drawn[low - at : high - at]
        at += size
