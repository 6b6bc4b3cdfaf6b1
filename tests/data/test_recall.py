"""Rows with second occurrences at known distances."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

import data.recall
from data.recall import DISTANCES, FIRST_KEY, QUARTER, UNIT, UNSURE, VALUES, VOCABULARY, make_row, write

LENGTH = 4096


def row_of(distances: tuple[int, ...]) -> data.recall.Row:
    return make_row(itertools.count(5000), (1, 2), distances, LENGTH, np.random.default_rng(0))


@pytest.mark.parametrize("distance", DISTANCES)
def test_second_occurrences_are_exactly_so_far_behind_the_first(distance: int) -> None:
    row = row_of((distance,))
    assert len(row.ids) == LENGTH - 2
    for targets in (row.passages, row.values):
        at = targets.nonzero()[0]
        assert len(at) and (row.ids[at] == row.ids[at - distance]).all()
        assert not targets[: distance - 1].any()
    begins = np.arange(UNIT // 2, LENGTH, UNIT)
    later = begins[begins >= distance]
    assert row.passages.sum() == len(later) * (QUARTER - UNSURE) - (1 if later[-1] + QUARTER > LENGTH - 1 else 0)
    assert row.values.sum() == len(later) * QUARTER // 4


def test_a_pair_fills_a_group_of_four_tokens_and_a_key_has_one_value() -> None:
    row = row_of(DISTANCES)
    whole = np.concatenate([[0], row.ids, [0]])  # with the control tokens
    groups = whole.reshape(-1, 4)
    pairs = groups[(groups[:, 0] == 1) & (groups[:, 3] == 2)]
    assert len(pairs) == LENGTH // 8 - 1  # half of the row, and the end of the last pair is the control token
    keys, values = pairs[:, 1], pairs[:, 2]
    assert (keys >= FIRST_KEY).all() and (keys < VOCABULARY - VALUES).all()
    assert (values >= VOCABULARY - VALUES).all() and (values < VOCABULARY).all()
    assert len({(k, v) for k, v in zip(keys, values, strict=True)}) == len(set(keys)) < len(keys)
    assert set(whole[1:][row.values.nonzero()[0]]) <= set(values)


def test_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a short text, with the tokenizer of a small vocabulary."""
    files = [
        file for file in data.recall.stdlib_files() if file.name in ("string.py", "token.py", "queue.py", "abc.py")
    ]
    monkeypatch.setattr(data.recall, "stdlib_files", lambda: files)
    monkeypatch.setattr(data.recall, "HELD_OUT", 0.5)
    monkeypatch.setattr(data.recall, "VOCABULARY", 640)
    monkeypatch.setattr(data.recall, "VALUES", 8)
    monkeypatch.setattr(data.recall, "DISTANCES", (96, 160))
    write(tmp_path, length=320, rows=3, held_out_rows=2)
    names = {
        "tokenizer.json",
        "train.jsonl",
        *(f"{kind}-{d}.jsonl" for kind in ("pairs", "passages") for d in (96, 160)),
    }
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in names - {"tokenizer.json"}:
        records = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert len(records) == (3 if name == "train.jsonl" else 2)
        for record in records:
            ids, labels = np.array(record["input_ids"]), np.array(record["labels"])
            assert len(ids) == 318 and ((labels == -100) | (labels == ids)).all() and (labels >= 0).any()
