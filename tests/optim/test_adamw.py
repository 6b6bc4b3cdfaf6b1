from __future__ import annotations

import pytest
import torch

from optim.adamw import AdamWSettings, adamw_step


def test_equals_torch_adamw_in_fp64():
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator) for shape in ((5,), (3, 4), ())]
    means, squares = ([torch.zeros_like(p) for p in params] for _ in range(2))
    expected = [p.double().clone().requires_grad_() for p in params]
    plain = torch.optim.AdamW(expected, lr=0.01, betas=(0.9, 0.95), eps=1e-20, weight_decay=0.1)
    for step in range(1, 6):
        grads = [torch.randn(p.shape, generator=generator) for p in params]
        for param, grad in zip(expected, grads, strict=True):
            param.grad = grad.double()
        plain.step()
        adamw_step(params, grads, means, squares, [step] * 3, lr=0.01, weight_decay=0.1, settings=AdamWSettings())
    for param, reference in zip(params, expected, strict=True):
        torch.testing.assert_close(param.double(), reference.detach(), rtol=0, atol=1e-6)


def test_report_numbers():
    assert AdamWSettings() == AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-20)


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-30, 1e-21, 1e-12, 1e18])
def test_extreme_gradients_give_finite_updates(scale):
    params, grads = [torch.zeros(4)], [torch.full((4,), scale)]
    adamw_step(
        params, grads, [torch.zeros(4)], [torch.zeros(4)], [1], lr=1.0, weight_decay=0.0, settings=AdamWSettings()
    )
    assert params[0].abs().max() <= 1.0 + 1e-5
    if 1e-15 < scale:
        assert params[0][0].item() == pytest.approx(-1.0, rel=1e-4)


def test_bf16_parameters_with_fp32_state():
    params, grads = [torch.ones(4).bfloat16()], [torch.ones(4).bfloat16()]
    means, squares = [torch.zeros(4)], [torch.zeros(4)]
    adamw_step(params, grads, means, squares, [1], lr=0.25, weight_decay=0.0, settings=AdamWSettings())
    assert params[0].dtype == torch.bfloat16 and params[0].tolist() == [0.75] * 4
    assert means[0].dtype == torch.float32
