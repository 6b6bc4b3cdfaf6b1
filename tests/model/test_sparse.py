"""The linear-cost attention equals the plain reference in value and gradient; the reference equals a plain loop."""

from __future__ import annotations

import pytest
import torch
from attention_inputs import behind, inputs, leaves
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from model.sparse import CHUNK_ELEMENTS, dense_attention, sparse_attention


def assert_equal_to_dense(arguments: dict, window: int) -> None:
    out, mass = sparse_attention(**arguments, window=window)
    reference, reference_mass = dense_attention(**arguments)
    torch.testing.assert_close(out, reference, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    ours = torch.autograd.grad(out, leaves(arguments), upstream)
    theirs = torch.autograd.grad(reference, leaves(arguments), upstream)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-5 * max(1, b.abs().max())
    if arguments["topk_indices"] is None:
        assert mass is None and reference_mass is None
    else:
        torch.testing.assert_close(mass, reference_mass, atol=1e-5, rtol=1e-5)
        assert not mass.requires_grad and not reference_mass.requires_grad


SHAPES = [
    # tokens, heads, dim, window, entries, selected, documents
    (1, 2, 8, 4, 1, 1, 1),
    (5, 1, 4, 1, 3, 2, 1),  # window of the query alone
    (64, 2, 8, 16, 40, 8, 1),
    (67, 3, 8, 16, 40, 8, 3),  # no whole number of blocks
    (130, 2, 8, 128, 0, 0, 4),  # window only
    (129, 2, 8, 7, 20, 30, 9),  # more places than entries, documents shorter than blocks and window
    (200, 4, 16, 100, 70, 12, 5),
    (33, 2, 8, 64, 10, 4, 33),  # documents of one token
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_dense(shape) -> None:
    assert_equal_to_dense(inputs(*shape), window=shape[3])


@pytest.mark.parametrize("shape, cut", [(SHAPES[3], 30), (SHAPES[6], 101), (SHAPES[5], 64), (SHAPES[7], 20)], ids=str)
def test_queries_behind_a_cut_see_the_keys_before_it(shape, cut: int) -> None:
    """As they do in the whole sequence, in both ways to compute it."""
    whole = inputs(*shape)
    part = behind(whole, cut, window=shape[3])
    assert len(part["window_kv"]) > len(part["q"])
    assert_equal_to_dense(part, window=shape[3])
    torch.testing.assert_close(dense_attention(**part)[0], dense_attention(**whole)[0][cut:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("budget", [1, 3_000, 20_000, 10**7])
def test_any_chunk_size(budget: int, monkeypatch) -> None:
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", budget)
    assert_equal_to_dense(inputs(150, 2, 8, 20, 50, 6, documents=3, seed=1), window=20)


def test_random_shapes() -> None:
    g = torch.Generator().manual_seed(0)
    for trial in range(25):
        pick = lambda low, high: int(torch.randint(low, high, (), generator=g))  # noqa: E731
        tokens = pick(2, 150)
        window = pick(1, 40)
        shape = tokens, pick(1, 4), 4 * pick(1, 5), window, pick(0, 60), pick(1, 10), pick(1, min(tokens, 8))
        assert_equal_to_dense(inputs(*shape, seed=trial), window)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_against_a_plain_loop(kind: str) -> None:
    """softmax over window and selection, the sink in the denominator only; mass is the probability of the selected."""
    arguments = inputs(20, 2, 8, 5, 9, 4, documents=2)
    window = {"window": 5} if kind == "sparse" else {}
    out, mass = (dense_attention if kind == "dense" else sparse_attention)(**arguments, **window)
    a = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in arguments.items()}
    for t in range(20):
        picked = [int(i) for i in a["topk_indices"][t] if i >= 0]
        keys = torch.cat([a["window_kv"][int(a["window_start"][t]) : t + 1], a["entries"][picked]])
        total = torch.zeros(len(picked), dtype=torch.float64)
        for head in range(2):
            e = (keys @ a["q"][t, head] * a["scale"]).exp()
            p = e / (e.sum() + a["sink"][head].exp())
            torch.testing.assert_close(out[t, head].double(), p @ keys, atol=1e-6, rtol=1e-6)
            total += p[len(keys) - len(picked) :]
        listed = mass[t][a["topk_indices"][t] >= 0].double()
        torch.testing.assert_close(listed, total, atol=1e-6, rtol=1e-6)
        assert mass[t][a["topk_indices"][t] < 0].abs().sum() == 0


def test_large_scores_do_not_overflow() -> None:
    arguments = inputs(40, 2, 8, 10, 12, 4)
    arguments["q"] = (arguments["q"].detach() * 200).requires_grad_()
    out, _ = sparse_attention(**arguments, window=10)
    torch.testing.assert_close(out, dense_attention(**arguments)[0], atol=1e-4, rtol=1e-4)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves(arguments)))


def test_bf16_stays_close() -> None:
    """fp32 softmax inside: bf16 inputs lose no more than the bf16 reference does."""
    arguments = inputs(80, 2, 16, 20, 30, 6)
    exact, _ = dense_attention(**arguments)
    narrow = {k: v.detach().bfloat16() if k in ("q", "window_kv", "entries") else v for k, v in arguments.items()}
    out, _ = sparse_attention(**narrow, window=20)
    assert out.dtype == torch.bfloat16
    assert (out.float() - exact).abs().max() < 0.05


def test_products_of_bf16_are_summed_in_fp32() -> None:
    """Against fp64 from the same bf16 inputs: what rounding the probabilities and the result to bf16 costs, 0.17 %
    each, and no more. Sums of window and selected entries in bf16 would double it.
    """
    arguments = inputs(160, 4, 64, 24, 96, 24)
    narrow, wide = dict(arguments), dict(arguments)
    for name in ("q", "window_kv", "entries"):
        narrow[name] = arguments[name].detach().bfloat16().requires_grad_()
        wide[name] = narrow[name].detach().double().requires_grad_()
    wide["sink"] = arguments["sink"].detach().double().requires_grad_()
    (ours, mass), (theirs, exact_mass) = sparse_attention(**narrow, window=24), dense_attention(**wide)
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    gradients = torch.autograd.grad(ours, leaves(narrow), upstream)
    exact = torch.autograd.grad(theirs, leaves(wide), upstream.double())

    def error(a: Tensor, b: Tensor) -> float:
        return ((a.double() - b).norm() / b.norm()).item()

    assert error(mass, exact_mass) <= 1e-5
    assert 1e-3 < error(ours, theirs) <= 0.0026
    assert max(map(error, gradients, exact)) <= 0.003


def test_work_grows_linearly() -> None:
    """Forward and backward multiply-adds at twice the length: at most 2.1 times (the reference: 4)."""

    def flops(tokens: int, sparse: bool) -> int:
        arguments = inputs(tokens, 2, 8, 32, tokens // 2, 8)
        with FlopCounterMode(display=False) as counter:
            attend = (
                (lambda: sparse_attention(**arguments, window=32)) if sparse else lambda: dense_attention(**arguments)
            )
            attend()[0].sum().backward()
        return counter.get_total_flops()

    assert flops(1024, sparse=True) <= 2.1 * flops(512, sparse=True)
    assert flops(1024, sparse=True) < flops(1024, sparse=False) / 5
    assert flops(1024, sparse=False) > 3.5 * flops(512, sparse=False)
