"""Configuration -> tokenizer and loaders. This is the only file that knows all parts of the package.

The way of a text: `open_sources` gives documents, `tokenised` their token ids (a stream is tokenised while it is read),
`StoredWindows` or `StreamedWindows` packed and shuffled rows, and the loaders batches of tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data.chat.render import REQUIRED_TOKENS
from data.collate import Collator
from data.config import SOURCES, DataConfig, SourceKind
from data.document import Source
from data.errors import BadRecordPolicy, DataError
from data.images import VisionSettings
from data.loader import TrainLoader, ValidationLoader
from data.open import open_sources
from data.tokenizer import cached_tokenizer, identity, read_tokenizer, special_ids
from data.tokens import Encoder, TokenStore, tokenised
from data.windows import PackingWindow, StoredWindows, StreamedWindows, Windows, whole_split


def load_tokenizer(cfg: DataConfig) -> Tokenizer:
    """The tokenizer of a configuration: read from a file, or trained on the training split once and then cached.

    `encode(text, add_special_tokens=False)` never returns a control token, whatever the text; pickling the tokenizer
    loses this property. To show tokens to people use `decode(ids, skip_special_tokens=False)`. Raises `DataError` for a
    file that is missing or not a tokenizer, ValueError listing every problem of the configuration.
    """
    refuse(cfg.problems())
    if cfg.tokenizer != "train":
        return read_tokenizer(Path(cfg.tokenizer).expanduser())
    source, _ = open_sources(dataclasses.replace(cfg, source=SOURCES[cfg.source].tokenizer_source or cfg.source))
    texts = (document.text for document, _ in source.read(BadRecordPolicy(cfg.on_error)))
    texts_id = source.identity(content=not cfg.streaming)
    return cached_tokenizer(texts, texts_id, cfg.vocab_size, cfg.on_error, cfg.cache_path)


def build_loaders(
    cfg: DataConfig,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    vision: Mapping[str, Any] | None = None,
) -> tuple[TrainLoader, ValidationLoader]:
    """The training and validation loaders of a configuration.

    Args:
        tokenizer: from `load_tokenizer`.
        seq_len: tokens of a row.
        batch_size: rows of a micro-batch over all ranks. Each rank gets `batch_size / world_size` of them.
        seed: determines the shuffled order.
        vision: the model's `vision_config`. Sources with images need it, others ignore it.

    Raises ValueError listing every problem of the arguments, `DataError` for bad input.
    """
    refuse(cfg.problems() + argument_problems(cfg, tokenizer, seq_len, batch_size, rank, world_size, vision))
    kind, special = SOURCES[cfg.source], special_ids(tokenizer)
    # Conversations may have images if model and tokenizer support them; otherwise each one with an image is refused.
    with_images = kind.images or (kind.conversations and special.image is not None)
    settings = VisionSettings.from_config(vision) if with_images and vision is not None else None
    collator = Collator(seq_len, special, settings)
    train_source, validation_source = open_sources(cfg)

    source_id = train_source.identity(content=not cfg.streaming)
    encoder = Encoder(tokenizer, seq_len, settings, count_bytes=False, conversations=kind.conversations)
    windows = _train_windows(cfg, train_source, source_id, encoder, seed if cfg.shuffle else None)
    fingerprint = {
        "data": source_id,
        "tokenizer": identity(tokenizer),
        "on_error": cfg.on_error,
        "streaming": cfg.streaming,
        "seq_len": seq_len,
        "window_tokens": cfg.window_tokens,
        "shuffle": cfg.shuffle,
        "seed": seed,
    }
    train = TrainLoader(windows, collator, batch_size, rank, world_size, fingerprint, prefetch=cfg.streaming)

    encoder = Encoder(tokenizer, seq_len, settings, count_bytes=True, conversations=kind.conversations)
    held_out = _held_out(cfg, validation_source, encoder)
    return train, ValidationLoader(held_out, collator, batch_size, rank, world_size, cfg.validation_rows)


def refuse(problems: list[str]) -> None:
    """Raise ValueError listing the problems, if there are any."""
    if problems:
        raise ValueError("\n".join(problems))


def argument_problems(
    cfg: DataConfig,
    tokenizer: Tokenizer,
    seq_len: int,
    batch_size: int,
    rank: int,
    world_size: int,
    vision: Mapping[str, Any] | None,
) -> list[str]:
    """Everything that is wrong with the arguments of `build_loaders`, apart from the settings, a line each."""
    kind = SOURCES.get(cfg.source, SourceKind(""))
    missing = [token for token in REQUIRED_TOKENS if kind.conversations and tokenizer.token_to_id(token) is None]
    checks = [
        (seq_len >= 2, f"seq_len={seq_len}: must be at least 2, a token and its target"),
        (
            cfg.window_tokens >= 4 * seq_len,
            f"data.window_tokens={cfg.window_tokens}: must be at least 4 * seq_len = {4 * seq_len}, or there is "
            "little to pack",
        ),
        (
            batch_size >= 1 and world_size >= 1 and batch_size % world_size == 0,
            f"batch_size={batch_size}: is the number of rows over all ranks, so it must be a positive multiple of "
            f"world_size={world_size}",
        ),
        (0 <= rank < world_size, f"rank={rank}: must be in 0..{world_size - 1}"),
        (not kind.images or vision is not None, f"data.source={cfg.source}: needs a model with a vision_config"),
        (
            not kind.images or special_ids(tokenizer).image is not None,
            f"data.source={cfg.source}: the tokenizer has no image token; use data.tokenizer=train or add one",
        ),
        (not missing, f"data.source={cfg.source}: the tokenizer has no {', '.join(missing)}; add them or use another"),
    ]
    return [message for ok, message in checks if not ok]


def _train_windows(cfg: DataConfig, source: Source, source_id: str, encoder: Encoder, seed: int | None) -> Windows:
    if cfg.streaming:
        return StreamedWindows(source, encoder, BadRecordPolicy(cfg.on_error), cfg.window_tokens, seed)
    store = tokenised(source, source_id, encoder, cfg.on_error, cfg.cache_path)
    if not len(store):
        raise _empty("training", "all are held out; lower", store)
    return StoredWindows(store, encoder.seq_len, cfg.window_tokens, seed)


def _held_out(cfg: DataConfig, source: Source, encoder: Encoder) -> PackingWindow:
    """The held-out rows: all of them, or of a stream the first `validation_rows`."""
    if cfg.streaming:
        tokens = cfg.validation_rows * encoder.seq_len
        window = StreamedWindows(source, encoder, BadRecordPolicy(cfg.on_error), tokens, None).load(0, 0, None)
    else:
        store = tokenised(source, source.identity(), encoder, cfg.on_error, cfg.cache_path)
        window = whole_split(store, encoder.seq_len)
    if not len(window.rows):
        raise _empty("validation", "too few to hold one out; raise", window.store)
    return window


def _empty(split: str, otherwise: str, store: TokenStore) -> DataError:
    """The error for a split without documents: what was skipped, or `otherwise` what to do about the settings."""
    skipped = ", ".join(f"skipped {number} x {reason}" for reason, number in sorted(store.skipped.items()))
    detail = skipped or f"{otherwise} data.validation_share, or name held-out files in data.validation_paths"
    return DataError(f"{split} split", 0, "no documents", detail)
