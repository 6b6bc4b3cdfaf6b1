"""The settings `data.*` and the kinds of data source. This file imports only the standard library."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIN_VOCAB_SIZE = 512  # tokens: one for each of 256 byte values, the special tokens, and room for merges


@dataclass(frozen=True)
class SourceKind:
    """The properties of one kind of data source, which are known before a source is opened.

    Attributes:
        opener: the function in `data/open.py` that opens the source, as "module:function". The function is given by
            name because importing it loads libraries that the settings do not need.
        paths: what `data.paths` must contain: "files" (files, folders or glob patterns), "dataset" (one dataset id or
            folder) or "nothing".
        suffixes: the suffixes of the files that are read in a folder.
        streams: whether the source can be tokenised during training (`data.streaming`).
        images: whether the documents always have images, in which case the model needs a vision tower.
        conversations: whether the documents are conversations, which mark the supervised parts. Conversations may
            contain images if the model has a vision tower.
        pairs: whether a document holds two answers to one prompt, the preferred one first (`data/chat/source.py`).
        tokenizer_source: the kind of source on which the tokenizer is trained, for a source that has too little text
            itself.
    """

    opener: str
    paths: str = "files"
    suffixes: tuple[str, ...] = ()
    streams: bool = False
    images: bool = False
    conversations: bool = False
    pairs: bool = False
    tokenizer_source: str | None = None


JSONL = (".jsonl", ".ndjson", ".json")
TABLES = (".parquet", ".arrow")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp")
TEXT_FORMATS = ("text", "tokens")
CHAT_FORMATS = ("messages", "sharegpt", "alpaca", "prompt_completion", "preference", "tokens")
SOURCES = {  # by the name that `data.source` has; to add one, see data/open.py
    "stdlib": SourceKind("data.open:open_stdlib", paths="nothing"),
    "text": SourceKind("data.open:open_text", suffixes=(".txt", ".md", ".rst", ".py"), streams=True),
    "jsonl": SourceKind("data.open:open_jsonl", suffixes=JSONL, streams=True),
    "parquet": SourceKind("data.open:open_parquet", suffixes=TABLES, streams=True),
    "hub": SourceKind("data.open:open_hub", paths="dataset", streams=True),
    "image_text": SourceKind("data.open:open_image_text", suffixes=JSONL + TABLES, streams=True, images=True),
    "image_folder": SourceKind("data.open:open_image_folder", suffixes=IMAGES, streams=True, images=True),
    "chat": SourceKind("data.open:open_chat", suffixes=JSONL + TABLES, streams=True, conversations=True),
    "preference": SourceKind(
        "data.open:open_preference", suffixes=JSONL + TABLES, streams=True, conversations=True, pairs=True
    ),
    "digits": SourceKind("data.open:open_digits", paths="nothing", images=True, tokenizer_source="stdlib"),
}


# The settings that are the same for all sources of a mixture.
SHARED = ("mixture", "tokenizer", "vocab_size", "cache_dir", "on_error", "shuffle", "answers")


@dataclass
class DataConfig:
    """The settings of the training data: the source of documents, the tokenizer, and packing.

    Attributes:
        source: `stdlib` (the .py files of the running Python's standard library), `text` (one document per file),
            `jsonl` (JSON lines, or a JSON list), `parquet` (Parquet or Arrow), `hub` (a dataset id or local dataset
            folder, read with `datasets`), `image_text` (records whose `field` is a list of text and image parts),
            `image_folder` (images, each with its caption in a .txt file of the same name),
            `chat` (conversations in files of records or a data set, see `data/chat`; a conversation is never cut),
            `preference` (pairs of a chosen and a rejected answer, read like `chat`; for task=dpo) or `digits`
            (scikit-learn's images of digits, with their names).
        paths: files, folders (without their hidden files) or glob patterns, where files may be compressed (.gz, .zst,
            .bz2, .xz); for `hub`, and for `chat` with a data set, one dataset id or folder; empty for `stdlib` and
            `digits`.
        format: the format of records: `auto` (recognised by the keys of each record), `text` or `tokens`; with source
            `chat` it is `auto`, `messages`, `sharegpt`, `alpaca`, `prompt_completion`, `preference` or `tokens`
            (`data/chat/formats.py`).
        validation_paths: held-out files, which are not trained on even if `paths` includes them. If empty, a stable
            hash holds out the fraction `validation_share` of the data: whole files for `stdlib` and `text`, single
            records for other sources (by content, so that copies of a record are on the same side).
        field: the column or key with the text (for `image_text` the list of parts, for `chat` the messages).
        hub_name, hub_revision, hub_split, hub_validation_split: passed to `datasets.load_dataset`.
        streaming: whether to tokenise during training instead of once into the cache; requires `validation_rows`.
        on_error: `stop` ends the run at the first bad record; `skip` leaves bad records out and counts them by reason.
        tokenizer: `train` (train a byte-level BPE on the training split), or the path of a tokenizer.json or of a
            folder that has one.
        vocab_size: vocabulary size of a trained tokenizer, including special tokens.
        cache_dir: folder in which trained tokenizers and tokenised documents are cached.
        shuffle: whether to shuffle documents and packed rows; the order depends on the seed and the epoch.
        window_tokens: size of a packing window in tokens: documents with this many tokens are packed together, and
            their rows are shuffled. With `streaming`, the rows of a step are read independently of each other, and
            their packing windows together have this size (but each has at least 16 rows).
        mixture: several sources instead of one: maps the name of each source to its `weight` and to those settings of
            `data` that differ for it. The weights are relative: with 7 and 1, seven of eight tokens come from the first
            source.
        validation_rows: maximum number of held-out packed rows to evaluate; 0 means all.
        answers: which answers of a conversation to train on: `given`, those in the data, or `own` (`task=dspark`),
            answers that the drafter's backbone generates once, into `cache_dir`.
    """

    source: str = "stdlib"
    paths: list[str] = dataclasses.field(default_factory=list)
    validation_paths: list[str] = dataclasses.field(default_factory=list)
    validation_share: float = 0.05
    field: str = "text"
    format: str = "auto"
    hub_name: str | None = None
    hub_revision: str | None = None
    hub_split: str = "train"
    hub_validation_split: str | None = None
    streaming: bool = False
    on_error: str = "stop"
    tokenizer: str = "train"
    vocab_size: int = 4096
    cache_dir: str = ".cache/data"
    shuffle: bool = True
    window_tokens: int = 4_194_304
    validation_rows: int = 0
    answers: str = "given"
    mixture: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def parts(self) -> dict[str, DataConfig]:
        """The settings of each source of the mixture, by its name; if there is no mixture, the settings of the only
        source, under the name "".
        """
        if not self.mixture:
            return {"": self}
        own = {
            name: {key: value for key, value in given.items() if key != "weight"}
            for name, given in self.mixture.items()
        }
        return {name: dataclasses.replace(self, mixture={}, **given) for name, given in own.items()}

    def weights(self) -> dict[str, float]:
        """The weight of each source of the mixture, by its name."""
        return {name: float(given["weight"]) for name, given in self.mixture.items()}

    @property
    def cache_path(self) -> Path:
        return Path(self.cache_dir).expanduser()

    def problems(self) -> list[str]:
        """A list of all problems of the settings, one line per problem with key, value, rule and remedy. No files are
        read.
        """
        if self.mixture:
            if self.answers != "given":
                return [f"data.answers={self.answers!r}: must be given with data.mixture; use one source"]
            return [text for name, given in self.mixture.items() for text in self._mixture_problems(name, given)]
        kind = SOURCES.get(self.source, SourceKind(""))
        formats = ("auto", *_formats(kind))
        checks = [
            (self.source in SOURCES, "source", self.source, f"must be one of {', '.join(SOURCES)}"),
            (self.on_error in ("stop", "skip"), "on_error", self.on_error, "must be stop or skip"),
            (
                0.0 < self.validation_share < 1.0,
                "validation_share",
                self.validation_share,
                "must be between 0 and 1; to name held-out files use validation_paths",
            ),
            (
                self.tokenizer != "train" or self.vocab_size >= MIN_VOCAB_SIZE,
                "vocab_size",
                self.vocab_size,
                f"must be at least {MIN_VOCAB_SIZE} (256 bytes, the special tokens, merges)",
            ),
            (self.tokenizer != "", "tokenizer", self.tokenizer, "must be `train` or the path of a tokenizer.json"),
            (self.window_tokens > 0, "window_tokens", self.window_tokens, "must be positive"),
            (self.validation_rows >= 0, "validation_rows", self.validation_rows, "must be 0 (all) or positive"),
            (self.format in formats, "format", self.format, f"must be one of {', '.join(formats)}"),
            (self.field != "", "field", self.field, "must name the column that holds the text"),
            (self.answers in ("given", "own"), "answers", self.answers, "must be given or own"),
            (
                self.answers != "own" or (kind.conversations and not self.streaming),
                "answers",
                self.answers,
                "needs conversations that are not streamed: source=chat, streaming=false",
            ),
        ]
        return [f"data.{key}={value!r}: {rule}" for ok, key, value, rule in checks + self._source_checks() if not ok]

    def _mixture_problems(self, name: str, given: Any) -> Iterator[str]:
        """The problems of the settings of one source of the mixture."""
        where = f"data.mixture.{name}"
        if not isinstance(given, dict) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            yield f"{where}={given!r}: must be a name of letters, digits, - and _, with a mapping (weight, paths)"
            return
        weight = given.get("weight")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            yield f"{where}.weight={weight!r}: must be a positive number, its share of the tokens"
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for key in SHARED:
            own.pop(key)
        wrong = False
        for key, value in given.items():
            if key == "weight":
                continue
            if key not in own:
                wrong = True
                yield f"{where}.{key}={value!r}: no such key of one source; known are weight, {', '.join(own)}"
            elif (
                own[key] is not None
                and type(value) is not type(own[key])
                and not (isinstance(own[key], float) and type(value) is int)
            ):
                wrong = True
                yield f"{where}.{key}={value!r}: must be a {type(own[key]).__name__}"
        if not wrong:
            part = self.parts()[name]
            yield from (text.replace("data.", f"{where}.", 1) for text in part.problems())

    def _source_checks(self) -> list[tuple[bool, str, object, str]]:
        """The rules that the kind of source sets for other settings, as (whether the rule holds, key, value, rule)."""
        if self.source not in SOURCES:
            return []
        kind = SOURCES[self.source]
        checks: list[tuple[bool, str, object, str]]
        if kind.paths == "nothing":
            rule = f"must be empty: source={self.source} brings its own data"
            checks = [
                (not self.paths, "paths", self.paths, rule),
                (not self.validation_paths, "validation_paths", self.validation_paths, rule),
            ]
        elif kind.paths == "dataset":
            rule = f"must be empty for source={self.source}; name a split with hub_validation_split"
            checks = [
                (len(self.paths) == 1, "paths", self.paths, "must hold one hub id or dataset folder"),
                (not self.validation_paths, "validation_paths", self.validation_paths, rule),
            ]
        else:
            rule = f"must name at least one file, folder or pattern for source={self.source}"
            checks = [(bool(self.paths), "paths", self.paths, rule)]
        if self.streaming:
            *names, last = (name for name, kind in SOURCES.items() if kind.streams)
            rule = f"must be false: only {', '.join(names)} and {last} can be streamed"
            checks.append((kind.streams, "streaming", True, rule))
            rule = "must be positive with streaming=true: validation reads only so many rows of the stream"
            checks.append((self.validation_rows > 0, "validation_rows", self.validation_rows, rule))
        return checks


def _formats(kind: SourceKind) -> tuple[str, ...]:
    """The values of `data.format` that a kind of source supports besides `auto`."""
    if kind.pairs:
        return ("preference",)
    if kind.conversations:
        return CHAT_FORMATS
    return TEXT_FORMATS if kind.suffixes or kind.streams else ()
