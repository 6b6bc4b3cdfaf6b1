"""The indexer's kernels against the plain functions: scores and loss within 1e-5, gradients within 1e-4."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compare import assert_equal, close, leaves
from tiny import pack_of, tiny_config

from model.indexer import IndexerLossInputs, IndexQuery, indexer_loss, select, select_from_candidates
from model.kernels.switch import using

pytest.importorskip("triton", reason="the package triton is not installed: pip install 'narrows[kernels]'")
from model.kernels import indexer as fast  # noqa: E402

BLOCK = 4
NONE = float("-inf")


def scores_of(q, weights, keys) -> torch.Tensor:
    """[T, N], every entry's."""
    return torch.einsum("th,thn->tn", weights, torch.einsum("thd,nd->thn", q, keys).relu())


@pytest.mark.parametrize(
    ("lengths", "heads", "dim"), [([1], 1, 3), ([37, 1, 2, 22], 16, 12), ([150], 3, 20), ([5] * 9, 32, 8)], ids=str
)
def test_block_peaks(lengths: list[int], heads: int, dim: int, device: str) -> None:
    layout = pack_of(tiny_config(), lengths)
    entries = layout.entries[1]
    low, tokens = (8 if len(lengths) > 1 else 0), layout.tokens
    q, weights, keys = (x.detach() for x in leaves((tokens, heads, dim), (tokens, heads), (entries.slots, dim)))
    blocks = (entries.slots - low) // BLOCK
    slot = torch.arange(entries.slots)
    seen = (slot >= entries.visible_from[:, None]) & (slot < entries.visible_to[:, None])
    expected = scores_of(q, weights, keys).masked_fill(~seen, NONE)[:, low:].unflatten(1, (-1, BLOCK)).amax(-1)
    moved = [x.to(device) for x in (q, weights, keys, entries.visible_from, entries.visible_to)]
    peaks = fast.block_peaks(*moved, low, blocks, BLOCK, False, 0.0)
    assert torch.equal(peaks.isinf().cpu(), expected.isinf())
    close(peaks.cpu().clamp(min=-1e9), expected.clamp(min=-1e9), 1e-5)


def test_candidate_scores(device: str) -> None:
    q, weights, keys = (x.detach() for x in leaves((5, 6, 12), (5, 6), (80, 12)))
    candidates = torch.randint(-1, 20, (5, 19), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    candidates[2] = -1
    visible_to = torch.tensor([80, 3, 80, 0, 41])
    slots = (candidates[:, :, None].clamp(min=0) * BLOCK + torch.arange(BLOCK)).flatten(1).long()
    seen = (candidates >= 0).repeat_interleave(BLOCK, 1) & (slots < visible_to[:, None])
    expected = scores_of(q, weights, keys).gather(1, slots).masked_fill(~seen, NONE)
    visible_from = torch.zeros_like(visible_to)
    moved = [x.to(device) for x in (q, weights, keys, candidates, visible_from, visible_to)]
    ours = fast.candidate_scores(*moved, BLOCK, 0.0).cpu()
    assert torch.equal(ours.isinf(), expected.isinf())
    close(ours.clamp(min=-1e9), expected.clamp(min=-1e9), 1e-5)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("topk", [2, 5, 40])
def test_selection(topk: int, own: bool, device: str) -> None:
    """The same entries in the same order, and the same candidates; many scores are exactly 0, where the newest wins."""
    if own:  # every query has 16 slots of its own, of which it sees some
        first = torch.arange(4) * 16
        last = first + torch.tensor([16, 0, 7, 9])
        entries = pack_of(tiny_config(), [16] * 4).entries[1]
        entries = replace(entries, own=16, visible_from=first, visible_to=last, host_from=first, host_to=last)
        tokens, slots = 4, 64
    else:
        layout = pack_of(tiny_config(), [37, 1, 2, 22])
        entries, tokens, slots = layout.entries[1], layout.tokens, layout.entries[1].slots
    q, weights, keys = (x.detach().to(device) for x in leaves((tokens, 2, 6), (tokens, 2), (slots, 6)))
    query = IndexQuery(q, weights)
    entries = replace(entries, visible_from=entries.visible_from.to(device), visible_to=entries.visible_to.to(device))
    theirs, pool = select(query, keys, entries, topk, BLOCK, 3)
    with using("triton"):
        ours, our_pool = select(query, keys, entries, topk, BLOCK, 3)
    assert torch.equal(ours, theirs)
    assert pool is None if our_pool is None else torch.equal(our_pool.sort(1).values, pool.sort(1).values)
    if pool is not None:
        theirs = select_from_candidates(query, keys, entries, pool, topk, BLOCK)
        with using("triton"):
            assert torch.equal(select_from_candidates(query, keys, entries, pool, topk, BLOCK), theirs)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "dim", "k"), [(1, 2, 6, 1), (9, 4, 12, 5), (6, 3, 20, 70)])
def test_loss(tokens: int, heads: int, dim: int, k: int, deterministic: bool, device: str, monkeypatch) -> None:
    monkeypatch.setattr(fast, "DETERMINISTIC_BYTES", 4 * dim * k * 2)  # chunks of two queries
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    g = torch.Generator().manual_seed(0)
    q, weights, keys = leaves((tokens, heads, dim), (tokens, heads), (80, dim), device=device)
    topk_indices = torch.stack([torch.randperm(80, generator=g)[:k] for _ in range(tokens)]).to(torch.int32)
    topk_indices[torch.rand(topk_indices.shape, generator=g) < 0.3] = -1
    mass = torch.rand(tokens, k, generator=g) * (torch.rand(tokens, k, generator=g) < 0.8)
    taught = torch.rand(tokens, generator=g) < 0.8
    taught[0] = True
    if tokens > 4:
        topk_indices[1] = -1  # sees nothing
        mass[2] = 0  # attends nothing that was selected
        taught[1:3] = True
    topk_indices, mass, taught = topk_indices.to(device), mass.to(device), taught.to(device)
    ours = fast.indexer_loss(q, weights, keys, topk_indices, mass, taught)
    theirs = indexer_loss(IndexerLossInputs(IndexQuery(q, weights), keys, topk_indices), mass, taught)
    assert_equal((ours,), (theirs,), [q, weights, keys])
    with torch.no_grad():
        close(fast.indexer_loss(q, weights, keys, topk_indices, mass, taught), theirs, 1e-5)


def test_operators_hold_what_pytorch_asks_of_them(device: str) -> None:
    q, weights, keys = leaves((3, 2, 6), (3, 2), (8, 6), device=device)
    index = torch.tensor([[0, 1], [2, -1], [-1, -1]], dtype=torch.int32, device=device)
    mass, taught = torch.ones(3, 2, device=device), torch.ones(3, dtype=torch.bool, device=device)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(fast._loss, (q, weights, keys, index, mass, taught, True, False), test_utils=checks)
