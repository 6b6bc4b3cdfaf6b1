"""Cross-entropy over chunks of tokens: the [T, vocab] logits never exist during training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**27}


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of cross-entropies in nats, 0-d fp32, of hidden [R, d] through the head weight [V, d] against targets int64
    [R].

    Logits are computed in hidden's dtype and reduced in fp32, a chunk at a time, together with their gradients.
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, targets)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        cast = weight.to(hidden.dtype)
        step = max(1, CHUNK_LOGITS.get(hidden.device.type, CHUNK_LOGITS["cuda"]) // weight.shape[0])
        for start in range(0, hidden.shape[0], step):
            rows = slice(start, start + step)
            logits = (hidden[rows] @ cast.t()).float()
            goal = targets[rows, None]
            log_norm = logits.logsumexp(-1, keepdim=True)
            total += (log_norm - logits.gather(1, goal)).sum()
            if not (need_hidden or need_weight):
                continue
            d_logits = logits.sub_(log_norm).exp_()
            d_logits.scatter_add_(1, goal, torch.full_like(log_norm, -1.0))
            d_logits = d_logits.to(hidden.dtype)
            if need_hidden:
                d_hidden[rows] = d_logits @ cast
            if need_weight:
                d_weight += d_logits.t() @ hidden[rows]
        ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype) if need_weight else None)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        d_hidden, d_weight = ctx.saved_tensors
        return (
            d_hidden * grad.to(d_hidden.dtype) if d_hidden is not None else None,
            d_weight * grad.to(d_weight.dtype) if d_weight is not None else None,
            None,
        )


def next_token_targets(labels: Tensor, document: Tensor) -> Tensor:
    """Unshifted labels int64 [T] of a pack -> target of each position, -100 where the next token is in another
    document.
    """
    shifted = F.pad(labels[1:], (0, 1), value=-100)
    crosses = F.pad(document[1:] != document[:-1], (0, 1), value=True)
    return shifted.masked_fill(crosses, -100)
