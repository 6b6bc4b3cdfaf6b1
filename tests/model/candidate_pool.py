"""One training step on a row so long that the released candidate pool (2,048 blocks of 8 entries) restricts an indexer.

Used by tests and by tests/bench/bench_million.py. The model is that of tiny.py, cut down to what matters: a Full layer
whose indexer keeps the candidate blocks, and a Reindex layer whose indexer may only select from these blocks.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import model.attention
from model import DeepseekV41, ForwardOptions, LossDenominators, LossWeights
from model.indexer import TIE_BREAK
from model.parallel.ranks import Parallel
from tests.model.test_parallel import part_of, ranks_of
from tests.model.tiny import switch_rounding_off, tiny_model, tokens

POOL, BLOCK = 2048, 8  # text_config.candidate_topk_blocks and candidate_block_size of the released model
TOLERANCE = 5e-4  # of a tensor's largest value, as in test_context_parallel.py
# A token takes 12 KB, of which 8 are its candidates; with the sizes of tiny.py it would take 16.
SMALLER = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "head_dim": 8,
    "q_lora_rank": 8,
    "o_groups": 1,
    "moe_intermediate_size": 8,
}
PROBED = 64  # queries at the end of a chunk whose selection is compared with one from all entries


@dataclass(frozen=True)
class Row:
    """A row of `length` tokens and the model that reads it: compression ratio, index heads, selected entries; whether
    values are rounded as in training, and whether `train` returns selections and candidates.
    """

    length: int
    ratio: int
    heads: int = 1
    topk: int = 8
    rounding: bool = False
    keep: bool = True


@dataclass
class Seen:
    """What the indexers of one pass did: selections and candidates (if they are kept), the number of queries that saw
    more blocks than the pool holds, and of the probed queries of the Reindex layer how many selected other entries than
    they would have without candidates.
    """

    selected: list[Tensor]
    candidates: list[Tensor]
    restricted: int = 0
    probed: int = 0
    otherwise: int = 0


def model_of(row: Row) -> DeepseekV41:
    """The tiny model with the released candidate pool."""
    return tiny_model(
        ForwardOptions(recompute=True),
        loss_weights=LossWeights(router_balance=0.1, indexer_kl=0.5),
        num_hidden_layers=2,
        compress_ratios=[row.ratio] * 2,
        kv_source_layer_ids=[0],
        index_source_layer_ids=[0, 1],
        index_n_heads=row.heads,
        index_head_dim=8,
        index_topk=row.topk,
        candidate_source_layer_id=0,
        candidate_topk_blocks=POOL,
        candidate_block_size=BLOCK,
        hc_mult=2,
        **SMALLER,
    )


@contextmanager
def watched(row: Row) -> Iterator[Seen]:
    """Record what the indexers do while the context is entered. Raises AssertionError if a Reindex layer selects an
    entry outside its candidate blocks.
    """
    seen = Seen([], [])
    select, restricted = model.attention.select, model.attention.select_from_candidates

    def selecting(query, keys, entries, topk, block, pool):
        found, candidates = select(query, keys, entries, topk, block, pool)
        assert candidates is not None and candidates.shape == (len(found), POOL), "the pool does not restrict"
        blocks = -(-(entries.visible_to - entries.visible_from) // block)
        kept = torch.cat([(part >= 0).sum(-1) for part in candidates.split(4096)])  # a sum makes int64 of every value
        assert torch.equal(kept, blocks.clamp(max=POOL))
        seen.restricted += int((blocks > POOL).sum())
        if row.keep:
            seen.selected.append(found)
            seen.candidates.append(candidates)
        return found, candidates

    def reselecting(query, keys, entries, candidates, topk, block):
        found = restricted(query, keys, entries, candidates, topk, block)
        last = slice(-PROBED, None)
        chosen, allowed = found[last].long(), candidates[last]
        assert ((chosen // block)[:, :, None] == allowed[:, None, :]).any(-1).logical_or(chosen < 0).all()
        free = _best_of_all(query.q[last], query.weights[last], keys, entries.visible_to[last], topk)
        seen.probed += len(chosen)
        seen.otherwise += int((chosen.sort(-1).values != free.sort(-1).values).any(-1).sum())
        if row.keep:
            seen.selected.append(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.attention, "select", selecting)
        patch.setattr(model.attention, "select_from_candidates", reselecting)
        yield seen


@torch.no_grad()
def _best_of_all(q: Tensor, weights: Tensor, keys: Tensor, visible_to: Tensor, topk: int) -> Tensor:
    """The best entries int64 [C, topk] of some queries among all entries that they see, in a row of one document."""
    scores = torch.einsum("th,thn->tn", weights, torch.einsum("thd,nd->thn", q, keys).relu())
    slot = torch.arange(len(keys))
    scores = (scores + slot * TIE_BREAK).masked_fill(slot >= visible_to[:, None], float("-inf"))
    return scores.topk(topk, dim=-1).indices


def train(rank: int, row: Row, context: int) -> dict[str, Any]:
    """One forward and backward pass on this rank's chunk of the row: sums of the losses, gradients, what the indexers
    did, seconds, and the largest resident memory of the process before and after, in bytes.
    """
    if not row.rounding:
        switch_rounding_off(setattr)
    built = part_of(model_of(row), Parallel(context=ranks_of(context)))
    ids = tokens(1, row.length)
    batch = {"input_ids": ids, "labels": ids, "layout": built.lay_out(ids, ids)}
    counted = built.loss_denominators(**batch).to_tensor()
    dist.all_reduce(counted)
    before, started = _resident(), time.perf_counter()
    with watched(row) as seen:
        losses = built.losses(**batch, denominators=LossDenominators.from_tensor(counted))
        forward = time.perf_counter()
        losses.total.backward()
    ended = time.perf_counter()
    return {
        "sums": {name: value.detach() for name, value in losses._asdict().items()},
        "gradients": {name: parameter.grad for name, parameter in built.named_parameters()},
        "seen": seen,
        "seconds": (forward - started, ended - forward),
        "resident": (before, _resident()),
        "tokens": batch["layout"].tokens,
    }


def _resident() -> int:
    """The largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def compare(alone: dict[str, Any], ranks: list[dict[str, Any]]) -> list[str]:
    """Assert that the ranks together computed what one process did, and that the pool restricted both. Returns lines
    that say how far they differ.
    """
    expected: Seen = alone["seen"]
    assert sum(one["seen"].restricted for one in ranks) == expected.restricted > 0
    assert expected.otherwise > 0, "the pool changes no selection"
    lines = [f"{expected.restricted:,} queries see more blocks than the pool of {POOL:,} holds"]
    for kind in ("selected", "candidates"):
        for at, whole in enumerate(getattr(expected, kind)):
            parts = [getattr(one["seen"], kind)[at] for one in ranks]
            rows = sum(map(_different_sets, parts, whole.split([len(part) for part in parts])))
            lines.append(f"{kind} {at}: {rows} of {len(whole):,} queries differ")
            assert rows == 0, lines[-1]
    far = {}
    for key, whole in alone["sums"].items():
        ours = sum(one["sums"][key] for one in ranks)
        far[key] = _difference(ours, whole)
    for key, whole in alone["gradients"].items():
        far[key] = _difference(sum(one["gradients"][key] for one in ranks), whole)
    worst = max(far, key=far.__getitem__)
    lines.append(f"largest difference of losses and gradients: {far[worst]:.1e} of the largest value, in {worst}")
    assert far[worst] <= TOLERANCE, lines[-1]
    return lines


def _different_sets(ours: Tensor, wanted: Tensor) -> int:
    """The number of rows whose values are not the same set; sorted in slices, as sorting makes int64 indices."""
    slices = zip(ours.split(4096), wanted.split(4096), strict=True)
    return sum(int((a.sort(-1).values != b.sort(-1).values).any(-1).sum()) for a, b in slices)


def _difference(ours: Tensor, whole: Tensor) -> float:
    return float((ours - whole).abs().max() / whole.abs().max().clamp(min=1e-3))
