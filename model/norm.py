"""RMSNorm over the last axis of a tensor of any shape, computed in fp32 and cast back to the input's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.kernels.switch import in_triton


class RMSNorm(nn.Module):
    """RMSNorm over the last axis: x / sqrt(mean(x^2) + eps) * weight. The backbone uses eps 1e-20, the vision tower
    1e-6.
    """

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        if in_triton(x):
            from model.kernels import norm as kernels

            return kernels.rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)
