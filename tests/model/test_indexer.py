"""Selection and candidate pool against loops written from the report's rules; the indexer's loss against autograd."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from golden_files import traced
from tiny import assert_same, gradients, no_rounding, pack_of, tiny_config, tiny_model, tokens  # noqa: F401
from torch import Tensor

import model.attention
from model import ForwardOptions, LossWeights, indexer_recall
from model.indexer import IndexerLossInputs, IndexQuery, indexer_loss, select, select_from_candidates
from model.layout import build_layout
from model.sparse import CHUNK_ELEMENTS

HEADS, DIM, BLOCK = 8, 6, 4
LENGTHS = [37, 1, 2, 22]
RATIOS = [1, 2]
BUDGETS = [1, 2**21]


@pytest.fixture(params=[(r, b) for r in RATIOS for b in BUDGETS], ids=str)
def case(request, monkeypatch):
    """(layout, entries, query, keys) of a ratio, with scoring in tiny chunks or in one."""
    ratio, budget = request.param
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", budget)
    layout = pack_of(tiny_config(), LENGTHS)
    entries = layout.entries[ratio]
    g = torch.Generator().manual_seed(ratio)
    query = IndexQuery(
        torch.randn(layout.tokens, HEADS, DIM, generator=g), torch.randn(layout.tokens, HEADS, generator=g)
    )
    return layout, entries, query, torch.randn(entries.slots, DIM, generator=g)


def score(query: IndexQuery, keys: Tensor, t: int, slot: int) -> float:
    return float(sum(query.weights[t, h] * max(query.q[t, h] @ keys[slot], 0) for h in range(HEADS)))


def visible(layout, entries, t: int) -> list[int]:
    """Slots of the entries j < (position + 1) // r of the token's document."""
    first = int(entries.visible_from[t])
    return list(range(first, first + (int(layout.position[t]) + 1) // entries.ratio))


def best(scores: dict[int, float], count: int) -> set[int]:
    return set(sorted(scores, key=scores.get, reverse=True)[:count])


def chosen(indices: Tensor) -> list[set[int]]:
    rows = [[i for i in row if i >= 0] for row in indices.tolist()]
    assert all(len(set(row)) == len(row) for row in rows), "an entry twice"
    return [set(row) for row in rows]


def pool_of(scores: dict[int, float], slots: list[int], pool: int) -> set[int]:
    """The newest entry's block, and the best others by their best entry."""
    if not slots:
        return set()
    blocks: dict[int, float] = {}
    for slot in slots:
        blocks[slot // BLOCK] = max(scores[slot], blocks.get(slot // BLOCK, float("-inf")))
    newest = slots[-1] // BLOCK
    del blocks[newest]
    return {newest} | best(blocks, pool - 1)


def test_select(case) -> None:
    layout, entries, query, keys = case
    indices, candidates = select(query, keys, entries, 5, BLOCK, None)
    assert candidates is None and indices.dtype == torch.int32 and indices.shape == (layout.tokens, 5)
    for t, ours in enumerate(chosen(indices)):
        scores = {slot: score(query, keys, t, slot) for slot in visible(layout, entries, t)}
        assert ours == best(scores, 5), f"token {t}"


def test_candidates_and_selection_inside_them(case) -> None:
    """The pool bites, the newest block is kept though its entries score worst, the source itself chooses freely."""
    layout, entries, query, keys = case
    pool = 3
    indices, candidates = select(query, keys, entries, 5, BLOCK, pool)
    other = IndexQuery(query.q.flip(0), query.weights.flip(0))
    inside = select_from_candidates(other, keys, entries, candidates, 5, BLOCK)
    free, _ = select(other, keys, entries, 5, BLOCK, None)
    restricted = forced = 0
    for t in range(layout.tokens):
        slots = visible(layout, entries, t)
        scores = {slot: score(query, keys, t, slot) for slot in slots}
        assert chosen(indices)[t] == best(scores, 5)
        kept = chosen(candidates)[t]
        assert kept == pool_of(scores, slots, pool), f"token {t}"
        allowed = {slot: score(other, keys, t, slot) for slot in slots if slot // BLOCK in kept}
        assert chosen(inside)[t] == best(allowed, 5), f"token {t}"
        restricted += chosen(inside)[t] != chosen(free)[t]
        by_best = sorted(kept, key=lambda b: max(scores.get(s, -9e9) for s in range(b * BLOCK, (b + 1) * BLOCK)))
        forced += len(kept) == pool and by_best[0] == slots[-1] // BLOCK
    if entries.ratio == 1:
        assert restricted and forced


def test_pool_smaller_than_topk_leaves_the_rest_empty(case) -> None:
    layout, entries, query, keys = case
    _, candidates = select(query, keys, entries, 9, BLOCK, 1)
    inside = select_from_candidates(query, keys, entries, candidates, 9, BLOCK)
    for t, ours in enumerate(chosen(inside)):
        slots = visible(layout, entries, t)
        assert ours == ({s for s in slots if s // BLOCK == slots[-1] // BLOCK} if slots else set())


def test_pool_of_the_layers_below_binds_reindex_layers_only(monkeypatch) -> None:
    """In the model: the source (3) chooses freely, the Reindex layer (5) inside; switched off, nobody is bound."""
    built = tiny_model()
    ids = tokens(1, 40)
    layout = build_layout(built.config.text, ids)
    _, trace = traced(built, {"input_ids": ids})
    shared = [block.shared for block in trace.blocks]
    assert shared[1].candidates is None and shared[3].candidates is shared[5].candidates
    kept = chosen(shared[3].candidates)
    block = built.config.text.candidate_block_size
    for layer, bound in ((3, False), (5, True)):
        inside = [all(i // block in kept[t] for i in row) for t, row in enumerate(chosen(shared[layer].topk_indices))]
        assert all(inside) == bound, f"layer {layer}"
    assert shared[4].topk_indices is shared[3].topk_indices and shared[2].compressed_kv is shared[1].compressed_kv
    built.runtime = dataclasses.replace(built.runtime, candidate_pool=False)
    _, free = traced(built, {"input_ids": ids})
    assert all(b.shared.candidates is None for b in free.blocks)
    assert chosen(free.blocks[3].shared.topk_indices) == chosen(shared[3].topk_indices)
    assert chosen(free.blocks[5].shared.topk_indices) != chosen(shared[5].topk_indices)
    assert layout.tokens == 40


def test_indexer_scores_follow_the_report() -> None:
    """q from the latent, weights from x with both scales, keys from the un-rotated latent; all inputs detached."""
    built = tiny_model()
    text, indexer = built.config.text, built.layers[1].attn.indexer
    layout = pack_of(built.config, [8])
    g = torch.Generator().manual_seed(0)
    x = torch.randn(8, 32, generator=g).requires_grad_()
    q_lat = torch.randn(8, 16, generator=g).requires_grad_()
    latent = torch.randn(layout.entries[2].slots, 16, generator=g).requires_grad_()
    query, keys = indexer.query(x, q_lat, layout), indexer.keys(latent, layout.entries[2])
    heads, dim = text.index_n_heads, text.index_head_dim
    torch.testing.assert_close(query.weights, x @ indexer.weights_proj.weight.t() * dim**-0.5 * heads**-0.5)
    (query.q.sum() + query.weights.sum() + keys.sum()).backward()
    assert x.grad is None and q_lat.grad is None and latent.grad is None
    assert all(p.grad is not None for p in indexer.parameters())


def plain_loss(query: IndexQuery, keys: Tensor, indices: Tensor, mass: Tensor, supervised: Tensor) -> Tensor:
    """Sum over supervised queries of KL(mass, normalised || softmax of the scores) over the selected entries."""
    total = torch.zeros(())
    for t in range(len(indices)):
        here = indices[t] >= 0
        if not supervised[t] or not here.any():
            continue
        picked = keys[indices[t][here].long()]
        scores = (query.weights[t][:, None] * torch.relu(query.q[t] @ picked.t())).sum(0)
        target = mass[t][here] / mass[t][here].sum()
        total = total + (target * (target.log() - scores.log_softmax(-1))).sum()
    return total


@pytest.mark.parametrize("budget", BUDGETS)
def test_loss_against_autograd(budget: int, monkeypatch) -> None:
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", budget)
    g = torch.Generator().manual_seed(0)
    q, weights = torch.randn(30, HEADS, DIM, generator=g), torch.randn(30, HEADS, generator=g)
    keys = torch.randn(20, DIM, generator=g)
    for tensor in (q, weights, keys):
        tensor.requires_grad_()
    indices = torch.stack([torch.randperm(20, generator=g)[:6] for _ in range(30)]).to(torch.int32)
    indices[torch.rand(30, 6, generator=g) < 0.3] = -1
    indices[3] = -1  # sees nothing
    indices[4, 1:] = -1
    indices[4, 0] = 7  # a single entry has nothing to learn
    mass = torch.rand(30, 6, generator=g)
    supervised = torch.rand(30, generator=g) < 0.8
    supervised[3:5] = True
    query = IndexQuery(q, weights)
    ours = indexer_loss(IndexerLossInputs(query, keys, indices), mass, supervised)
    theirs = plain_loss(query, keys, indices, mass, supervised)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    leaves = (q, weights, keys)
    for a, b in zip(torch.autograd.grad(3 * ours, leaves), torch.autograd.grad(3 * theirs, leaves), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_target_is_the_attention_of_all_layers_that_use_the_selection(attention: str, monkeypatch) -> None:
    """losses(): each source's KL from the real softmax probabilities of itself and its Reuse followers."""
    built = tiny_model(ForwardOptions(attention=attention))
    recorded = record_attention(monkeypatch)
    ids = tokens(2, 21)
    batch = {"input_ids": ids, "labels": ids.clone(), "seq_lens": torch.tensor([[9, 12], [1, 18]])}
    batch["labels"][0, 3:6] = -100
    losses = built.losses(**batch, denominators=built.loss_denominators(**batch))
    calls = recorded[:]
    _, trace = traced(built, {k: v for k, v in batch.items() if k != "labels"})
    layout = build_layout(built.config.text, ids, seq_lens=batch["seq_lens"])
    labels = layout.flatten(batch["labels"])
    last = torch.cat([layout.document.diff() != 0, torch.tensor([True])])
    supervised = ~last & (labels.roll(-1) != -100)
    for number, (source, users) in enumerate({1: [1, 2], 3: [3, 4], 5: [5]}.items()):
        indexer_loss_inputs = trace.blocks[source].indexer_loss_inputs
        mass = sum(selected_probability(*calls[layer]) for layer in users) / len(users)
        expected = plain_loss(
            indexer_loss_inputs.query, indexer_loss_inputs.keys, indexer_loss_inputs.topk_indices, mass, supervised
        )
        torch.testing.assert_close(losses.index_kl_sum[number], expected, atol=1e-4, rtol=1e-4)
        counted = (supervised & (indexer_loss_inputs.topk_indices >= 0).any(-1)).sum()
        assert losses.index_queries[number] == counted == built.loss_denominators(**batch).index_queries[number]
    per_query = (losses.index_kl_sum / losses.index_queries).sum()
    plain = losses.lm_sum / losses.supervised + 1e-4 * losses.balance_sum / layout.tokens + per_query
    torch.testing.assert_close(losses.total, plain, atol=1e-5, rtol=1e-5)


def record_attention(monkeypatch) -> list[tuple]:
    """Keep (q, window_kv, window_start, entries, topk_indices, sink, scale) of every attention call."""
    calls: list[tuple] = []
    for name in ("dense_attention", "sparse_attention"):
        inner = getattr(model.attention, name)

        def keep(*arguments, inner=inner):
            calls.append(arguments[:7])
            return inner(*arguments)

        monkeypatch.setattr(model.attention, name, keep)
    return calls


def selected_probability(q, window_kv, window_start, entries, indices, sink, scale) -> Tensor:
    """[T, K]: softmax probability of each selected entry, sink and window in the denominator, summed over heads."""
    mass = torch.zeros(indices.shape)
    for t in range(len(q)):
        here = (indices[t] >= 0).nonzero().flatten()
        keys = torch.cat([window_kv[int(window_start[t]) : t + 1], entries[indices[t][here].long()]])
        logits = torch.cat([q[t] @ keys.t() * scale, sink[:, None]], dim=1)
        p = logits.softmax(-1).sum(0)
        mass[t, here] = p[len(keys) - len(here) : len(keys)]
    return mass.detach()


def step_gradients(built, batch, train_indexer: bool = True, **weights: float) -> dict[str, Tensor]:
    built.runtime = dataclasses.replace(built.runtime, train_indexer=train_indexer)
    built.loss_weights = dataclasses.replace(built.loss_weights, **weights)
    built.zero_grad()
    built.losses(**batch, denominators=built.loss_denominators(**batch)).total.backward()
    return gradients(built)


@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_the_loss_trains_the_indexer_only(attention: str) -> None:
    """Coefficient 0: zero, not missing, gradients. Other parameters do not notice the indexer's loss at all."""
    built = tiny_model(ForwardOptions(attention=attention))
    ids = tokens(2, 24)
    batch = {"input_ids": ids, "labels": ids}
    on, off = step_gradients(built, batch), step_gradients(built, batch, indexer_kl=0.0)
    for name in on:
        if ".indexer." in name:
            assert on[name].abs().max() > 0 and off[name].abs().max() == 0, name
        else:
            assert torch.equal(on[name], off[name]), name
    half = step_gradients(built, batch, indexer_kl=0.5)
    name = "layers.5.attn.indexer.wq_b.weight"
    torch.testing.assert_close(half[name], on[name] / 2)
    unused = step_gradients(built, batch, indexer_kl=1.0, train_indexer=False)
    assert unused[name].abs().max() == 0


def test_key_gradient_of_a_reindex_layer_reaches_the_full_owner() -> None:
    built = tiny_model()
    ids = tokens(1, 24)
    _, trace = traced(built, {"input_ids": ids})
    indexer_loss(
        trace.blocks[5].indexer_loss_inputs, trace.attention_mass[5], torch.ones(24, dtype=torch.bool)
    ).backward()
    reached = {name for name, p in built.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert reached == {
        "layers.3.attn.indexer.wk.weight",
        "layers.3.attn.indexer.k_norm.weight",
        "layers.5.attn.indexer.wq_b.weight",
        "layers.5.attn.indexer.weights_proj.weight",
    }


@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_an_empty_selection_gives_zero_gradients(attention: str) -> None:
    """Documents of one token have no ratio-2 entry; without any target there is nothing to learn at all."""
    built = tiny_model(ForwardOptions(attention=attention))
    ids = tokens(1, 3)
    batch = {"input_ids": ids, "labels": ids, "seq_lens": torch.tensor([[1, 1, 1]])}
    found = step_gradients(built, batch)
    assert all(g.abs().max() == 0 for name, g in found.items() if ".indexer." in name)
    assert all(g.isfinite().all() for g in found.values())
    batch = {"input_ids": tokens(1, 20), "labels": torch.full((1, 20), -100)}
    found = step_gradients(built, batch, router_balance=0.0)
    assert all(g.abs().max() == 0 for g in found.values())


def test_learning_the_lesson_lowers_the_loss() -> None:
    """Gradient descent on one batch's indexer loss brings the student close to its target."""
    built = tiny_model(loss_weights=LossWeights(router_balance=0.0))
    ids = tokens(1, 32)
    batch = {"input_ids": ids, "labels": ids}
    denominators = built.loss_denominators(**batch)
    learner = torch.optim.Adam([p for n, p in built.named_parameters() if ".indexer." in n], lr=3e-3)
    values = []
    for _ in range(15):
        built.zero_grad()
        losses = built.losses(**batch, denominators=denominators)
        losses.total.backward()
        learner.step()
        values.append(losses.index_kl_sum.sum().item())
    assert values[-1] < 0.8 * values[0]


def test_autocast_does_not_round_the_scores() -> None:
    """bf16 queries and keys are scored, compared and supervised in fp32, also inside an autocast region."""
    g = torch.Generator().manual_seed(0)
    layout = pack_of(tiny_config(), [60])
    q, keys = (torch.randn(60, *s, generator=g).bfloat16().requires_grad_() for s in ((HEADS, DIM), (DIM,)))
    weights = torch.randn(60, HEADS, generator=g).requires_grad_()
    query, supervised, results = IndexQuery(q, weights), torch.ones(60, dtype=torch.bool), []
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            indices, candidates = select(query, keys, layout.entries[1], 6, BLOCK, 4)
            inside = select_from_candidates(query, keys, layout.entries[1], candidates, 6, BLOCK)
            mass = torch.rand(60, 6, generator=torch.Generator().manual_seed(1))
            loss = indexer_loss(IndexerLossInputs(query, keys, indices), mass, supervised)
        results.append((indices, candidates, inside, loss, *torch.autograd.grad(loss, (q, weights, keys))))
    for plain, inside_autocast in zip(*results, strict=True):
        assert torch.equal(plain, inside_autocast)


@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_recall_against_plain_dense_attention(attention: str, monkeypatch) -> None:
    """Mass on the selected entries over mass on the true top-k, from attention over window and all visible entries."""
    built = tiny_model(ForwardOptions(attention=attention))
    runtime, recorded = built.runtime, record_attention(monkeypatch)
    ids = tokens(2, 21)
    batch = {"input_ids": ids, "labels": ids, "seq_lens": torch.tensor([[9, 12], [1, 18]])}
    ours = indexer_recall(built, batch)
    assert built.runtime == runtime and not ours.requires_grad
    layout = build_layout(built.config.text, ids, seq_lens=batch["seq_lens"])
    for number, (source, users) in enumerate({1: [1, 2], 3: [3, 4], 5: [5]}.items()):
        entries = layout.entries[built.config.text.ratio(source)]
        values = []
        for t in range(layout.tokens):
            slots = visible(layout, entries, t)
            if len(slots) <= 5:
                continue
            mass = {slot: 0.0 for slot in slots}
            for layer in users:
                q, window_kv, window_start, kv, indices, sink, scale = recorded[layer]
                keys = torch.cat([window_kv[int(window_start[t]) : t + 1], kv[slots]])
                p = torch.cat([q[t] @ keys.t() * scale, sink[:, None]], dim=1).softmax(-1).sum(0)
                for slot, value in zip(slots, p[-1 - len(slots) : -1].tolist(), strict=True):
                    mass[slot] += value
            picked = [i for i in recorded[source][4][t].tolist() if i >= 0]
            values.append(sum(mass[i] for i in picked) / sum(sorted(mass.values())[-5:]))
        assert ours[number].item() == pytest.approx(sum(values) / len(values), abs=1e-5)
        assert 0.1 < ours[number] < 0.999


def test_recall_is_undefined_where_everything_is_selected() -> None:
    ids = tokens(1, 5)
    assert indexer_recall(tiny_model(), {"input_ids": ids, "labels": ids}).isnan().all()


def test_a_new_full_layer_is_not_bound_by_older_candidates() -> None:
    """Candidates are blocks of one Full layer's entries (our choice: they end where another one begins)."""
    built = tiny_model(kv_source_layer_ids=[1, 3, 5])
    ids = tokens(1, 40)
    _, trace = traced(built, {"input_ids": ids})
    assert trace.blocks[4].shared.candidates is not None and trace.blocks[5].shared.candidates is None
    built.runtime = dataclasses.replace(built.runtime, candidate_pool=False)
    _, free = traced(built, {"input_ids": ids})
    assert torch.equal(trace.blocks[5].shared.topk_indices, free.blocks[5].shared.topk_indices)
