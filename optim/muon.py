"""Muon: momentum, then the polar factor of every logical matrix by a hybrid Newton-Schulz iteration.

V4.1 report (arXiv 2609.19969), optimisation. A logical matrix is what the network applies as one linear map: an
attention head's rows of wq_b, one expert's w1, one group of wo_a, or a whole weight. Each is orthogonalised alone. The
step gathers the logical matrices of all parameters by shape (tall ones transposed), so that it runs a few large batched
products instead of many small ones.

Shapes: b matrices in a batch, m <= n after transposition.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from .groups import Blocks
from .settings import MuonSettings

# x -> a x + b x^3 + c x^5 on the singular values. Eight steps with a steep polynomial bring (0, 1] near 1 (it
# multiplies small values by 3.44 and settles in [0.68, 1.21]); two with a polynomial whose value and slope at 1 are 1
# and 0 close the gap quadratically.
COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2

# The steep steps multiply a rounding error made in step k by up to 3.4445^(8-k). With every step in fp32 the result
# strays up to 9e-3 (relative) from the exact iteration on ill-conditioned matrices; with the first three in fp64 it
# stays below 3e-4.
FP64_STEPS = 3

# Elements gathered into one batch, which bounds the step's temporary memory (about six fp32 copies of a batch). On a
# GPU a batch of this size fills the device. On a CPU, batching stops helping small matrices well before the batch
# outgrows the cache, and never helps large ones.
BATCH_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}


class _Piece(NamedTuple):
    """Logical matrices of equal size, next to each other along the first axis of a parameter."""

    parameter: int  # position in the step's parameter list
    start: int  # first row of a 2-D parameter, first matrix of a 3-D one
    number: int
    rows: int
    columns: int

    def of(self, tensor: Tensor) -> Tensor:
        """View [count, m, n], m <= n, of the piece in a tensor of the parameter's shape; writing to it writes the
        tensor.
        """
        if tensor.dim() == 2:
            tensor = tensor.narrow(0, self.start, self.number * self.rows).unflatten(0, (self.number, self.rows))
        else:
            tensor = tensor.narrow(0, self.start, self.number)
        return tensor.mT if self.rows > self.columns else tensor


@torch.no_grad()
def muon_step(
    params: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    blocks: Sequence[Blocks | None],
    *,
    lr: float,
    weight_decay: float,
    settings: MuonSettings,
) -> None:
    """One Muon step in place on `params` and `momenta` (fp32, shapes of the parameters).

    M = mu*M + G;  G' = mu*M + G (Nesterov);  W = W*(1 - lr*wd) - lr * update_rms * sqrt(max(m, n)) * polar(G') per
    logical matrix.
    """
    mu = settings.momentum
    torch._foreach_mul_(momenta, mu)
    torch._foreach_add_(momenta, grads)
    if weight_decay:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    for pieces in _batches(params, blocks):
        gradient = torch.cat([piece.of(grads[piece.parameter]) for piece in pieces]).float()
        gradient.add_(torch.cat([piece.of(momenta[piece.parameter]) for piece in pieces]), alpha=mu)
        update = orthogonalize(gradient, bf16=settings.bf16).float()
        weights = [piece.of(params[piece.parameter]) for piece in pieces]
        scale = settings.update_rms * sqrt(update.shape[-1])
        torch._foreach_add_(weights, update.split([piece.number for piece in pieces]), alpha=-lr * scale)


def orthogonalize(matrices: Tensor, *, bf16: bool | None = None) -> Tensor:
    """Approximate polar factors of a batch of fp32 matrices [..., m, n] by the hybrid Newton-Schulz iteration.

    Scale-free: any finite input, subnormal or near overflow, gives the same result as its multiples; a zero matrix
    gives zero. On CPU (or bf16=False) computes in fp32 with the first steps in fp64, returns fp32. On GPU (or
    bf16=True) computes and returns bf16. Singular values of the result, measured up to condition 100: [1.000, 1.001] in
    fp32, [0.996, 1.007] in bf16; directions more than about 10^4 below the Frobenius norm are not fully raised to 1.
    """
    if bf16 is None:
        bf16 = matrices.is_cuda
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # Squares of 1e-30 vanish in fp32: dividing by the largest entry first keeps the norm exact there. In fp64 nothing
    # vanishes.
    x = x.float() / _nonzero(x.abs().amax((-2, -1), keepdim=True)) if bf16 else x.double()
    x = x / _nonzero(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True))
    shape = x.shape
    x = x.flatten(0, -3) if x.dim() > 2 else x[None]
    dtype = torch.bfloat16 if bf16 else torch.float32
    for step, (a, b, c) in enumerate(COEFFICIENTS):
        if bf16 or step == FP64_STEPS:
            x = x.to(dtype)
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.reshape(shape)
    return x.mT if tall else x


def orthogonalize_reference(matrix: Tensor) -> Tensor:
    """`orthogonalize` of one matrix [m, n] in its own dtype, as the report writes it; tests compare with it."""
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    norm = x.norm()
    x = x / norm if norm > 0 else x
    for a, b, c in COEFFICIENTS:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def muon_reference(
    weight: Tensor,
    grad: Tensor,
    momentum: Tensor,
    blocks: Blocks | None,
    *,
    lr: float,
    weight_decay: float,
    settings: MuonSettings,
) -> tuple[Tensor, Tensor]:
    """One Muon step of one parameter, matrix by matrix: the new (weight, momentum), in the inputs' dtype."""
    momentum = settings.momentum * momentum + grad
    nesterov = settings.momentum * momentum + grad
    if weight.dim() == 3:
        matrices = list(nesterov)
    else:
        heights = [rows for count, rows in blocks or ((1, weight.shape[0]),) for _ in range(count)]
        matrices = list(nesterov.split(heights))
    updates = [orthogonalize_reference(m) * (sqrt(max(m.shape)) * settings.update_rms) for m in matrices]
    update = torch.stack(updates) if weight.dim() == 3 else torch.cat(updates)
    return weight * (1 - lr * weight_decay) - lr * update, momentum


def _batches(params: Sequence[Tensor], blocks: Sequence[Blocks | None]) -> Iterator[list[_Piece]]:
    """Pieces of all parameters, grouped by device and logical shape (ignoring orientation), at most BATCH_ELEMENTS in a
    group.
    """
    buckets: dict[tuple, list[_Piece]] = defaultdict(list)
    for index, (param, split) in enumerate(zip(params, blocks, strict=True)):
        for piece in _pieces(index, param.shape, split, BATCH_ELEMENTS[param.device.type]):
            m, n = sorted((piece.rows, piece.columns))
            buckets[param.device, m, n].append(piece)
    for (device, m, n), pieces in buckets.items():
        batch: list[_Piece] = []
        room = BATCH_ELEMENTS[device.type]
        for piece in pieces:
            elements = piece.number * m * n
            if batch and elements > room:
                yield batch
                batch, room = [], BATCH_ELEMENTS[device.type]
            batch.append(piece)
            room -= elements
        yield batch


def _pieces(index: int, shape: Sequence[int], split: Blocks | None, most: int) -> Iterator[_Piece]:
    """One parameter's logical matrices; adjacent ones of equal size are grouped, up to `most` elements."""
    *stacked, rows, columns = shape
    spans = ((stacked[0], rows),) if stacked else split or ((1, rows),)
    start = 0
    for count, height in spans:
        stride = 1 if stacked else height
        limit = max(1, most // (height * columns))
        for first in range(0, count, limit):
            yield _Piece(index, start + first * stride, min(limit, count - first), height, columns)
        start += count * stride


def _nonzero(x: Tensor) -> Tensor:
    """Divisor that leaves an all-zero matrix zero."""
    return torch.where(x > 0, x, 1.0)
