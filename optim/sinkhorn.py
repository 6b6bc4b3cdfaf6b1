"""The optimizer of the token embedding, the head and the Engram tables: momentum whose updates are Sinkhorn-balanced.

This is Algorithm 1 of the V4.1 report (arXiv 2609.19969). The update is the momentum after its rows and its columns
have been normalised alternately several times. Every normalisation rescales whole rows or columns, so the balanced
table is diag(r) G diag(c). The implementation therefore iterates on the two scale vectors r and c with matrix-vector
products, and rescales the table only once, at the end.

Rows whose norm is too small (mostly zero rows) are masked and not updated; all work after the mask is done on the
remaining, live rows only. In a step, few rows of an Engram table are live; the masked rows cost only one pass over the
table, for momentum decay and row norms.

In the shapes below, a table has m rows and n columns, and l <= m of its rows are live (not masked).
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
    """The balanced table of the live (not masked) rows in factored form: it equals row[:, None] * table * column."""

    table: Tensor  # fp32 [l, n], rows of norm 1
    row: Tensor  # fp64 [l]
    column: Tensor  # fp64 [n]

    def update(self) -> Tensor:
        """Returns the balanced table, fp32 [l, n], and overwrites the factor `table`."""
        return self.table.mul_(self.row.float()[:, None]).mul_(self.column.float())


def not_split(x: Tensor) -> Tensor:
    """The `reduce` argument for a table that is not split over ranks: sums on this rank are already complete."""
    return x


@torch.no_grad()
def sinkhorn_step(
    param: Tensor, grad: Tensor, momentum: Tensor, *, lr: float, settings: SinkhornSettings, reduce: Reduce = not_split
) -> None:
    """One optimizer step that updates `param` [m, n] and `momentum` (fp32 [m, n]) in place.

    The update is M = b*M + (1-b)*G, then G' = b*M + (1-b)*G, then W -= update_rms * lr * sqrt(n) * balanced(G').
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
    """Euclidean row norms in fp64, where squares of tiny fp32 values do not underflow and the comparison with `tau` is
    exact.
    """
    return torch.linalg.vector_norm(table.double(), dim=1)


def live_rows(norms: Tensor, tau: float, reduce: Reduce = not_split) -> Tensor | None:
    """Indices int64 [l] of the rows whose norm exceeds tau * (mean norm of all m rows), or None if all rows do. norms:
    fp64 [m].
    """
    total = reduce(torch.stack([norms.sum(), norms.new_tensor(norms.numel())]))
    rows = (norms > tau * (total[0] / total[1])).nonzero().squeeze(1)
    return None if rows.numel() == norms.numel() else rows


def balance(table: Tensor, norms: Tensor, settings: SinkhornSettings, reduce: Reduce = not_split) -> Balanced:
    """Alternately normalise rows and columns of a table of live rows, by updating two scale vectors.

    `table` fp32 [l, n] is overwritten; `norms` fp64 [l] are its row norms, all of them above zero.

    The scale vectors are fp64, so that eps = 1e-20 and tiny gradients are represented exactly; products with the table
    are fp32. A column is treated as zero if each of its entries is less than about 1e-19 of its row's norm, because the
    squares of the entries underflow in fp32.
    """
    # Rows are first divided by their norms in fp32, so that the squares below neither underflow nor overflow, whatever
    # the scale of the gradient. The row scales start from exactly these fp32 divisors, so that scale times table still
    # equals the original table.
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
    """Reference for one step, written as in the report's Algorithm 1: returns the new (weight, momentum) in the dtype
    of the inputs.
    """
    b = settings.momentum
    momentum = b * momentum + (1 - b) * grad
    u = balance_reference(b * momentum + (1 - b) * grad, settings)
    return weight - settings.update_rms * lr * sqrt(weight.shape[1]) * u, momentum


def balance_reference(table: Tensor, settings: SinkhornSettings) -> Tensor:
    """Reference for `balance`: mask the small rows of the table, then normalise rows and columns K times, in the
    table's dtype.
    """
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
    """Returns sqrt(squares @ weights^2) in fp64. The matrix product runs in fp32, with weights scaled to at most 1 so
    that their squares do not overflow.

    `reduce` adds up the sums of all ranks if the summed axis is split over ranks.
    """
    largest = weights.amax() if weights.numel() else weights.new_ones(())
    sums = squares @ (weights / largest).square().float()
    return reduce(sums.double() * largest.square()).sqrt()


def _normalise(scale: Tensor, norms: Tensor, eps: float) -> Tensor:
    """Returns scale / (norms + eps), except that a zero row or column keeps its scale, because repeated division by eps
    would overflow.
    """
    return torch.where(norms > 0, scale / (norms * scale + eps), scale)
