"""Momentum with Sinkhorn-balanced updates, for the token embedding, the head and the Engram tables.

V4.1 report (arXiv 2609.19969), Algorithm 1. The update is the momentum with its rows and columns alternately
normalised. Every normalisation multiplies a whole row or column, so the balanced table is diag(r) G diag(c): the
iteration here updates the two scale vectors by matrix-vector products and touches the table once at the end.

Rows that the mask removes (mostly zero rows) get no update, so everything after the mask runs on the live rows alone. A
step touches few rows of an Engram table; the others cost one pass for momentum decay and row norms.

Shapes: a table has m rows and n columns, l <= m of the rows live.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from .settings import SinkhornSettings

# Elements processed at once where a pass needs temporary copies of a table. On a CPU they should fit in the cache
# (measured: four times faster than with 32 times as many); on a GPU a chunk should be large enough to hide its launches
# and small enough to save memory.
CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 26}

Reduce = Callable[[Tensor], Tensor]


class Balanced(NamedTuple):
    """A balanced table of live rows: row[:, None] * table * column."""

    table: Tensor  # fp32 [l, n], rows of norm 1
    row: Tensor  # fp64 [l]
    column: Tensor  # fp64 [n]

    def update(self) -> Tensor:
        """The product, fp32 [l, n]. Overwrites `table`."""
        return self.table.mul_(self.row.float()[:, None]).mul_(self.column.float())


def not_split(x: Tensor) -> Tensor:
    """The `Reduce` for a table that is whole on this rank: its sums are already complete."""
    return x


@torch.no_grad()
def sinkhorn_step(
    param: Tensor, grad: Tensor, momentum: Tensor, *, lr: float, settings: SinkhornSettings, reduce: Reduce = not_split
) -> None:
    """One step in place on `param` [m, n] and `momentum` (fp32 [m, n]).

    M = b*M + (1-b)*G;  G' = b*M + (1-b)*G;  W -= update_rms * lr * sqrt(n) * balanced(G').
    """
    b = settings.momentum
    pieces = []
    for m_rows, g_rows in zip(_chunks(momentum), _chunks(grad), strict=True):
        m_rows.lerp_(g_rows.float(), 1 - b)
        pieces.append(row_norms(_nesterov(m_rows, g_rows, b)))
    norms = torch.cat(pieces)
    rows = live_rows(norms, settings.tau, reduce)
    scale = -lr * settings.update_rms * sqrt(param.shape[1])
    if rows is None:
        balanced = balance(_nesterov(momentum, grad, b), norms, settings, reduce)
        param.add_(balanced.update(), alpha=scale)
    else:
        balanced = balance(_nesterov(momentum[rows], grad[rows], b), norms[rows], settings, reduce)
        param.index_add_(0, rows, balanced.update().to(param.dtype), alpha=scale)


def row_norms(table: Tensor) -> Tensor:
    """Euclidean row norms, fp64: squares of fp32's smallest values do not vanish, and the mask's `<=` is exact."""
    return torch.linalg.vector_norm(table.double(), dim=1)


def live_rows(norms: Tensor, tau: float, reduce: Reduce = not_split) -> Tensor | None:
    """Rows that the mask keeps, int64 [l], or None for all: norm > tau * mean over all m rows. norms: fp64 [m]."""
    total = reduce(torch.stack([norms.sum(), norms.new_tensor(norms.numel())]))
    rows = (norms > tau * (total[0] / total[1])).nonzero().squeeze(1)
    return None if rows.numel() == norms.numel() else rows


def balance(table: Tensor, norms: Tensor, settings: SinkhornSettings, reduce: Reduce = not_split) -> Balanced:
    """Alternately normalise the rows and columns of the live rows, by means of two scale vectors.

    `table` fp32 [l, n] is overwritten; `norms` fp64 [l] are its row norms, none of them zero.

    The vectors are fp64, so that eps = 1e-20 and the scale of tiny gradients are exact; products over the table are
    fp32. A column whose entries are all below about 1e-19 of their rows' norms counts as zero, because its squares
    underflow in fp32.
    """
    # Rows are first divided by their norms in fp32, so that the squares below neither underflow nor overflow, whatever
    # the gradient's scale. The row vector starts from the divisor actually used, so the rewriting is exact, eps
    # included.
    scale = norms.float()
    table.div_(scale[:, None])
    squares = table.square()
    row, column = scale.double(), torch.ones(table.shape[1], dtype=torch.float64, device=table.device)
    for k in range(settings.iterations):
        if k % 2 == 0:
            row = _normalise(row, _weighted_norms(squares, column), settings.eps)
        else:
            column = _normalise(column, _weighted_norms(squares.T, row, reduce), settings.eps)
    return Balanced(table, row, column)


def sinkhorn_reference(
    weight: Tensor, grad: Tensor, momentum: Tensor, *, lr: float, settings: SinkhornSettings
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 as the report writes it, in the inputs' dtype: the new (weight, momentum)."""
    b = settings.momentum
    momentum = b * momentum + (1 - b) * grad
    u = balance_reference(b * momentum + (1 - b) * grad, settings)
    return weight - settings.update_rms * lr * sqrt(weight.shape[1]) * u, momentum


def balance_reference(table: Tensor, settings: SinkhornSettings) -> Tensor:
    """Mask, then K normalisations that rewrite the table, in the table's dtype."""
    norms = table.norm(dim=1)
    u = torch.where((norms <= settings.tau * norms.mean())[:, None], 0.0, table)
    for k in range(1, settings.iterations + 1):
        u = u / (u.norm(dim=1 if k % 2 else 0, keepdim=True) + settings.eps)
    return u


def _chunks(table: Tensor) -> tuple[Tensor, ...]:
    return table.split(max(1, CHUNK_ELEMENTS[table.device.type] // table.shape[1]))


def _nesterov(momentum: Tensor, grad: Tensor, b: float) -> Tensor:
    return (momentum * b).add_(grad, alpha=1 - b)


def _weighted_norms(squares: Tensor, weights: Tensor, reduce: Reduce = not_split) -> Tensor:
    """sqrt(squares @ weights^2) in fp64. The product runs in fp32, with weights scaled to at most 1 so that their
    squares stay finite.

    `reduce` completes the sums if the summed axis is split over ranks.
    """
    largest = weights.amax() if weights.numel() else weights.new_ones(())
    sums = squares @ (weights / largest).square().float()
    return reduce(sums.double() * largest.square()).sqrt()


def _normalise(scale: Tensor, norms: Tensor, eps: float) -> Tensor:
    """scale / (norms + eps), except that a zero row or column keeps its scale, since dividing by eps repeatedly would
    overflow.
    """
    return torch.where(norms > 0, scale / (norms * scale + eps), scale)
