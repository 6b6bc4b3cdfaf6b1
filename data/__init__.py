"""From documents to batches. Imports none of `train`, `model`, `optim`.

`load_tokenizer` and `build_loaders` are what a trainer needs. To read the package, go along the way of a text; each
file imports only from those before it:

    errors, config, cache       bad input, the settings of `data.*`, files that appear whole
    document                    what a source yields: the vocabulary of all that follows
    files, images, tokenizer    paths and encodings; pixels to patches; text to ids
    tokens                      documents to token ids, in memory or in the cache
    records                     files of records: JSONL, JSON, Parquet, Arrow
    sources, chat, digits       readers: texts and records, data sets; conversations (a package); an image set
    open                        settings to sources, and what of them is held out
    packing, windows            which document goes into which row; rows in a shuffled order
    rows, collate, loader       rows of one source or a mixture, with a position; rows to tensors; batches
    build                       all of it put together
    check                       what the data hold, for people: counts, lengths, refusals, samples
    tokenizer_files, examples   files that go beside an exported tokenizer; conversations to try fine-tuning on

What is exported here is imported when it is first asked for, so that reading settings loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data.build import build_loaders, load_tokenizer
    from data.collate import Batch
    from data.config import DataConfig
    from data.errors import DataError
    from data.loader import TrainLoader, ValidationLoader
    from data.tokenizer import SpecialIds, special_ids
    from data.windows import Stats

_HOME = {
    "Batch": "data.collate",
    "DataConfig": "data.config",
    "DataError": "data.errors",
    "SpecialIds": "data.tokenizer",
    "Stats": "data.windows",
    "TrainLoader": "data.loader",
    "ValidationLoader": "data.loader",
    "build_loaders": "data.build",
    "load_tokenizer": "data.build",
    "special_ids": "data.tokenizer",
}

__all__ = [
    "Batch",
    "DataConfig",
    "DataError",
    "SpecialIds",
    "Stats",
    "TrainLoader",
    "ValidationLoader",
    "build_loaders",
    "load_tokenizer",
    "special_ids",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
