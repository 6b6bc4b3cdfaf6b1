"""Numbers beyond those of small batches: slots near 2^31, values at flat indices beyond 2^31, hashes near 2^63.

Large tensors are allocated but not filled: only the rows that a test reads or writes take memory.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import pack_of, tiny_config
from torch import Tensor

from model.config import ModelConfig
from model.engram import engram_tables, hash_ids
from model.indexer import IndexQuery, _best, _best_blocks, select, select_from_candidates
from model.kernels.switch import using
from model.layout import Entries
from model.rope import inverse_frequencies, rotations
from model.sparse import sparse_attention
from train.config.compose import composed

BLOCK = 8
END = 2**27 + 64  # slots of which the last are used: with rows of 16 values, flat indices beyond 2^31


@pytest.fixture(scope="module")
def keys() -> Tensor:
    """fp32 [END, 16] with random values in the last 64 rows only."""
    keys = torch.empty(END, 16)
    keys[-64:] = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    return keys


def last_slots(before: int = END - 64) -> Entries:
    """The entries of three queries that see 0, 20 and 64 of the 64 slots behind slot number `before`."""
    first = torch.full((3,), before)
    seen = first + torch.tensor([0, 20, 64])
    hosts = {"host_from": first.numpy(), "host_to": seen.numpy()}
    entries = pack_of(tiny_config(), [8]).entries[1]
    return replace(entries, slots=before + 64, visible_from=first, visible_to=seen, **hosts)


def back(slots: Tensor, by: int) -> Tensor:
    return torch.where(slots < 0, slots, slots + by)


def random_query(heads: int = 2) -> IndexQuery:
    g = torch.Generator().manual_seed(1)
    return IndexQuery(torch.randn(3, heads, 16, generator=g), torch.randn(3, heads, generator=g))


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_selection_beyond_flat_indices_of_31_bits(kernels: str, keys: Tensor) -> None:
    if kernels == "triton":
        pytest.importorskip("triton", reason="the package triton is not installed: pip install 'narrows[kernels]'")
    query = random_query()
    expected, pool = select(query, keys[-64:], last_slots(0), 5, BLOCK, 3)
    alone = select_from_candidates(query, keys[-64:], last_slots(0), pool, 5, BLOCK)
    with using(kernels):
        found, candidates = select(query, keys, last_slots(), 5, BLOCK, 3)
        inside = select_from_candidates(query, keys, last_slots(), candidates, 5, BLOCK)
        nothing = IndexQuery(torch.zeros_like(query.q), query.weights)  # every score is 0, so the newest entry wins
        newest = select_from_candidates(nothing, keys, last_slots(), candidates, 1, BLOCK)
    assert found.max() > 2**27 and torch.equal(found, back(expected, END - 64))
    assert torch.equal(candidates.sort(1).values, back(pool, (END - 64) // BLOCK).sort(1).values)
    assert torch.equal(inside, back(alone, END - 64))
    assert newest.flatten().tolist() == [-1, END - 64 + 19, END - 1]


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_attention_beyond_flat_indices_of_31_bits(kernels: str, keys: Tensor) -> None:
    if kernels == "triton":
        pytest.importorskip("triton", reason="the package triton is not installed: pip install 'narrows[kernels]'")
    g = torch.Generator().manual_seed(2)
    q, window = torch.randn(3, 2, 16, generator=g), torch.randn(3, 16, generator=g)
    chosen = torch.tensor([[60, 3, -1], [0, -1, -1], [63, 62, 1]], dtype=torch.int32)
    given = (torch.zeros(2), 0.25, 2)
    with using(kernels):
        out, mass = sparse_attention(q, window, torch.arange(3), keys, back(chosen, END - 64), *given)
        expected, expected_mass = sparse_attention(q, window, torch.arange(3), keys[-64:].clone(), chosen, *given)
    assert torch.equal(out, expected) and torch.equal(mass, expected_mass)


def test_slots_below_and_from_2_to_the_31() -> None:
    """The last slots that int32 can number are selected as any others; a batch with more of them is refused."""
    low = 2**31 - 32
    scores = torch.arange(32.0).repeat(2, 1)
    peaks = scores.unflatten(1, (-1, BLOCK)).amax(-1)
    assert _best(scores, peaks, 3, low, BLOCK).tolist() == [[2**31 - 1, 2**31 - 2, 2**31 - 3]] * 2
    first, seen = torch.full((2,), low), torch.tensor([2**31, low])
    assert _best_blocks(peaks, first, seen, low, BLOCK, 2)[0].tolist() == [2**28 - 1, 2**28 - 2]
    entries = last_slots()
    replace(entries, slots=2**31 - BLOCK)
    with pytest.raises(ValueError, match="2,147,483,648 entry slots with compression ratio 1, but slots are"):
        replace(entries, slots=2**31)


def test_hashes_of_the_largest_ids_against_whole_numbers() -> None:
    """The released tables, with the largest products of an id and a multiplier; Python's integers do not overflow."""
    config = ModelConfig.from_dict(composed("model=v41_flash")["model"]).text
    tables = engram_tables(config)
    largest = config.engram_compressed_vocab_size - 1
    known = torch.arange(largest + 1)
    tokens = torch.tensor([largest, largest, largest, largest - 1, 0, largest])
    start = torch.zeros(len(tokens), dtype=torch.int64)
    for layer in range(len(tables.multipliers)):
        multipliers, primes = tables.multipliers[layer], tables.primes[layer]
        assert max(multipliers) * largest < 2**63
        found = hash_ids(tables, layer, known, config.engram_pad_token_id, tokens, start, None)
        heads = len(primes) // (len(multipliers) - 1)
        for position in range(len(tokens)):
            rolling, expected = 0, []
            for order, multiplier in enumerate(multipliers):
                at = position - order
                rolling ^= (int(tokens[at]) if at >= 0 else config.engram_pad_token_id) * multiplier
                if order:
                    expected += [rolling % prime for prime in primes[(order - 1) * heads : order * heads]]
            offsets = [sum(primes[:number]) for number in range(len(primes))]
            assert found[position].tolist() == [row + offset for row, offset in zip(expected, offsets, strict=True)]
            assert max(found[position].tolist()) < tables.rows[layer]


def test_positions_of_a_million_tokens_are_exact() -> None:
    """Angles are products in fp32 as in the released code; the last position of a row of 1,048,576 tokens against
    NumPy's fp32, and against fp64 within half a unit of the angle's last place.
    """
    config = ModelConfig.from_dict(composed("model=v41_flash")["model"]).text
    frequency = inverse_frequencies(config, compressed=True)
    position = torch.tensor([2**20 - 1, 2**24 - 1])
    angle = position.numpy().astype(np.float32)[:, None] * frequency.numpy()[None]
    exact = position.numpy().astype(np.float64)[:, None] * frequency.numpy().astype(np.float64)[None]
    assert (np.abs(angle - exact) <= np.spacing(angle) / 2).all()
    found = rotations(position, frequency).double().numpy()
    wide = angle.astype(np.float64)
    np.testing.assert_allclose(found, np.stack([np.cos(wide), np.sin(wide)], -1), atol=1e-6)
