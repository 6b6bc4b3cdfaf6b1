"""Makes the tokenizer and the data loaders from a configuration. Only this file uses all parts of the package.

A text passes through these steps: `open_sources` reads documents, `tokenised` turns them into token ids (a streamed
source is tokenised while it is read), `StoredWindows` or `StreamedWindows` pack them into rows and shuffle the rows,
and the loaders make batches of tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer

from data.chat.render import REQUIRED_TOKENS
from data.collate import Collator
from data.config import SOURCES, DataConfig, SourceKind
from data.document import WHOLE, Reading, Share, SharedSource, Source
from data.errors import BadRecordPolicy, DataError
from data.images import VisionSettings
from data.lanes import OPEN_LANES, LaneRows, MakeReader, window_tokens
from data.loader import MixedValidation, Once, TrainLoader, ValidationLoader, in_this_process
from data.open import open_sources
from data.rows import MixedRows, RowReader
from data.tokenizer import SpecialIds, cached_tokenizer, identity, read_tokenizer, special_ids
from data.tokens import Encoder, TokenStore, file_sizes, tokenised
from data.windows import PackingWindow, Stats, StoredWindows, StreamedWindows, whole_split


def load_tokenizer(cfg: DataConfig, once: Once = in_this_process) -> Tokenizer:
    """Return the tokenizer of a configuration: either read from a file, or trained once on the training split and
    cached.

    With this tokenizer, `encode(text, add_special_tokens=False)` never returns a control token, whatever the text is; a
    pickled copy of the tokenizer does not guarantee this. To display tokens, use `decode(ids,
    skip_special_tokens=False)`. Raises `DataError` if the tokenizer file is missing or is not a tokenizer, and
    ValueError that lists every problem of the configuration.

    once: calls a function in only one of the run's processes, so that only one process hashes the texts.
    """
    refuse(cfg.problems())
    if cfg.tokenizer != "train":
        return read_tokenizer(Path(cfg.tokenizer).expanduser())
    sources = []
    for part in cfg.parts().values():
        text = dataclasses.replace(part, source=SOURCES[part.source].tokenizer_source or part.source)
        sources.append(open_sources(text)[0])
    texts = _in_turn(source.read(BadRecordPolicy(cfg.on_error)) for source in sources)
    texts_id = once(lambda: " ".join(source.identity(content=not cfg.streaming) for source in sources))
    known = [sum(file_sizes(source).values()) for source in sources]
    size = {"num_bytes": sum(known)} if all(known) else {}
    return cached_tokenizer(texts, texts_id, cfg.vocab_size, cfg.on_error, cfg.cache_path, **size)


def _in_turn(readings: Iterable[Reading]) -> Iterator[str]:
    """Yield the texts of several sources: the first text of every source, then the second text of every source, ..."""
    for documents in itertools.zip_longest(*readings):
        yield from (document[0].text for document in documents if document is not None)


def build_loaders(
    cfg: DataConfig,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    batch_rows: int,
    seed: int = 0,
    row_group: int = 0,
    row_groups: int = 1,
    vision: Mapping[str, Any] | None = None,
    step_rows: int | None = None,
    train_seq_len: int | None = None,
    once: Once = in_this_process,
) -> tuple[TrainLoader, ValidationLoader | MixedValidation]:
    """Make the training loader and the validation loader of a configuration.

    Args:
        tokenizer: from `load_tokenizer`.
        seq_len: number of tokens in a packed row; conversations and documents with images must fit into it.
        batch_rows: number of rows that all row groups together take for one micro-batch. Row group g gets rows g * n to
            g * n + n - 1 of the `batch_rows` rows, where n = `batch_rows / row_groups`.
        row_group: index of this rank's row group, counted from 0. Ranks that share rows under context parallelism are
            one row group; without context parallelism every rank is a row group by itself.
        row_groups: number of row groups.
        seed: random seed of the order in which rows are shuffled.
        vision: the model's `vision_config`. Sources with images need this setting; other sources ignore it.
        step_rows: number of rows of an optimizer step over all row groups, a multiple of `batch_rows`; None means
            `batch_rows`. A streamed source is divided into `step_rows` independent sequences of rows (lanes), so a step
            has the same rows on any number of ranks.
        train_seq_len: number of tokens in a row of the training loader, `seq_len` or more; None means `seq_len`. A
            reading position that was saved with another `train_seq_len` can be loaded.
        once: calls a function in one of the run's processes and returns the result in all of them, so that only one
            process hashes the data and packs the held-out rows. All processes must call `build_loaders` together.

    Raises ValueError that lists every invalid argument or setting, and `DataError` for bad data.
    """
    train_seq_len = train_seq_len or seq_len
    wrong = cfg.problems()
    parts = {} if cfg.mixture and wrong else cfg.parts()
    problems = [
        text
        for part in parts.values()
        for text in argument_problems(
            part, tokenizer, max(seq_len, train_seq_len), batch_rows, row_group, row_groups, vision
        )
    ]
    step_rows = batch_rows if step_rows is None else step_rows
    if step_rows < 1 or step_rows % max(1, batch_rows):
        problems.append(f"step_rows={step_rows}: must be a positive multiple of batch_rows={batch_rows}")
    refuse(wrong + list(dict.fromkeys(problems)))
    special = special_ids(tokenizer)
    sizes = {name: image_sizes(part, special, vision) for name, part in parts.items()}
    pairs = any(SOURCES[part.source].pairs for part in parts.values())
    collators = [
        Collator(length, special, next(filter(None, sizes.values()), None), pairs, cfg.on_error)
        for length in (seq_len, train_seq_len)
    ]
    lanes = step_rows if any(part.streaming for part in parts.values()) else None
    per_group = batch_rows // row_groups
    own = [first + row_group * per_group + n for first in range(0, step_rows, batch_rows) for n in range(per_group)]
    readers, held_out, fingerprints = {}, {}, {}
    for name, part in parts.items():
        train_source, validation_source = open_sources(part)
        source_id, held_out_id = once(partial(_identities, part, train_source, validation_source))
        conversations = SOURCES[part.source].conversations
        encoder = Encoder(tokenizer, seq_len, sizes[name], count_bytes=False, conversations=conversations)
        order = seed if part.shuffle else None
        readers[name] = _readers(part, train_source, source_id, encoder, order, len(own), train_seq_len)
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
        window = _held_out(part, validation_source, held_out_id, encoder, once)
        rows_limit = part.validation_rows
        held_out[name] = ValidationLoader(window, collators[0], batch_rows, row_group, row_groups, rows_limit, once)
    weights = cfg.weights() if cfg.mixture else {"": 1.0}
    rows: RowReader | MixedRows | LaneRows
    if lanes is not None:
        rows = LaneRows(readers, weights, lanes, own, train_seq_len)
    else:
        whole = {name: make(WHOLE, train_seq_len).load_first() for name, make in readers.items()}
        rows = MixedRows(whole, weights) if cfg.mixture else whole[""]
    if not cfg.mixture:
        (fingerprint,), (valid,) = fingerprints.values(), held_out.values()
        return TrainLoader(rows, collators[1], batch_rows, row_group, row_groups, fingerprint), valid
    fingerprint = {f"{name}.{key}": value for name, part in fingerprints.items() for key, value in part.items()}
    fingerprint |= {f"{name}.weight": weight for name, weight in weights.items()}
    return TrainLoader(rows, collators[1], batch_rows, row_group, row_groups, fingerprint), MixedValidation(held_out)


def image_sizes(cfg: DataConfig, special: SpecialIds, vision: Mapping[str, Any] | None) -> VisionSettings | None:
    """The settings that determine how many tokens an image takes, or None if the documents may have no images.
    Conversations may have images if the model has a vision tower and the tokenizer an image token; otherwise a
    conversation with an image is a bad record.
    """
    kind = SOURCES[cfg.source]
    with_images = kind.images or (kind.conversations and special.image is not None)
    return VisionSettings.from_config(vision) if with_images and vision is not None else None


def refuse(problems: list[str]) -> None:
    """Raise ValueError that lists the problems, if there are any."""
    if problems:
        raise ValueError("\n".join(problems))


def argument_problems(
    cfg: DataConfig,
    tokenizer: Tokenizer,
    seq_len: int,
    batch_rows: int,
    row_group: int,
    row_groups: int,
    vision: Mapping[str, Any] | None,
) -> list[str]:
    """A list of all problems of the arguments of `build_loaders` except its settings `cfg`, one line per problem."""
    kind = SOURCES.get(cfg.source, SourceKind(""))
    missing = [token for token in REQUIRED_TOKENS if kind.conversations and tokenizer.token_to_id(token) is None]
    checks = [
        (seq_len >= 2, f"seq_len={seq_len}: must be at least 2, for a token and the target after it"),
        (
            cfg.window_tokens >= 4 * seq_len,
            f"data.window_tokens={cfg.window_tokens}: must be at least 4 * seq_len = {4 * seq_len}, because "
            "packing needs several rows to choose from",
        ),
        (
            batch_rows >= 1 and row_groups >= 1 and batch_rows % row_groups == 0,
            f"batch_rows={batch_rows}: is the number of rows over all row groups, so it must be a positive "
            f"multiple of row_groups={row_groups}",
        ),
        (0 <= row_group < row_groups, f"row_group={row_group}: must be in 0..{row_groups - 1}"),
        (
            not kind.images or vision is not None,
            f"data.source={cfg.source}: this source has images, but the model has no vision tower (vision_config); use "
            "a model with one, such as model=v41_100m, or init_from=runs/vision-base/export (from `make vision-demo`)",
        ),
        (
            not kind.images or special_ids(tokenizer).image is not None,
            f"data.source={cfg.source}: the tokenizer has no image token; use data.tokenizer=train or add an image "
            "token to it",
        ),
        (
            not missing,
            f"data.source={cfg.source}: the tokenizer has no {', '.join(missing)}; add these tokens to it or use "
            "another tokenizer",
        ),
        (
            not kind.pairs or special_ids(tokenizer).bos is not None,
            f"data.source={cfg.source}: the tokenizer has no token for the beginning of a text (BOS), which separates "
            "the two answers of a pair; add one to it or use another tokenizer",
        ),
    ]
    return [message for ok, message in checks if not ok]


def _readers(
    cfg: DataConfig, source: Source, source_id: str, encoder: Encoder, seed: int | None, lanes: int, seq_len: int
) -> MakeReader:
    """Returns a function that opens one share of a training source. All shares opened on a rank add to the same
    statistics; if the source is streamed, a single thread reads and tokenises all shares of the rank.

    lanes: number of shares that this rank has open at the same time. seq_len: number of tokens in a row.
    """
    if not cfg.streaming:
        store = tokenised(source, source_id, encoder, cfg.on_error, cfg.cache_path)
        if not len(store):
            raise _empty("training", "all documents are held out; lower", store)
        stats = Stats()
        stats.add_store(store)

        def stored(share: Share, sized: int) -> RowReader:
            tokens = window_tokens(cfg.window_tokens, share[1], sized)
            return RowReader(StoredWindows(store, seq_len, tokens, seed, share, stats))

        return stored
    thread, policy, counted = ThreadPoolExecutor(1, "data"), BadRecordPolicy(cfg.on_error), Stats()

    def streamed(share: Share, sized: int) -> RowReader:
        tokens = window_tokens(cfg.window_tokens, share[1], sized)
        part = source if share == WHOLE else cast(SharedSource, source).share(share)
        open_files = lanes <= OPEN_LANES
        return RowReader(
            StreamedWindows(part, encoder, policy, tokens, seed, share, counted, open_files, seq_len), thread
        )

    return streamed


def _identities(cfg: DataConfig, train: Source, held_out: Source) -> tuple[str, str]:
    """Returns the identity hashes of the training source and of the held-out source. The hash of a streamed held-out
    source is "", because only one process reads that source.
    """
    return train.identity(content=not cfg.streaming), "" if cfg.streaming else held_out.identity()


def _held_out(cfg: DataConfig, source: Source, source_id: str, encoder: Encoder, once: Once) -> PackingWindow:
    """The held-out rows: all rows of the held-out source, or only the first `validation_rows` rows if it is streamed.
    One process of the run packs the held-out rows; a streamed source is read and tokenised by this process too.
    """
    if cfg.streaming:
        tokens = cfg.validation_rows * encoder.seq_len
        window = once(
            lambda: StreamedWindows(source, encoder, BadRecordPolicy(cfg.on_error), tokens, None).load(0, 0, None)
        )
    else:
        store = tokenised(source, source_id, encoder, cfg.on_error, cfg.cache_path)
        rows = once(lambda: whole_split(store, encoder.seq_len).rows)
        window = PackingWindow(store, rows, None, np.arange(len(store)))
    if not len(window.rows):
        raise _empty("validation", "there are too few documents to hold one out; raise", window.store)
    return window


def _empty(split: str, otherwise: str, store: TokenStore) -> DataError:
    """The error for a split without documents. The message lists the skipped records; if no record was skipped, the
    message says how to change the settings and begins with the text `otherwise`.
    """
    skipped = ", ".join(f"skipped {number} x {reason}" for reason, number in sorted(store.skipped.items()))
    detail = skipped or f"{otherwise} data.validation_share, or name held-out files in data.validation_paths"
    return DataError(f"{split} split", 0, "no documents", detail)
