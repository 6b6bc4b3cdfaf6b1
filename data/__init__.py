"""From documents to batches: `load_tokenizer` and `build_loaders` are what a trainer needs."""

from data.build import build_loaders
from data.config import DataConfig
from data.errors import DataError
from data.loader import Batch, Stats, TrainLoader, ValidationLoader
from data.tokenizer import SpecialIds, load_tokenizer, special_ids

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
