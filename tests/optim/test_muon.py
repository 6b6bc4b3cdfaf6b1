"""Muon: the iteration against exact arithmetic, and the batched step against one matrix at a time."""

from __future__ import annotations

import pytest
import torch
from matrices import polar, with_condition

from optim import muon
from optim.muon import MuonSettings, muon_reference, muon_step, orthogonalize, orthogonalize_reference

SHAPES = [(48, 48), (32, 96), (96, 32), (24, 320)]
SPECTRA = ["log", "spike", "hole"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("condition", [1.0, 10.0, 100.0])
def test_singular_values_reach_one_up_to_condition_100(shape, spectrum, condition):
    result = orthogonalize(with_condition(*shape, condition, spectrum=spectrum))
    values = torch.linalg.svdvals(result.double())
    assert result.dtype == torch.float32
    assert 0.95 <= values.min() and values.max() <= 1.05
    # What the iteration really reaches; a wrong coefficient or a step left out falls outside.
    assert 0.9995 <= values.min() and values.max() <= 1.0025


@pytest.mark.parametrize("shape", [*SHAPES, (8, 8)])
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4, 1e5, 1e6, 1e9, 1e12])
def test_fp32_follows_the_fp64_iteration_at_any_condition(shape, spectrum, condition):
    matrix = with_condition(*shape, condition, spectrum=spectrum, seed=1)
    exact = orthogonalize_reference(matrix.double())
    error = orthogonalize(matrix).double() - exact
    assert torch.linalg.matrix_norm(error, 2) <= 1e-3
    assert error.norm() <= 1e-3 * exact.norm()


def test_iteration_acts_on_singular_values_as_the_report_says():
    """A diagonal matrix shows the scalar polynomials; the coefficients are written out here a second time."""
    values = [1.0, 0.3, 1e-3, 2e-6]
    norm = sum(value**2 for value in values) ** 0.5
    expected = []
    for value in values:
        x = value / norm
        for _ in range(8):
            x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
        for _ in range(2):
            x = 2 * x - 1.5 * x**3 + 0.5 * x**5
        expected.append(x)
    assert expected[3] < 0.5, "far below the norm a value is not yet raised to 1"
    result = orthogonalize(torch.diag(torch.tensor(values)))
    torch.testing.assert_close(
        result.double(), torch.diag(torch.tensor(expected, dtype=torch.float64)), rtol=0, atol=2e-5
    )
    assert MuonSettings() == MuonSettings(momentum=0.95, update_rms=0.18, bf16=None)


@pytest.mark.parametrize("shape", SHAPES)
def test_close_to_the_polar_factor_where_the_condition_is_small(shape):
    matrix = with_condition(*shape, 10.0, seed=2)
    assert torch.linalg.matrix_norm(orthogonalize(matrix).double() - polar(matrix), 2) <= 2.5e-3


def test_bf16_stays_near_the_polar_factor():
    matrices = torch.stack([with_condition(32, 96, 10.0, seed=seed) for seed in range(4)])
    result = orthogonalize(matrices, bf16=True)
    assert result.dtype == torch.bfloat16
    values = torch.linalg.svdvals(result.double())
    assert 0.95 <= values.min() and values.max() <= 1.05
    for matrix, factor in zip(matrices, result, strict=True):
        assert (factor.double() - polar(matrix)).norm() <= 0.05 * polar(matrix).norm()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("scale", [1e-30, 1e-38, 1e30])
def test_result_does_not_depend_on_the_scale(bf16, scale):
    matrix = with_condition(16, 24, 5.0)
    scaled = orthogonalize(matrix * scale, bf16=bf16).float()
    assert (scaled - orthogonalize(matrix, bf16=bf16).float()).abs().max() <= (0.02 if bf16 else 1e-5)


@pytest.mark.parametrize("bf16", [False, True])
def test_degenerate_matrices_stay_finite(bf16):
    ones, zero = torch.ones(16, 24), torch.zeros(16, 24)
    subnormal = torch.full((16, 24), 1e-44)
    assert 0 < subnormal.max() < torch.finfo(torch.float32).tiny
    low_rank = torch.randn(16, 2) @ torch.randn(2, 24)
    batch = torch.stack([zero, ones, subnormal, low_rank])
    result = orthogonalize(batch, bf16=bf16).float()
    assert result.isfinite().all()
    assert result[0].eq(0).all()
    tolerance = 0.03 if bf16 else 1e-3
    for flat in (result[1], result[2]):  # rank one: the polar factor is the outer product of the singular vectors
        assert (flat - 1 / (16 * 24) ** 0.5).abs().max() <= tolerance
    values = torch.linalg.svdvals(result[3])
    assert (values[:2] - 1).abs().max() <= 0.05
    assert bf16 or values[2:].max() <= 1e-2


def _random(shape, generator):
    return torch.randn(shape, generator=generator)


def _step(params, grads, momenta, blocks, **changes):
    numbers = {"lr": 0.02, "weight_decay": 0.1, "settings": MuonSettings()} | changes
    muon_step(params, grads, momenta, blocks, **numbers)


def test_step_equals_the_reference_on_every_kind_of_block():
    generator = torch.Generator().manual_seed(0)
    # (shape, blocks): whole, tall, heads, tall heads, groups of two heights, experts in both orientations.
    cases = [
        ((12, 20), None),
        ((20, 12), None),
        ((24, 20), ((2, 12),)),
        ((60, 12), ((3, 20),)),
        ((40, 20), ((2, 6), (2, 6), (1, 16))),
        ((3, 12, 20), None),
        ((3, 20, 12), None),
    ]
    params = [_random(shape, generator) for shape, _ in cases]
    momenta = [torch.zeros(shape) for shape, _ in cases]
    expected = [(p.double(), m.double()) for p, m in zip(params, momenta, strict=True)]
    blocks = [split for _, split in cases]
    for _ in range(3):
        grads = [_random(shape, generator) for shape, _ in cases]
        _step(params, grads, momenta, blocks)
        expected = [
            muon_reference(w, g.double(), m, split, lr=0.02, weight_decay=0.1, settings=MuonSettings())
            for (w, m), g, split in zip(expected, grads, blocks, strict=True)
        ]
    for param, momentum, (weight, reference) in zip(params, momenta, expected, strict=True):
        torch.testing.assert_close(param.double(), weight, rtol=0, atol=2e-6)
        torch.testing.assert_close(momentum.double(), reference, rtol=1e-5, atol=1e-6)


def test_momentum_decay_and_nesterov_by_hand():
    """A 1 x 1 matrix has polar factor sign(G'), so the step can be written down."""
    weight, momentum = torch.tensor([[2.0]]), torch.tensor([[1.0]])
    _step([weight], [torch.tensor([[-0.96]])], [momentum], [None], lr=0.1, weight_decay=0.5)
    # M = 0.95 - 0.96 = -0.01 and G' = 0.95*M - 0.96 < 0, so the update is -0.18.
    assert momentum.item() == pytest.approx(-0.01, abs=1e-6)
    assert weight.item() == pytest.approx(2.0 * (1 - 0.1 * 0.5) + 0.1 * 0.18, abs=1e-6)
    # Here M and G' differ in sign: M = 0.95 - 0.94 = 0.01, G' = 0.0095 - 0.94 < 0. Without Nesterov it would sink.
    weight, momentum = torch.tensor([[0.0]]), torch.tensor([[1.0]])
    _step([weight], [torch.tensor([[-0.94]])], [momentum], [None], lr=1.0)
    assert weight.item() == pytest.approx(0.18, abs=1e-4)


def test_per_head_equals_separate_per_head_parameters():
    generator = torch.Generator().manual_seed(1)
    weight, grad = _random((4 * 8, 24), generator), _random((4 * 8, 24), generator)
    parts, part_grads = [w.clone() for w in weight.split(8)], list(grad.split(8))
    _step([weight], [grad], [torch.zeros_like(weight)], [((4, 8),)])
    for part, part_grad in zip(parts, part_grads, strict=True):
        _step([part], [part_grad], [torch.zeros_like(part)], [None])
    torch.testing.assert_close(weight, torch.cat(parts), rtol=0, atol=1e-6)

    whole = torch.cat(parts) * 0 + 1.0
    heads = whole.clone()
    _step([whole], [grad], [torch.zeros_like(whole)], [None])
    _step([heads], [grad], [torch.zeros_like(heads)], [((4, 8),)])
    assert (whole - heads).abs().max() > 1e-3, "whole-matrix and per-head updates must differ"


@pytest.mark.parametrize(
    ("shape", "split"), [((32, 96), None), ((96, 32), None), ((64, 48), ((4, 16),)), ((3, 20, 40), None)]
)
def test_update_rms(shape, split):
    weight = torch.zeros(shape)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    _step([weight], [grad], [torch.zeros(shape)], [split], lr=1.0)
    assert weight.square().mean().sqrt().item() == pytest.approx(0.18, rel=2e-3)


def test_small_batches_give_the_same_step(monkeypatch):
    generator = torch.Generator().manual_seed(4)
    shapes, blocks = [(5, 6, 8), (16, 8), (8, 6), (6, 8)], [None, ((2, 8),), None, None]
    params = [_random(shape, generator) for shape in shapes]
    grads = [_random(shape, generator) for shape in shapes]
    other = [p.clone() for p in params]
    _step(params, grads, [torch.zeros_like(p) for p in params], blocks)
    monkeypatch.setitem(muon.BATCH_ELEMENTS, "cpu", 2 * 6 * 8)
    sizes = [sum(piece.number for piece in batch) for batch in muon._batches(other, blocks)]
    assert max(sizes) == 2 and sum(sizes) == 5 + 2 + 1 + 1
    _step(other, grads, [torch.zeros_like(p) for p in other], blocks)
    for a, b in zip(params, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_equal_shapes_of_all_parameters_share_one_batch():
    params = [torch.zeros(64, 6, 8), torch.zeros(64, 8, 6), torch.zeros(24, 8), torch.zeros(8, 6)]
    batches = list(muon._batches(params, [None, None, ((4, 6),), None]))
    assert [sum(piece.number for piece in batch) for batch in batches] == [64 + 64 + 4 + 1]


def test_bf16_parameters_keep_fp32_momentum():
    weight = torch.randn(8, 12).bfloat16()
    momentum = torch.zeros(8, 12)
    before = weight.clone()
    _step([weight], [torch.randn(8, 12).bfloat16()], [momentum], [None], lr=0.5)
    assert weight.dtype == torch.bfloat16 and momentum.dtype == torch.float32
    assert weight.isfinite().all() and not weight.equal(before)
