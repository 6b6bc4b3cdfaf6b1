"""One optimizer, three methods: learning rates, freezing, and a state that survives a checkpoint bit for bit."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from optim import Optimizer, Rule, assign

RULES = [
    Rule("table", "sinkhorn", lr_factor=5.0),
    Rule("matrix", "muon", blocks=((2, 4),), weight_decay=0.1),
    Rule("experts", "muon", weight_decay=0.1),
    Rule("norm", "adamw", weight_decay=0.1),
    Rule("tower", "muon", schedule="vision"),
    Rule("tower_bias", "adamw", schedule="vision"),
]
SHAPES = {"table": (10, 6), "matrix": (8, 6), "experts": (3, 4, 6), "norm": (6,), "tower": (4, 6), "tower_bias": (4,)}


def _params(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def _optimizer(params):
    return Optimizer(assign(params.items(), RULES))


def _train(params, optimizer, steps, factor=0.5):
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for param in params.values():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.set_lr(0.02, {"vision": factor})
        optimizer.step()


def _values(params):
    return {name: param.detach().clone() for name, param in params.items()}


def test_learning_rate_is_factor_times_schedule():
    optimizer = _optimizer(_params())
    optimizer.set_lr(0.1, {"vision": 0.25})
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["names"]}
    assert rates == pytest.approx(
        {"table": 0.5, "matrix": 0.1, "experts": 0.1, "norm": 0.1, "tower": 0.025, "tower_bias": 0.025}
    )
    with pytest.raises(ValueError, match="no factor for schedule vision; it got factors for main"):
        optimizer.set_lr(0.1)


def test_table_rate_factor_scales_the_update():
    slow, fast = nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(6, 4))
    optimizer = Optimizer(
        assign([("a", slow), ("b", fast)], [Rule("a", "sinkhorn"), Rule("b", "sinkhorn", lr_factor=5.0)])
    )
    slow.grad = fast.grad = torch.randn(6, 4)
    optimizer.set_lr(0.1)
    optimizer.step()
    torch.testing.assert_close(fast.data, 5 * slow.data)


def test_a_frozen_group_is_skipped_entirely():
    params = _params()
    before = _values(params)
    optimizer = _optimizer(params)
    _train(params, optimizer, range(2), factor=0.0)
    frozen = {"tower", "tower_bias"}
    for name, param in params.items():
        assert param.equal(before[name]) == (name in frozen), name
        assert (param in optimizer.state) == (name not in frozen), name
    active = {id(p) for p in optimizer.active_parameters()}
    assert active == {id(p) for name, p in params.items() if name not in frozen}
    # Thawed late, AdamW's bias correction starts with the tower's own first step: the update is the gradient's sign.
    _train(params, optimizer, [2], factor=1.0)
    moved = params["tower_bias"].detach() - before["tower_bias"]
    torch.testing.assert_close(moved, -0.02 * params["tower_bias"].grad.sign())


def test_parameters_without_gradient_are_left_alone():
    params = _params()
    optimizer = _optimizer(params)
    _train(params, optimizer, [0])
    before = _values(params)
    for name in ("matrix", "table", "norm"):
        params[name].grad = None
    optimizer.step()
    assert {name for name in params if params[name].equal(before[name])} == {"matrix", "table", "norm"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_exact_and_keeps_dtypes(dtype):
    params = _params(dtype)
    optimizer = _optimizer(params)
    _train(params, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": _values(params), "optimizer": optimizer.state_dict()}, file)
    _train(params, optimizer, range(3, 6))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = {name: nn.Parameter(value) for name, value in saved["model"].items()}
    # Another order of parameters and groups: state is matched by name.
    other = Optimizer(assign(reversed(resumed.items()), RULES[::-1]))
    other.load_state_dict(saved["optimizer"])
    for name, param in resumed.items():
        assert other.state[param], name
        for key, value in other.state[param].items():
            assert key == "step" or value.dtype == torch.float32, (name, key)
    _train(resumed, other, range(3, 6))
    for name in params:
        assert resumed[name].equal(params[name]), name
        for key, value in optimizer.state[params[name]].items():
            restored = other.state[resumed[name]][key]
            assert restored == value if key == "step" else restored.equal(value), (name, key)


def test_loading_copies_and_keeps_the_rules_numbers():
    params = _params()
    optimizer = _optimizer(params)
    _train(params, optimizer, [0])
    state = optimizer.state_dict()
    state["param_groups"][0]["weight_decay"] = 9.0
    other_params = _params()
    other = _optimizer(other_params)
    other.load_state_dict(state)
    assert all(group["weight_decay"] != 9.0 for group in other.param_groups)
    restored = other.state[other_params["norm"]]["mean"]
    optimizer.state[params["norm"]]["mean"].zero_()
    assert not restored.eq(0).any()


def test_a_state_that_does_not_fit_is_refused_whole():
    params = _params()
    optimizer = _optimizer(params)
    _train(params, optimizer, [0])
    state = optimizer.state_dict()
    changed = _params()
    del changed["norm"]
    changed["extra"] = nn.Parameter(torch.zeros(3))
    changed["matrix"] = nn.Parameter(torch.zeros(8, 5))
    rules = [Rule("table", "adamw"), *(rule for rule in RULES[1:] if rule.pattern != "norm"), Rule("extra", "adamw")]
    other = Optimizer(assign(changed.items(), rules))
    with pytest.raises(ValueError) as error:
        other.load_state_dict(state)
    text = str(error.value)
    assert "table: method is adamw, in the checkpoint sinkhorn" in text
    assert "extra: method is adamw, in the checkpoint missing" in text
    assert "norm: in the checkpoint, but not in this run" in text
    assert "matrix: momentum is [8, 6] in the checkpoint, the parameter is [8, 5]" in text
    assert not other.state


def test_flattened_and_sparse_parameters_are_refused():
    params = _params()
    optimizer = _optimizer(params)
    optimizer.set_lr(0.1, {"vision": 1.0})
    flat = nn.Parameter(torch.zeros(48))
    flat.grad = torch.ones(48)
    group = next(group for group in optimizer.param_groups if "matrix" in group["names"])
    group["params"][group["names"].index("matrix")] = flat
    with pytest.raises(ValueError, match=r"matrix: the parameter has shape \[48\], but muon needs whole matrices"):
        optimizer.step()

    params = _params()
    optimizer = _optimizer(params)
    optimizer.set_lr(0.1, {"vision": 1.0})
    params["table"].grad = torch.zeros(10, 6).to_sparse()
    with pytest.raises(ValueError, match="table: sparse gradients are not supported"):
        optimizer.step()


def test_closure_and_profiler_hooks_of_torch_work():
    params = _params()
    optimizer = _optimizer(params)
    optimizer.set_lr(0.1, {"vision": 1.0})
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))

    def closure():
        optimizer.zero_grad()
        loss = sum(param.square().sum() for param in params.values())
        loss.backward()
        return loss

    first = optimizer.step(closure)
    for _ in range(10):
        last = optimizer.step(closure)
    assert last < first and len(seen) == 11
