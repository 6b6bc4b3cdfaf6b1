import heapq

import numpy as np
import pytest

from data.packing import MIN_PIECE, PackedRows, pack_rows, repack_rows


def covered(rows, lengths):
    """Every token of every document, exactly once."""
    seen = [np.zeros(n, int) for n in lengths]
    for document, start, length in zip(rows.document, rows.start, rows.length, strict=True):
        assert length > 0
        seen[document][start : start + length] += 1
    return all((s == 1).all() for s in seen)


def row_sizes(rows):
    return np.add.reduceat(rows.length, rows.offsets[:-1]) if len(rows) else np.zeros(0, int)


DISTRIBUTIONS = {
    "short": lambda r: r.integers(1, 40, 2000),
    "mixed": lambda r: np.minimum(r.lognormal(4, 1.5, 1500).astype(np.int64) + 1, 5000),
    "long": lambda r: r.integers(200, 3000, 300),
    "whole rows": lambda r: r.integers(1, 6, 200) * 128,
    "one": lambda r: np.array([1]),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_every_token_is_packed_once_and_rows_hold_at_most_seq_len(name):
    lengths = DISTRIBUTIONS[name](np.random.default_rng(0))
    rows = pack_rows(lengths, 128)
    assert covered(rows, lengths)
    assert row_sizes(rows).max() <= 128
    short = np.flatnonzero(lengths <= 128)
    assert (np.bincount(rows.document, minlength=len(lengths))[short] == 1).all()  # what fits is never cut


def test_best_fit_decreasing_takes_the_fullest_row_that_fits():
    # Longest first: 60, 50 open two rows of 100; 40 goes to the 60 (room 40 rather than 50), 35 to the 50, 15 after it.
    rows = pack_rows(np.array([15, 40, 60, 35, 50]), 100)
    groups = [set(rows.document[a:b].tolist()) for a, b in zip(rows.offsets, rows.offsets[1:], strict=False)]
    assert sorted(map(sorted, groups)) == [[0, 3, 4], [1, 2]]


def test_gaps_are_filled_from_documents_that_are_cut_anyway():
    fits = np.full(10, 60)  # ten rows with a gap of 40 each
    rows = pack_rows(np.concatenate([fits, [1000]]), 100)
    assert covered(rows, [*fits, 1000])
    assert len(rows) == 16  # 1,600 tokens: no padding at all; without filling there are 20 rows
    alone = pack_rows(fits, 100)
    assert len(alone) == 10 and (row_sizes(alone) == 60).all()  # nobody to fill them: documents that fit stay whole


def test_a_document_of_exactly_one_row_is_not_cut():
    rows = pack_rows(np.array([100] * 5 + [60] * 5), 100)
    assert (np.bincount(rows.document) == 1).all()


def test_no_crumbs_are_cut():
    lengths = np.concatenate([np.full(200, 100 - MIN_PIECE + 1), [1000]])
    rows = pack_rows(lengths, 100)
    assert set(rows.length[rows.document == 200].tolist()) == {100}


def test_padding_is_near_the_least_possible_on_long_tailed_lengths():
    lengths = DISTRIBUTIONS["mixed"](np.random.default_rng(1))
    rows = pack_rows(lengths, 512)
    assert len(rows) <= -(-lengths.sum() // 512) + 1


def test_packing_is_deterministic_and_row_selection_keeps_rows_whole():
    lengths = DISTRIBUTIONS["mixed"](np.random.default_rng(2))
    one, two = pack_rows(lengths, 256), pack_rows(lengths, 256)
    assert all(np.array_equal(getattr(one, f), getattr(two, f)) for f in ("document", "start", "length", "offsets"))
    order = np.random.default_rng(3).permutation(len(one))[:40]
    chosen = one.reordered(order)
    for new, old in enumerate(order):
        a, b = slice(*chosen.offsets[new : new + 2]), slice(*one.offsets[old : old + 2])
        for name in ("document", "start", "length"):
            assert np.array_equal(getattr(chosen, name)[a], getattr(one, name)[b])


def test_repacking_joins_what_is_left():
    lengths = DISTRIBUTIONS["mixed"](np.random.default_rng(4))
    documents = np.random.default_rng(5).permutation(len(lengths))
    short, long = pack_rows(lengths[documents], 128), pack_rows(lengths[documents], 512)
    short = PackedRows(documents[short.document], short.start, short.length, short.offsets)
    mixed = short.reordered(np.random.default_rng(6).permutation(len(short)))
    again = repack_rows(mixed, 0, documents, 512)
    assert np.array_equal(again.document, documents[long.document])
    assert all(np.array_equal(getattr(again, name), getattr(long, name)) for name in ("start", "length", "offsets"))
    used = len(mixed) // 3
    rest = repack_rows(mixed, used, documents, 512)
    left = np.zeros((len(lengths), int(lengths.max())), np.int64)
    for rows, first in ((mixed, mixed.offsets[used]), (rest, 0)):
        for document, start, length in zip(rows.document[first:], rows.start[first:], rows.length[first:], strict=True):
            left[document, start : start + length] += 1 if rows is mixed else 2
    assert set(np.unique(left)) == {0, 3} and len(rest) < len(mixed) - used
    assert len(repack_rows(mixed, len(mixed), documents, 512)) == 0


def fill_gaps_summing_anew(bins, full_rows, seq_len):
    """What `_fill_gaps` does, with the room left summed over all gaps for every row: quadratic, and plainly right."""
    gaps = [(-b.free, index) for index, b in enumerate(bins) if b.free >= MIN_PIECE]
    heapq.heapify(gaps)
    spread = set()
    for document, start in full_rows:
        if -sum(free for free, _ in gaps) < seq_len:
            break
        spread.add((document, start))
        end = start + seq_len
        while start < end:
            target = bins[index := heapq.heappop(gaps)[1]]
            size = min(target.free, end - start)
            target.pieces.append((document, start, size))
            target.free -= size
            start += size
            if target.free >= MIN_PIECE:
                heapq.heappush(gaps, (-target.free, index))
    return spread


def test_the_room_that_is_kept_by_subtraction_is_the_sum_of_the_gaps(monkeypatch):
    generator = np.random.default_rng(4)
    filled = 0
    for trial in range(60):
        seq_len = int(generator.integers(MIN_PIECE + 1, 200))
        count = int(generator.integers(1, 400))
        short = generator.integers(seq_len // 2 + 1, seq_len + 1, count)  # one to a row, so that gaps are left
        any_length = generator.integers(1, 5 * seq_len, count)
        lengths = np.where(generator.random(count) < 0.7, short, any_length)
        found = pack_rows(lengths, seq_len)
        with monkeypatch.context() as patch:
            patch.setattr("data.packing._fill_gaps", fill_gaps_summing_anew)
            expected = pack_rows(lengths, seq_len)
            patch.setattr("data.packing._fill_gaps", lambda *_: set())
            filled += len(pack_rows(lengths, seq_len)) > len(expected)
        for name in ("document", "start", "length", "offsets"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), (trial, name)
    assert filled > 40, "the inputs have gaps to fill"


def test_nothing_packs_to_nothing():
    rows = pack_rows(np.zeros(0, np.int64), 128)
    assert len(rows) == 0 and len(rows.reordered(np.zeros(0, np.int64))) == 0


@pytest.mark.slow
def test_the_default_source_packs_with_at_most_a_thousandth_of_padding(default):
    _, _, train, _ = default
    assert train.stats.rows * 1024 - train.stats.tokens == train.stats.padding
    assert train.stats.padding_share <= 1e-3
    assert train.stats.documents > 300 and train.stats.bytes > 2**22
