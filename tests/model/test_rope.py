"""Rotary embedding: production frequencies and rotations bit for bit, inverse, gradient."""

from __future__ import annotations

import pytest
import torch
from golden_files import golden
from safetensors.torch import load_file

from model.config import TextConfig
from model.rope import inverse_frequencies, rotate, rotations


@pytest.mark.parametrize("kind", ["window", "compressed"])
def test_production_table(kind: str) -> None:
    """Released theta and YaRN, positions up to 1,048,575, 64 rotated channels of 96."""
    data = load_file(golden("detail/rope") / "rope_production.safetensors")
    frequencies = inverse_frequencies(TextConfig(), compressed=kind == "compressed")
    assert torch.equal(frequencies, data[f"{kind}.inv_freq"])
    phasors = rotations(data["positions"], frequencies)
    angles = data[f"{kind}.angles"]
    unit = torch.polar(torch.ones_like(angles), angles)
    assert torch.equal(torch.view_as_complex(phasors), unit)
    x = data["x"][0]
    pairs = torch.view_as_complex(x[..., -64:].unflatten(-1, (-1, 2)).contiguous())
    complex_product = torch.view_as_real(pairs * unit.view(-1, *[1] * (x.dim() - 2), 32)).flatten(-2)
    torch.testing.assert_close(rotate(x, phasors)[..., -64:], complex_product, atol=3e-7, rtol=0)
    torch.testing.assert_close(rotate(x, phasors), data[f"{kind}.rotated"][0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(rotate(x, phasors, inverse=True), data[f"{kind}.inverse"][0], atol=1e-6, rtol=1e-6)


def test_yarn_stretches_only_the_slow_pairs() -> None:
    config = TextConfig()
    plain = config.compress_rope_theta ** -(torch.arange(0, 64, 2) / 64)
    ratio = inverse_frequencies(config, compressed=True) / plain
    turns = plain * config.rope_scaling.original_max_position_embeddings / (2 * torch.pi)
    torch.testing.assert_close(ratio[turns > 40], torch.ones(int((turns > 40).sum())))
    torch.testing.assert_close(ratio[turns < 0.5], torch.full((int((turns < 0.5).sum()),), 1 / 16))
    assert (ratio.diff() <= 1e-6).all()


def test_adjacent_pairs_of_the_last_channels_turn() -> None:
    angle = torch.tensor([[0.3, 1.1]])
    x = torch.tensor([[7.0, 8.0, 1.0, 0.0, 0.0, 2.0]])
    out = rotate(x, torch.stack([angle.cos(), angle.sin()], -1))
    a, b = angle[0]
    torch.testing.assert_close(out[0], torch.stack([x[0, 0], x[0, 1], a.cos(), a.sin(), -2 * b.sin(), 2 * b.cos()]))


def test_inverse_undoes_and_gradient_turns_back() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 12, generator=generator, requires_grad=True)
    upstream = torch.randn(5, 3, 12, generator=generator)
    phasors = rotations(torch.arange(5) * 100, inverse_frequencies(TextConfig(qk_rope_head_dim=8), True))
    out = rotate(x, phasors)
    torch.testing.assert_close(rotate(out, phasors, inverse=True), x)
    (ours,) = torch.autograd.grad(out, x, upstream)
    pairs = (
        torch.view_as_complex(x[..., 4:].unflatten(-1, (-1, 2)).contiguous()) * torch.view_as_complex(phasors)[:, None]
    )
    plain = torch.cat([x[..., :4], torch.view_as_real(pairs).flatten(-2)], -1)
    torch.testing.assert_close(ours, torch.autograd.grad(plain, x, upstream)[0])


def test_scores_depend_on_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 16, generator=generator)
    frequencies = inverse_frequencies(TextConfig(qk_rope_head_dim=8), True)

    def score(i: int, j: int) -> float:
        at = lambda x, p: rotate(x, rotations(torch.tensor([p]), frequencies))  # noqa: E731
        return (at(q, i) * at(k, j)).sum().item()

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-4)
