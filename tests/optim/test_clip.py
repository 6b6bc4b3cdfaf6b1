from __future__ import annotations

from math import inf, isnan

import pytest
import torch
from torch import nn

from optim import clip_, global_norm


def _params(*grads):
    params = [nn.Parameter(torch.zeros(len(grad))) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = torch.tensor(grad)
    return params


def test_norm_over_all_parameters_each_counted_once():
    params = _params([3.0], [0.0, 4.0])
    without_grad = nn.Parameter(torch.zeros(2))
    assert global_norm(params).item() == 5.0
    assert global_norm([*params, params[0], without_grad, params[1]]).item() == 5.0
    assert global_norm([without_grad]).item() == 0.0
    assert clip_([*params, params[0]], 1.0).item() == 5.0
    torch.testing.assert_close(params[0].grad, torch.tensor([0.6]))  # scaled once, not twice
    torch.testing.assert_close(params[1].grad, torch.tensor([0.0, 0.8]))


def test_gradients_within_the_limit_keep_their_bits():
    params = _params([0.1, 0.2], [0.3])
    before = [param.grad.clone() for param in params]
    clip_(params, 1.0)
    assert all(param.grad.equal(grad) for param, grad in zip(params, before, strict=True))
    zero = _params([0.0, 0.0])
    assert clip_(zero, 1.0).item() == 0.0 and zero[0].grad.eq(0).all()


def test_accumulates_bf16_in_fp32():
    params = [nn.Parameter(torch.zeros(70_000, dtype=torch.bfloat16))]
    params[0].grad = torch.ones(70_000, dtype=torch.bfloat16)
    norm = global_norm(params)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(70_000**0.5, rel=1e-6)


def test_non_finite_norms_are_reported():
    assert clip_(_params([1.0, inf]), 1.0).item() == inf
    assert isnan(clip_(_params([1.0, float("nan")]), 1.0).item())


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_bad_limit_is_refused(max_norm):
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        clip_(_params([1.0]), max_norm)
