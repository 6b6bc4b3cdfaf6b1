"""Configuration to loaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from data.chat import REQUIRED
from data.config import DataConfig
from data.errors import DataError, Policy
from data.images import VisionSettings
from data.loader import (
    Assembler,
    Stats,
    StoredWindows,
    StreamedWindows,
    TrainLoader,
    ValidationLoader,
    Window,
    random_stream,
)
from data.packing import pack
from data.sources import Source, open_sources
from data.tokenizer import identity, special_ids
from data.tokens import Encoder, TokenStore, cached, collect

IMAGE_SOURCES = ("image_text", "digits")


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
    """The train and validation loaders of a configuration.

    tokenizer: from `load_tokenizer`. batch_size: rows of a micro-batch over all ranks, of which this rank gets its
    slice. vision: the model's `vision_config`; needed by sources with images and ignored by the others.

    Raises ValueError listing every problem of the arguments, `DataError` for bad input.
    """
    problems = cfg.problems() + _argument_problems(cfg, tokenizer, seq_len, batch_size, rank, world_size, vision)
    if problems:
        raise ValueError("\n".join(problems))
    settings = VisionSettings.from_config(vision) if _with_images(cfg, tokenizer, vision) else None
    assembler = Assembler(seq_len, special_ids(tokenizer), settings)
    train_source, validation_source = open_sources(cfg)

    chat = cfg.source == "chat"
    encoder = Encoder(tokenizer, seq_len, settings, count_bytes=False, conversations=chat)
    source_id = train_source.identity(content=not cfg.streaming)
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
    train = TrainLoader(windows, assembler, batch_size, rank, world_size, fingerprint, ahead=cfg.streaming)
    encoder = Encoder(tokenizer, seq_len, settings, count_bytes=True, conversations=chat)
    valid = _validation_loader(cfg, validation_source, encoder, assembler, batch_size, rank, world_size)
    return train, valid


def _with_images(cfg: DataConfig, tokenizer: Tokenizer, vision: Mapping[str, Any] | None) -> bool:
    """Conversations may have images where model and tokenizer know them; elsewhere these are refused one by one."""
    possible = vision is not None and special_ids(tokenizer).image is not None
    return cfg.source in IMAGE_SOURCES or (cfg.source == "chat" and possible)


def _argument_problems(
    cfg: DataConfig,
    tokenizer: Tokenizer,
    seq_len: int,
    batch_size: int,
    rank: int,
    world_size: int,
    vision: Mapping[str, Any] | None,
) -> list[str]:
    images = cfg.source in IMAGE_SOURCES
    missing = [token for token in REQUIRED if cfg.source == "chat" and tokenizer.token_to_id(token) is None]
    checks = [
        (seq_len >= 2, f"seq_len={seq_len}: must be at least 2, a token and its target"),
        (
            cfg.window_tokens >= 4 * seq_len,
            f"data.window_tokens={cfg.window_tokens}: must be at least 4 * seq_len = {4 * seq_len}, so that there is "
            "something to pack",
        ),
        (
            batch_size >= 1 and world_size >= 1 and batch_size % world_size == 0,
            f"batch_size={batch_size}: counts the rows of all ranks, so it must be a positive multiple of "
            f"world_size={world_size}",
        ),
        (0 <= rank < world_size, f"rank={rank}: must lie in 0..{world_size - 1}"),
        (not images or vision is not None, f"data.source={cfg.source}: needs a model with a vision_config"),
        (
            not images or special_ids(tokenizer).image is not None,
            f"data.source={cfg.source}: the tokenizer has no image token; use data.tokenizer=train or add one",
        ),
        (not missing, f"data.source=chat: the tokenizer has no {', '.join(missing)}; add them or use another"),
    ]
    return [message for ok, message in checks if not ok]


def _train_windows(
    cfg: DataConfig, source: Source, source_id: str, encoder: Encoder, seed: int | None
) -> StoredWindows | StreamedWindows:
    if cfg.streaming:
        return StreamedWindows(source, encoder, Policy(cfg.on_error), cfg.window_tokens, seed)
    store = _store(cfg, source, source_id, encoder)
    if not len(store):
        raise _empty("train", "all are held out; lower", store)
    return StoredWindows(store, encoder.seq_len, cfg.window_tokens, seed)


def _empty(split: str, otherwise: str, store: TokenStore) -> DataError:
    skipped = ", ".join(f"skipped {number} x {reason}" for reason, number in sorted(store.skipped.items()))
    detail = skipped or f"{otherwise} data.validation_share, or name held-out files in data.validation_paths"
    return DataError(f"{split} split", 0, "no documents", detail)


def _store(cfg: DataConfig, source: Source, source_id: str, encoder: Encoder) -> TokenStore:
    if encoder.vision is None:  # the cache holds no images
        return cached(source, source_id, encoder, cfg.on_error, cfg.cache_path)
    policy = Policy(cfg.on_error)
    return collect(encoder.encode_all((document for document, _ in source.read(policy)), policy), policy)


def _validation_loader(
    cfg: DataConfig, source: Source, encoder: Encoder, assembler: Assembler, batch_size: int, rank: int, world_size: int
) -> ValidationLoader:
    """All held-out rows, or `validation_rows` of them drawn by a fixed seed; of a stream only its head is read."""
    seq_len = encoder.seq_len
    if cfg.streaming:
        windows = StreamedWindows(source, encoder, Policy(cfg.on_error), cfg.validation_rows * seq_len, None)
        window = windows.load(0, 0, None)
    else:
        store = _store(cfg, source, source.identity(), encoder)
        window = Window(store, pack(store.lengths, seq_len), None)
    if not len(window.rows):
        raise _empty("validation", "of so few none is held out; raise", window.store)
    count = min(len(window.rows), cfg.validation_rows or len(window.rows))
    rows = window.rows.reordered(random_stream(0).permutation(len(window.rows))[:count])
    stats = Stats()
    stats.add_store(window.store)
    stats.add_rows(rows, seq_len)
    return ValidationLoader(Window(window.store, rows, None), assembler, batch_size, rank, world_size, stats)
