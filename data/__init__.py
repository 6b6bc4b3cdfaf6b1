"""Reads training documents and makes batches of them. This package does not import `train`, `model` or `optim`.

`load_tokenizer` and `build_loaders` are what a trainer needs. The list below follows the path of a text from a file
into a batch; each file imports only files listed before it:

    errors:           errors about bad input.
    config:           the settings `data.*`.
    cache:            cache files that are written atomically.
    progress:         shows the progress of long work.
    network:          repeats operations that failed because of the network.
    document:         documents and their parts, and the interface of a source of documents.
    files:            finds files and unpacks compressed ones.
    images:           turns pixels into patches.
    tokenizer:        turns text into token ids.
    tokens:           turns documents into token ids, in memory or in the cache.
    records:          reads files of records (JSONL, JSON, Parquet, Arrow).
    sources:          sources of texts and records.
    chat:             sources of conversations (a package).
    image_folder:     a source of images with captions in text files beside them.
    digits:           a source of images of digits.
    open:             opens the configured sources and splits off the held-out data.
    packing:          packs documents into rows.
    windows:          packs and shuffles the documents in groups of limited size.
    rows:             iterates over packed rows from one or several sources.
    lanes:            divides streamed sources among ranks.
    collate:          turns packed rows into the tensors of a batch.
    loader:           the data loaders, which yield batches.
    build:            makes the tokenizer and the loaders from a configuration.
    check:            reports on the data: counts, lengths, bad records, samples.
    tokenizer_files:  files beside an exported tokenizer.
    examples:         example conversations for fine-tuning.
    recall:           rows in which passages and key-value pairs are repeated, for the study of recall.

The names that the package exports are imported lazily, so that reading settings does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data.build import build_loaders, load_tokenizer
    from data.collate import Batch
    from data.config import DataConfig
    from data.errors import DataError, NetworkError
    from data.lanes import merge_positions
    from data.loader import TrainLoader, ValidationLoader
    from data.tokenizer import SpecialIds, special_ids
    from data.windows import Stats

_HOME = {
    "Batch": "data.collate",
    "DataConfig": "data.config",
    "DataError": "data.errors",
    "NetworkError": "data.errors",
    "SpecialIds": "data.tokenizer",
    "Stats": "data.windows",
    "TrainLoader": "data.loader",
    "ValidationLoader": "data.loader",
    "build_loaders": "data.build",
    "load_tokenizer": "data.build",
    "merge_positions": "data.lanes",
    "special_ids": "data.tokenizer",
}

__all__ = [
    "Batch",
    "DataConfig",
    "DataError",
    "NetworkError",
    "SpecialIds",
    "Stats",
    "TrainLoader",
    "ValidationLoader",
    "build_loaders",
    "load_tokenizer",
    "merge_positions",
    "special_ids",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
