"""Reads all data of a configuration and reports counts, lengths, bad records and samples. Nothing is trained or
cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from data.build import argument_problems, image_sizes, refuse
from data.config import SOURCES, DataConfig
from data.document import Control, Picture
from data.errors import BadRecordPolicy, DataError
from data.open import open_sources
from data.packing import pack_rows
from data.progress import progress
from data.tokenizer import ASSISTANT, USER, special_ids
from data.tokens import Encoded, Encoder, documents_of

EXAMPLES = 3  # number of bad records that are listed for each reason, and of samples


@dataclass
class SplitReport:
    """The contents of one split of the data.

    Attributes:
        records: number of valid records.
        documents: number of documents made from the valid records.
        turns: number of user and assistant messages; if a conversation becomes several documents, each message counts
            once.
        tokens: number of tokens of all documents.
        supervised: number of tokens that can be targets of the loss.
        lengths: the number of tokens of each document, int64 [documents].
        rows: number of packed rows of `seq_len` tokens.
        padding: the fraction of padding in the packed rows.
        refusals: for each reason, the number of bad records, and the messages of the first errors with file and line.
        samples: the first documents, each as a list of (text, whether it is supervised).
    """

    records: int = 0
    documents: int = 0
    turns: int = 0
    tokens: int = 0
    supervised: int = 0
    bytes: int = 0
    images: int = 0
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    rows: int = 0
    padding: float = 0.0
    refusals: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    repaired: dict[str, int] = field(default_factory=dict)
    formats: dict[str, int] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)
    samples: list[list[tuple[str, bool]]] = field(default_factory=list)


class _Collect(BadRecordPolicy):
    """Skips every bad record, and keeps the first errors for each reason."""

    def __init__(self) -> None:
        super().__init__("skip")
        self.examples: dict[str, list[str]] = {}

    def report(self, error: DataError) -> None:
        self.skipped[error.reason] += 1
        examples = self.examples.setdefault(error.reason, [])
        if len(examples) < EXAMPLES:
            examples.append(str(error))

    def repair(self, error: DataError) -> None:
        self.repaired[error.reason] += 1


def check_data(
    cfg: DataConfig, tokenizer: Tokenizer, seq_len: int, vision: Mapping[str, Any] | None = None
) -> dict[str, SplitReport]:
    """Read both splits completely and return {"training": report, "validation": report}; for a mixture, both splits of
    every source.

    Bad records are counted whatever the setting `on_error` is. Raises ValueError that lists every invalid setting, and
    `DataError` for data that cannot be opened.
    """
    wrong = cfg.problems()
    parts = {} if cfg.mixture and wrong else cfg.parts()
    problems = [
        text for part in parts.values() for text in argument_problems(part, tokenizer, seq_len, 1, 0, 1, vision)
    ]
    refuse(wrong + list(dict.fromkeys(problems)))
    reports: dict[str, SplitReport] = {}
    for name, part in parts.items():
        kind, sizes = SOURCES[part.source], image_sizes(part, special_ids(tokenizer), vision)
        encoder = Encoder(tokenizer, seq_len, sizes, count_bytes=False, conversations=kind.conversations)
        splits = ("training", "validation") if not cfg.mixture else (name, f"{name}, held out")
        reports |= {split: _read(source, encoder) for split, source in zip(splits, open_sources(part), strict=True)}
    return reports


def _read(source: Any, encoder: Encoder) -> SplitReport:
    report, policy, lengths = SplitReport(), _Collect(), []
    turns: dict[tuple[str, int], int] = {}
    with documents_of(source, policy) as documents:
        for encoded in encoder.encode_all(documents, policy):
            document = encoded.document
            said = [p for p in document.parts if isinstance(p, Control) and p.spelling in (USER, ASSISTANT)]
            place = document.file, document.line
            turns[place] = max(turns.get(place, 0), len(said))
            lengths.append(len(encoded.ids))
            report.supervised += int(_mask(encoded, encoder).sum())
            report.bytes += encoded.num_bytes
            report.images += sum(isinstance(part, Picture) for part in document.parts)
            if len(report.samples) < EXAMPLES:
                report.samples.append(_runs(encoded, encoder))
    report.lengths = np.array(lengths, np.int64)
    report.records, report.documents, report.turns = len(turns), len(lengths), sum(turns.values())
    report.tokens = int(report.lengths.sum())
    if lengths:
        with progress("packing", len(lengths)) as advance:
            rows = pack_rows(report.lengths, encoder.seq_len, advance)
        report.rows = len(rows)
        report.padding = 1 - report.tokens / (report.rows * encoder.seq_len)
    report.refusals = {reason: (number, policy.examples[reason]) for reason, number in policy.skipped.most_common()}
    report.repaired, report.formats = dict(policy.repaired), dict(policy.formats)
    report.unused = dict(policy.unused)
    return report


def _mask(encoded: Encoded, encoder: Encoder) -> np.ndarray:
    """Returns a mask, bool [tokens], of the tokens of a document that are targets of the loss if the document is not
    cut; these are the tokens that `Collator` gives labels to.
    """
    mask = np.ones(len(encoded.ids), np.bool_) if encoded.loss_mask is None else encoded.loss_mask.astype(np.bool_)
    mask[0] = False
    if encoder.vision is not None:
        mask &= encoded.ids != encoder.special.image
    return mask


def _runs(encoded: Encoded, encoder: Encoder) -> list[tuple[str, bool]]:
    mask = _mask(encoded, encoder)
    ends = [*np.flatnonzero(np.diff(mask)) + 1, len(mask)]
    runs, first = [], 0
    for end in ends:
        text = encoder.tokenizer.decode(encoded.ids[first:end].tolist(), skip_special_tokens=False)
        runs.append((text, bool(mask[first])))
        first = int(end)
    return runs
