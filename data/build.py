"""Configuration -> tokenizer and loaders. This is the only file that knows all parts of the package.

The way of a text: `open_sources` gives documents, `tokenised` their token ids (a stream is tokenised while it is read),
`StoredWindows` or `StreamedWindows` packed and shuffled rows, and the loaders batches of tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data.chat.render import REQUIRED_TOKENS
from data.collate import Collator
from data.config import SOURCES, DataConfig, SourceKind
from data.document import Reading, Source
from data.errors import BadRecordPolicy, DataError
from data.images import VisionSettings
from data.loader import MixedValidation, TrainLoader, ValidationLoader
from data.open import open_sources
from data.rows import MixedRows, RowReader
from data.tokenizer import SpecialIds, cached_tokenizer, identity, read_tokenizer, special_ids
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
    sources = []
    for part in cfg.parts().values():
        text = dataclasses.replace(part, source=SOURCES[part.source].tokenizer_source or part.source)
        sources.append(open_sources(text)[0])
    texts = _in_turn(source.read(BadRecordPolicy(cfg.on_error)) for source in sources)
    texts_id = " ".join(source.identity(content=not cfg.streaming) for source in sources)
    return cached_tokenizer(texts, texts_id, cfg.vocab_size, cfg.on_error, cfg.cache_path)


def _in_turn(readings: Iterable[Reading]) -> Iterator[str]:
    """The texts of several sources, one of each in turn."""
    for documents in itertools.zip_longest(*readings):
        yield from (document[0].text for document in documents if document is not None)


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
) -> tuple[TrainLoader, ValidationLoader | MixedValidation]:
    """The training and validation loaders of a configuration.

    Args:
        tokenizer: from `load_tokenizer`.
        seq_len: tokens of a row.
        batch_size: rows of a micro-batch over all ranks. Each rank gets `batch_size / world_size` of them.
        seed: determines the shuffled order.
        vision: the model's `vision_config`. Sources with images need it, others ignore it.

    Raises ValueError listing every problem of the arguments, `DataError` for bad input.
    """
    wrong = cfg.problems()
    parts = {} if cfg.mixture and wrong else cfg.parts()
    problems = [
        text
        for part in parts.values()
        for text in argument_problems(part, tokenizer, seq_len, batch_size, rank, world_size, vision)
    ]
    refuse(wrong + list(dict.fromkeys(problems)))
    special = special_ids(tokenizer)
    sizes = {name: image_sizes(part, special, vision) for name, part in parts.items()}
    collator = Collator(seq_len, special, next(filter(None, sizes.values()), None))
    readers, held_out, fingerprints = {}, {}, {}
    for name, part in parts.items():
        train_source, validation_source = open_sources(part)
        source_id = train_source.identity(content=not part.streaming)
        conversations = SOURCES[part.source].conversations
        encoder = Encoder(tokenizer, seq_len, sizes[name], count_bytes=False, conversations=conversations)
        windows = _train_windows(part, train_source, source_id, encoder, seed if part.shuffle else None)
        readers[name] = RowReader(windows, prefetch=part.streaming)
        fingerprints[name] = {
            "data": source_id,
            "tokenizer": identity(tokenizer),
            "on_error": part.on_error,
            "streaming": part.streaming,
            "seq_len": seq_len,
            "window_tokens": part.window_tokens,
            "shuffle": part.shuffle,
            "seed": seed,
        }
        encoder = Encoder(tokenizer, seq_len, sizes[name], count_bytes=True, conversations=conversations)
        rows = _held_out(part, validation_source, encoder)
        held_out[name] = ValidationLoader(rows, collator, batch_size, rank, world_size, part.validation_rows)
    if not cfg.mixture:
        (reader,), (fingerprint,), (valid,) = readers.values(), fingerprints.values(), held_out.values()
        return TrainLoader(reader, collator, batch_size, rank, world_size, fingerprint), valid
    weights = cfg.weights()
    fingerprint = {f"{name}.{key}": value for name, part in fingerprints.items() for key, value in part.items()}
    fingerprint |= {f"{name}.weight": weight for name, weight in weights.items()}
    mixed = MixedRows(readers, weights)
    return TrainLoader(mixed, collator, batch_size, rank, world_size, fingerprint), MixedValidation(held_out)


def image_sizes(cfg: DataConfig, special: SpecialIds, vision: Mapping[str, Any] | None) -> VisionSettings | None:
    """The sizes of image spans. Conversations may have images if model and tokenizer support them; otherwise each one
    with an image is refused."""
    kind = SOURCES[cfg.source]
    with_images = kind.images or (kind.conversations and special.image is not None)
    return VisionSettings.from_config(vision) if with_images and vision is not None else None


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
