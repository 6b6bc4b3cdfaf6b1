"""Sinkhorn balancing: two scale vectors on the live rows against Algorithm 1 written out in fp64."""

from __future__ import annotations

import threading
from math import sqrt

import pytest
import torch

from optim import sinkhorn
from optim.sinkhorn import (
    SinkhornSettings,
    balance,
    balance_reference,
    live_rows,
    row_norms,
    sinkhorn_reference,
    sinkhorn_step,
)

SETTINGS = SinkhornSettings()


def _table(m, n, seed=0, spread=3.0):
    """Rows and columns of very different size."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(m, n, generator=generator)
    rows = torch.exp(spread * torch.randn(m, 1, generator=generator))
    return table * rows * torch.exp(torch.randn(n, generator=generator))


def _update(table, settings=SETTINGS):
    """The whole balanced table by the fast path."""
    norms = row_norms(table)
    rows = live_rows(norms, settings.tau)
    if rows is None:
        return balance(table.clone(), norms, settings).update()
    return torch.zeros_like(table).index_copy_(0, rows, balance(table[rows], norms[rows], settings).update())


def _steps(step, param, grads):
    momentum = torch.zeros_like(param)
    for grad in grads:
        param, momentum = step(param, grad, momentum)
    return param, momentum


def _fast(param, grad, momentum):
    param, momentum = param.clone(), momentum.clone()
    sinkhorn_step(param, grad, momentum, lr=0.02, settings=SETTINGS)
    return param, momentum


def _plain(param, grad, momentum):
    return sinkhorn_reference(param, grad, momentum, lr=0.02, settings=SETTINGS)


@pytest.mark.parametrize("shape", [(40, 16), (16, 40), (300, 8), (1, 8), (8, 1)])
@pytest.mark.parametrize("iterations", [1, 2, 11])
def test_equals_the_fp64_algorithm(shape, iterations):
    settings = SinkhornSettings(iterations=iterations)
    table = _table(*shape)
    expected = balance_reference(table.double(), settings)
    torch.testing.assert_close(_update(table, settings).double(), expected, rtol=2e-5, atol=1e-6 * sqrt(shape[1]))


@pytest.mark.parametrize("live", [1.0, 0.3])
def test_steps_equal_the_fp64_algorithm(live, monkeypatch):
    monkeypatch.setitem(sinkhorn.CHUNK_ELEMENTS, "cpu", 7 * 16)  # several chunks, the last one short
    param = torch.randn(50, 16, generator=torch.Generator().manual_seed(9))
    grads = [_table(50, 16, seed, spread=1.0) for seed in range(4)]
    touched = torch.rand(50, generator=torch.Generator().manual_seed(1)) < live
    grads = [grad * touched[:, None] for grad in grads]
    weight, momentum = _steps(_fast, param, grads)
    expected, expected_momentum = _steps(_plain, param.double(), [grad.double() for grad in grads])
    torch.testing.assert_close(weight.double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(momentum.double(), expected_momentum, rtol=1e-5, atol=1e-7)
    assert weight[~touched].equal(param[~touched]), "rows without momentum must not move"


def test_report_numbers():
    assert SETTINGS == SinkhornSettings(momentum=0.95, iterations=11, tau=1e-3, eps=1e-20, update_rms=0.18)


def test_momentum_by_hand():
    """One row, one column: the balanced value is the sign of G' = b*M + (1-b)*G with the new M."""
    param, momentum = torch.zeros(1, 1), torch.tensor([[1.0]])
    sinkhorn_step(param, torch.tensor([[-18.9]]), momentum, lr=1.0, settings=SETTINGS)
    # M = 0.95 - 0.945 = 0.005 and G' = 0.00475 - 0.945 < 0: without Nesterov the weight would sink.
    assert momentum.item() == pytest.approx(0.005, abs=1e-6)
    assert param.item() == pytest.approx(0.18, rel=1e-6)


def test_mask_boundary_counts_all_rows():
    column = torch.zeros(4, 3)
    column[:, 0] = torch.tensor([1.0, 1999.0, 0.0, 0.0])
    # N = [1, 1999]: the mean is 1000 and tau times it exactly 1, which `<=` masks.
    two = column[:2]
    assert live_rows(row_norms(two), SETTINGS.tau).tolist() == [1]
    assert _update(two).tolist() == [[0, 0, 0], [1, 0, 0]]
    # N = [1, 1999, 0, 0]: the zero rows halve the mean, and row 0 stays.
    assert live_rows(row_norms(column), SETTINGS.tau).tolist() == [0, 1]
    expected = balance_reference(column.double(), SETTINGS)
    assert expected[0, 0] != 0
    torch.testing.assert_close(_update(column).double(), expected, rtol=1e-6, atol=0)
    # Just above and below the boundary.
    assert live_rows(torch.tensor([1.0 + 1e-12, 1999.0], dtype=torch.float64), SETTINGS.tau) is None
    assert live_rows(torch.tensor([1.0 - 1e-12, 1999.0], dtype=torch.float64), SETTINGS.tau).tolist() == [1]


def test_zero_rows_do_not_change_the_others():
    table = _table(30, 12, spread=0.5)
    padded = torch.zeros(90, 12)
    at = torch.randperm(90, generator=torch.Generator().manual_seed(0))[:30]
    padded[at] = table
    torch.testing.assert_close(_update(padded)[at], _update(table), rtol=1e-5, atol=1e-6)
    assert live_rows(row_norms(padded), SETTINGS.tau).numel() == 30


def test_cancelled_momentum_still_counts_its_gradient():
    """M = 0 after the step does not mean an update of zero: G' also holds the new gradient."""
    momentum = torch.zeros(2, 4)
    momentum[0], momentum[1] = 1.0, 1.0
    grad = torch.ones(2, 4)
    grad[0] = -19.0  # 0.95*1 - 0.05*19 = 0 up to rounding
    param = torch.zeros(2, 4)
    expected, _ = sinkhorn_reference(param.double(), grad.double(), momentum.double(), lr=0.02, settings=SETTINGS)
    sinkhorn_step(param, grad, momentum, lr=0.02, settings=SETTINGS)
    assert expected[0].abs().min() > 1e-4
    torch.testing.assert_close(param.double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e-22, 1e-20, 1e-18, 1e-10, 1e10, 1e30])
def test_scale_of_the_gradient_and_eps(scale):
    """eps = 1e-20 acts as in exact arithmetic, far below fp32's square root of its smallest number too."""
    table = (_table(24, 8, spread=0.7).clamp(-50, 50)) * scale
    assert table.abs().max() > 0
    expected = balance_reference(table.double(), SETTINGS)
    torch.testing.assert_close(_update(table).double(), expected, rtol=5e-5, atol=1e-6)


def test_all_zero_gradient_moves_nothing():
    param, momentum = torch.ones(6, 4), torch.zeros(6, 4)
    sinkhorn_step(param, torch.zeros(6, 4), momentum, lr=1.0, settings=SETTINGS)
    assert param.eq(1).all() and momentum.eq(0).all()


def test_zero_columns_stay_zero_and_finite():
    table = _table(20, 6, spread=0.5)
    table[:, 2] = 0
    update = _update(table)
    assert update.isfinite().all() and update[:, 2].eq(0).all()
    torch.testing.assert_close(update.double(), balance_reference(table.double(), SETTINGS), rtol=2e-5, atol=1e-6)


def test_update_rms_of_live_rows():
    """The last normalisation acts on rows, so every live row's update has root mean square 0.18."""
    param, momentum = torch.zeros(40, 16), torch.zeros(40, 16)
    grad = _table(40, 16, spread=0.5)
    grad[5] = 0
    sinkhorn_step(param, grad, momentum, lr=1.0, settings=SETTINGS)
    rms = param.square().mean(1).sqrt()
    assert rms[5] == 0
    torch.testing.assert_close(rms[torch.arange(40) != 5], torch.full((39,), 0.18), rtol=1e-5, atol=0)


@pytest.mark.parametrize("tau, scales", [(1e-3, (1.0, 0.02, 1.0)), (0.0, (1.0, 1e-20, 1.0))])
def test_row_shards_need_only_the_two_reductions(tau, scales):
    """Shards that exchange nothing but what `reduce` is given compute the whole table's steps: shards of very
    different size, of which the mask of the whole table removes other rows than their own means would; one without a
    live row, and one without any row.
    """
    settings = SinkhornSettings(tau=tau)
    heights = [20, 20, 20, 0]
    grads = [_table(60, 8, seed=seed, spread=2.0) for seed in range(3)]
    for grad in grads:
        grad[torch.arange(60) % 3 == 0] = 0
        grad[40:] = 0  # the third shard is dead, yet takes part in every reduction
        grad *= torch.tensor(scales).repeat_interleave(20)[:, None]
    whole, momentum = torch.randn(60, 8), torch.zeros(60, 8)
    shards, momenta = list(whole.clone().split(heights)), list(momentum.clone().split(heights))
    if tau:
        first, second = row_norms(grads[0])[:20], row_norms(grads[0])[20:40]
        kept = second > tau * second.mean()
        assert (kept & (second <= tau * torch.cat([first, second, torch.zeros(20)]).mean())).any()
    for grad in grads:
        sinkhorn_step(whole, grad, momentum, lr=0.1, settings=settings)
    box, barrier = [None] * 4, threading.Barrier(4, timeout=300)
    calls = [0] * 4

    def run(rank):
        def reduce(x):
            calls[rank] += 1
            box[rank] = x
            barrier.wait()
            total = sum(box)
            barrier.wait()
            return total

        for grad in grads:
            piece = grad.split(heights)[rank]
            sinkhorn_step(shards[rank], piece, momenta[rank], lr=0.1, settings=settings, reduce=reduce)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [3 * 6] * 4  # in every step the mean row norm, and five column sums
    torch.testing.assert_close(torch.cat(shards), whole, rtol=0, atol=1e-6)
    assert torch.equal(torch.cat(momenta), momentum)


def test_bf16_tables_keep_fp32_momentum():
    param, momentum = torch.ones(12, 8).bfloat16(), torch.zeros(12, 8)
    grad = torch.randn(12, 8).bfloat16()
    grad[3] = 0
    sinkhorn_step(param, grad, momentum, lr=0.5, settings=SETTINGS)
    assert param.dtype == torch.bfloat16 and momentum.dtype == torch.float32
    assert param[3].eq(1).all() and param.isfinite().all() and not param[0].eq(1).all()
