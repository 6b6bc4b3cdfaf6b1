"""The sparse-attention kernels against the dense reference: values within 1e-5, gradients within 1e-4."""

from __future__ import annotations

import pytest
import torch
from attention_inputs import behind, inputs, leaves
from compare import assert_equal, close

from model.sparse import dense_attention

pytest.importorskip("triton", reason="the package triton is not installed: pip install 'narrows[kernels]'")
from model.kernels import sparse as fast  # noqa: E402
from model.kernels.sums import add_in_order  # noqa: E402

SHAPES = [
    # tokens, heads, dim, window, entries, selected, documents
    (1, 2, 8, 4, 1, 1, 1),
    (5, 1, 4, 1, 3, 2, 1),  # window of the query alone
    (19, 4, 16, 16, 40, 8, 1),
    (33, 3, 24, 40, 50, 37, 3),  # several tiles of keys, no power of two
    (70, 2, 8, 68, 0, 0, 4),  # window only, two blocks of keys
    (17, 2, 8, 7, 20, 30, 9),  # more places than entries
    (9, 2, 8, 64, 10, 4, 9),  # documents of one token
]


def moved(arguments: dict, device: str) -> dict:
    """The same inputs on the device, as leaves."""
    return {
        k: v.detach().to(device).requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v
        for k, v in arguments.items()
    }


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_dense(shape, deterministic: bool, device: str, monkeypatch) -> None:
    arguments = moved(inputs(*shape), device)
    monkeypatch.setattr(fast, "DETERMINISTIC_BYTES", 20_000)  # several chunks
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    ours, theirs = fast.sparse_attention(**arguments, window=shape[3]), dense_attention(**arguments)
    if theirs[1] is None:
        assert ours[1] is None
    else:
        assert not ours[1].requires_grad
        close(ours[1], theirs[1], 1e-5)
    assert_equal(ours[:1], theirs[:1], leaves(arguments))


@pytest.mark.parametrize("shape, cut", [(SHAPES[2], 7), (SHAPES[3], 11), (SHAPES[4], 69)], ids=str)
def test_queries_behind_a_cut(shape, cut: int, device: str) -> None:
    arguments = moved(behind(inputs(*shape), cut, window=shape[3]), device)
    ours, theirs = fast.sparse_attention(**arguments, window=shape[3]), dense_attention(**arguments)
    assert_equal(ours[:1], theirs[:1], leaves(arguments))


def test_nothing_selected(device: str) -> None:
    """Entries exist, no query has any."""
    arguments = moved(inputs(12, 2, 8, 5, 6, 3), device)
    arguments["topk_indices"].fill_(-1)
    ours, theirs = fast.sparse_attention(**arguments, window=5), dense_attention(**arguments)
    assert not ours[1].any()
    assert_equal(ours[:1], theirs[:1], leaves(arguments))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # of numpy, in what is masked afterwards
def test_large_scores_do_not_overflow(device: str) -> None:
    arguments = moved(inputs(10, 2, 8, 5, 12, 4), device)
    arguments["q"] = (arguments["q"].detach() * 200).requires_grad_()
    out, _ = fast.sparse_attention(**arguments, window=5)
    torch.testing.assert_close(out, dense_attention(**arguments)[0], atol=1e-4, rtol=1e-4)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves(arguments)))


def test_sums_in_order_are_the_same_every_time(device: str) -> None:
    """Bit for bit those of a loop over the rows."""
    g = torch.Generator().manual_seed(0)
    rows, index = torch.randn(50, 8, generator=g), torch.randint(-1, 6, (50,), generator=g, dtype=torch.int32)
    expected = torch.zeros(7, 8)
    for at, row in zip(index.tolist(), rows, strict=True):
        if at >= 0:
            expected[at] += row
    target = torch.zeros(7, 8, device=device)
    add_in_order(target, rows.to(device), index.to(device))
    assert torch.equal(target.cpu(), expected)


def test_operators_hold_what_pytorch_asks_of_them(device: str) -> None:
    a = moved(inputs(4, 2, 8, 3, 5, 2), device)
    arguments = (a["q"], a["window_kv"], a["window_start"], a["entries"], a["topk_indices"], a["sink"], 0.3, 3)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(fast._attention, arguments, test_utils=checks)


def test_supports_the_released_heads_in_16_bits_only() -> None:
    heads = torch.empty(3, 64, 512, device="meta")
    assert fast.supports(heads.bfloat16()) and not fast.supports(heads) and fast.supports(heads[:, :32])
