"""Random matrices with a chosen spectrum."""

from __future__ import annotations

import torch
from torch import Tensor


def with_condition(m: int, n: int, condition: float, *, spectrum: str = "log", seed: int = 0) -> Tensor:
    """fp32 [m, n] with singular values from 1 down to 1/condition.

    spectrum: "log" spaces them evenly in the logarithm, "spike" is one large and the rest small, "hole" one small.
    """
    generator = torch.Generator().manual_seed(seed)
    k = min(m, n)
    left, right = (
        torch.linalg.qr(torch.randn(size, k, generator=generator, dtype=torch.float64))[0] for size in (m, n)
    )
    values = torch.ones(k, dtype=torch.float64)
    if spectrum == "log":
        values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), k, dtype=torch.float64)
    elif spectrum == "spike":
        values[1:] = 1 / condition
    elif spectrum == "hole":
        values[-1] = 1 / condition
    return ((left * values) @ right.T).float()


def polar(matrix: Tensor) -> Tensor:
    """The exact polar factor by an fp64 singular value decomposition."""
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ v
