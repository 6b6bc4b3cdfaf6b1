"""Writes rows of real text in which passages and key-value pairs come back at known distances, for `make study-recall`:
``python -m data.recall FOLDER``.

The text is that of the running Python's standard library, split into training and held-out files as by
``data.source=stdlib``. A row has 4,096 tokens, of which the first and the last are control tokens, and consists of
units of 64 tokens:

    16 tokens   text that continues the text of the unit before
    16 tokens   4 pairs, each an opening mark, a key, a value and a closing mark; keys and values are drawn at random
    16 tokens   a passage of an earlier unit again, word for word
    16 tokens   4 pairs of an earlier unit again

A second occurrence begins exactly `distance` tokens after the first. Training rows mix all `DISTANCES`; where the
distance would reach back beyond the beginning of the row, text and pairs are new. Only second occurrences are targets:
the values of pairs, and of a passage the tokens after the first `UNSURE`, which do not yet say which passage it is.

FOLDER gets ``tokenizer.json``; ``train.jsonl`` with both kinds of targets; and for every distance D ``pairs-D.jsonl``
and ``passages-D.jsonl`` with held-out text, only this distance, and one kind of targets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from data.document import hash_share
from data.files import stdlib_files
from data.tokenizer import CONTROL_TOKENS, guard, train_tokenizer

UNIT, QUARTER = 64, 16
DISTANCES = (96, 480, 1504, 3040)  # multiples of UNIT and half of UNIT: from a second half to an earlier first half
UNSURE = 4
VOCABULARY = 1024
HELD_OUT = 0.05  # fraction of the files that is held out, equal to the default of `data.validation_share`
MARKS = "\x01\x02"  # their tokens stand around a pair; source files do not contain them
FIRST_KEY = len(CONTROL_TOKENS) + 256  # the first token of several characters
VALUES = 64  # the number of tokens that can be values; they are the last of the vocabulary


@dataclass(frozen=True)
class Row:
    """The token ids of a row, and two masks of positions: the second occurrences of passages, and those of values."""

    ids: np.ndarray
    passages: np.ndarray
    values: np.ndarray

    def record(self, targets: np.ndarray) -> dict[str, list[int]]:
        """The row as a record of token ids and labels. targets: a bool mask of the positions that are targets."""
        return {"input_ids": self.ids.tolist(), "labels": np.where(targets, self.ids, -100).tolist()}


def make_row(
    text: Iterator[int], marks: Sequence[int], distances: Sequence[int], length: int, draw: np.random.Generator
) -> Row:
    """Make one row without the first and the last token, which are control tokens; units begin at multiples of UNIT in
    the row with the control tokens.

    text: yields the next tokens of the text. marks: the tokens around a pair. distances: the distances from which one
    is drawn for each passage and each group of pairs. length: tokens in the row with the control tokens, a multiple of
    UNIT.
    """
    ids = np.zeros(length, np.int64)
    passages, values = np.zeros(length, np.bool_), np.zeros(length, np.bool_)
    keys = iter(draw.permutation(np.arange(FIRST_KEY, VOCABULARY - VALUES)))

    def new_text(at: int) -> None:
        ids[at : at + QUARTER] = [next(text) for _ in range(QUARTER)]

    def new_pairs(at: int) -> None:
        for start in range(at, at + QUARTER, 4):
            ids[start : start + 4] = marks[0], next(keys), draw.integers(VOCABULARY - VALUES, VOCABULARY), marks[1]

    for unit in range(0, length, UNIT):
        new_text(unit)
        new_pairs(unit + QUARTER)
        for at, new in ((unit + 2 * QUARTER, new_text), (unit + 3 * QUARTER, new_pairs)):
            near = [distance for distance in distances if distance <= at]
            if not near:
                new(at)
                continue
            begin = at - int(draw.choice(near))
            ids[at : at + QUARTER] = ids[begin : begin + QUARTER]
            if new is new_text:
                passages[at + UNSURE : at + QUARTER] = True
            else:
                values[at + 2 : at + QUARTER : 4] = True
    inner = slice(1, length - 1)
    return Row(ids[inner], passages[inner], values[inner])


def write(folder: Path, length: int = 4096, rows: int = 300, held_out_rows: int = 4) -> None:
    """Write all files. length: tokens in a row; rows: number of training rows; held_out_rows: number of rows for each
    kind and distance.
    """
    texts: dict[bool, list[str]] = {False: [], True: []}  # by whether the file is held out
    for file in stdlib_files():
        held_out = hash_share(file.name.encode()) < HELD_OUT
        texts[held_out].append(file.path.read_bytes().decode("utf-8", "ignore"))
    tokenizer = guard(train_tokenizer(iter(texts[False]), VOCABULARY), "tokenizer.json")
    marks = tokenizer.encode(MARKS, add_special_tokens=False).ids
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    draw = np.random.default_rng(0)
    text = _tokens(tokenizer, texts[False], draw)
    mixed = (make_row(text, marks, DISTANCES, length, draw) for _ in range(rows))
    _write(folder / "train.jsonl", (row.record(row.passages | row.values) for row in mixed))
    text = _tokens(tokenizer, texts[True], draw)
    for distance in DISTANCES:
        made = [make_row(text, marks, [distance], length, draw) for _ in range(held_out_rows)]
        _write(folder / f"passages-{distance}.jsonl", (row.record(row.passages) for row in made))
        _write(folder / f"pairs-{distance}.jsonl", (row.record(row.values) for row in made))


def _tokens(tokenizer: Tokenizer, texts: Sequence[str], draw: np.random.Generator) -> Iterator[int]:
    """Yield the tokens of all texts in a random order, again and again."""
    while True:
        for number in draw.permutation(len(texts)):
            yield from tokenizer.encode(texts[number], add_special_tokens=False).ids


def _write(path: Path, records: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main(arguments: Iterable[str]) -> None:
    """Run the command line with these arguments."""
    arguments = list(arguments)
    if len(arguments) != 1:
        sys.exit("usage: python -m data.recall FOLDER")
    write(Path(arguments[0]))
    print(f"{arguments[0]}: tokenizer.json, train.jsonl, and held-out rows for the distances {DISTANCES}")


if __name__ == "__main__":
    main(sys.argv[1:])
