"""The Muon optimizer: the momentum of every logical matrix is orthogonalised by a hybrid Newton-Schulz iteration.

Source: V4.1 report (arXiv 2609.19969), section on optimisation. A logical matrix is what the network applies as one
linear map: an attention head's rows of wq_b, one expert's w1, one group of wo_a, or a whole weight. Each logical matrix
is orthogonalised separately. The step gathers the logical matrices of all parameters by shape (tall ones transposed),
so that it runs a few large batched products instead of many small ones.

In the shapes below, b is the number of matrices in a batch, and each matrix has m rows and n >= m columns (after the
transposition of tall ones).
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

# The (a, b, c) of every iteration step, which maps each singular value x to a x + b x^3 + c x^5. Eight steps with a
# steep polynomial bring singular values from (0, 1] close to 1 (it multiplies small values by 3.44; the results lie in
# [0.68, 1.21]). Two steps with a polynomial that has value 1 and slope 0 at x = 1 then converge to 1 quadratically.
COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2

# The steep steps multiply a rounding error made in step k by up to 3.4445^(8-k). With every step in fp32 the result
# strays up to 9e-3 (relative) from the exact iteration on ill-conditioned matrices; with the first three in fp64 it
# stays below 3e-4.
FP64_STEPS = 3

# The number of elements gathered into one batch, which bounds the step's temporary memory (about six fp32 copies of a
# batch). On a GPU a batch of this size fills the device. On a CPU, batching stops helping small matrices well before
# the batch outgrows the cache, and never helps large ones.
BATCH_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}


class _Piece(NamedTuple):
    """A run of logical matrices of equal size that are adjacent along the first axis of one parameter."""

    parameter: int  # position in the step's parameter list
    start: int  # first row of a 2-D parameter, first matrix of a 3-D one
    number: int
    rows: int
    columns: int

    def of(self, tensor: Tensor) -> Tensor:
        """A view [count, m, n] with m <= n of this piece's matrices in a tensor of the parameter's shape."""
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
    """One Muon step that updates `params` and `momenta` (fp32, of the parameters' shapes) in place.

    For each logical matrix, the update is M = mu*M + G, then G' = mu*M + G (Nesterov), then
    W = W*(1 - lr*wd) - lr * update_rms * sqrt(max(m, n)) * polar(G').
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
    """Orthogonalise a batch of fp32 matrices [..., m, n]: return their approximate polar factors, computed by
    Newton-Schulz iteration.

    The result does not depend on the scale of the input, even if it is subnormal or close to overflow; a zero matrix
    gives zero. On a CPU (or with bf16=False) the iteration runs in fp32, its first steps in fp64, and returns fp32. On
    a GPU (or with bf16=True) it runs in bf16 and returns bf16. Up to condition number 100, the measured singular values
    of the result are in [1.000, 1.001] in fp32 and in [0.996, 1.007] in bf16. Singular values more than about 10^4
    times smaller than the Frobenius norm do not fully reach 1.
    """
    if bf16 is None:
        bf16 = matrices.is_cuda
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # In fp32 the square of 1e-30 underflows to 0, so the matrix is divided by its largest entry before the norm is
    # computed. In fp64 the squares of fp32 numbers do not underflow.
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
    """Reference for `orthogonalize`: the iteration of the V4.1 report for one matrix [m, n], in its own dtype; tests
    compare the results of `orthogonalize` with this function.
    """
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
    """Reference for one Muon step of one parameter, computed matrix by matrix; returns the new (weight, momentum) in
    the dtype of the inputs.
    """
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
    """The logical matrices of all parameters, batched by device and shape (a matrix and its transpose count as the same
    shape), with at most BATCH_ELEMENTS elements in a batch.
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
    """The logical matrices of one parameter; adjacent matrices of equal size form one piece, of at most `most`
    elements.
    """
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
    """`x` with zeros replaced by a positive divisor, so that dividing an all-zero matrix by it gives zero."""
    return torch.where(x > 0, x, 1.0)
