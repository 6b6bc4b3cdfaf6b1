"""The data settings of a run: one dataclass, every problem reported at once; needs only the standard library."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

MIN_VOCAB_SIZE = 512  # 256 bytes, the special tokens and room for merges


@dataclass(frozen=True)
class SourceKind:
    """What there is to know about a kind of source before it is opened.

    Attributes:
        opener: "module:function" that opens it (see `data/open.py`). A name, so that settings are read without the
            libraries that readers need.
        paths: what `data.paths` holds: "files" (files, folders or patterns), "dataset" (one id or folder) or "nothing".
        suffixes: the files that a folder contributes.
        streams: it can be tokenised while training (`data.streaming`).
        images: its documents have images, so the model must have a vision tower.
        conversations: its documents say which of their parts are supervised; they may have images if the model takes
            any.
        tokenizer_source: the kind of source whose text a tokenizer is trained on, where this one has too little.
    """

    opener: str
    paths: str = "files"
    suffixes: tuple[str, ...] = ()
    streams: bool = False
    images: bool = False
    conversations: bool = False
    tokenizer_source: str | None = None


JSONL = (".jsonl", ".ndjson")
SOURCES = {
    "stdlib": SourceKind("data.open:open_stdlib", paths="nothing"),
    "text": SourceKind("data.open:open_text", suffixes=(".txt", ".md", ".rst", ".py"), streams=True),
    "jsonl": SourceKind("data.open:open_jsonl", suffixes=JSONL, streams=True),
    "parquet": SourceKind("data.open:open_parquet", suffixes=(".parquet",), streams=True),
    "hub": SourceKind("data.open:open_hub", paths="dataset", streams=True),
    "image_text": SourceKind("data.open:open_image_text", suffixes=JSONL, images=True),
    "chat": SourceKind("data.open:open_chat", suffixes=JSONL, conversations=True),
    "digits": SourceKind("data.open:open_digits", paths="nothing", images=True, tokenizer_source="stdlib"),
}


@dataclass
class DataConfig:
    """Where documents come from, how they become tokens, and how they are packed.

    Attributes:
        source: `stdlib` (the .py files of the running Python's standard library), `text` (one document a file),
            `jsonl`, `parquet`, `hub` (a dataset id or local dataset folder, read with `datasets`), `image_text` (JSONL
            records whose `field` is a list of text and image parts), `chat` (JSONL conversations, see `data/chat`; a
            conversation is never cut) or `digits` (scikit-learn's, with their names).
        paths: files, folders (hidden files inside them are left out) or glob patterns; for `hub` one id or folder;
            empty for `stdlib` and `digits`.
        validation_paths: held-out files, which are not trained on if `paths` names them too; when empty, a stable hash
            holds out `validation_share`: whole files for `stdlib` and `text`, single records (by content, so that
            copies stay on one side) for the others.
        field: the column that holds the text (`image_text`: the list of parts; `chat`: the messages).
        hub_name, hub_revision, hub_split, hub_validation_split: passed to `datasets.load_dataset`.
        streaming: tokenise while training instead of once into the cache; needs `validation_rows`.
        on_error: `stop` raises `DataError` at the first bad record, `skip` counts it by reason and goes on.
        tokenizer: `train` (byte-level BPE on the train split) or the path of a tokenizer.json or of its folder.
        vocab_size: entries of a trained tokenizer, special tokens included.
        cache_dir: where trained tokenizers and tokenised documents are kept.
        shuffle: shuffle documents and rows by seed and epoch.
        window_tokens: look-ahead of the packer in tokens; for streaming sources also the reach of the shuffle.
        validation_rows: at most so many packed rows are evaluated; 0 means all.
    """

    source: str = "stdlib"
    paths: list[str] = dataclasses.field(default_factory=list)
    validation_paths: list[str] = dataclasses.field(default_factory=list)
    validation_share: float = 0.05
    field: str = "text"
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

    @property
    def cache_path(self) -> Path:
        return Path(self.cache_dir).expanduser()

    def problems(self) -> list[str]:
        """Everything wrong with these settings, one line each: key, value, rule, remedy. Touches no files."""
        checks = [
            (self.source in SOURCES, "source", self.source, f"must be one of {', '.join(SOURCES)}"),
            (self.on_error in ("stop", "skip"), "on_error", self.on_error, "must be stop or skip"),
            (
                0.0 < self.validation_share < 1.0,
                "validation_share",
                self.validation_share,
                "must lie between 0 and 1; to name held-out files use validation_paths",
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
            (self.field != "", "field", self.field, "must name the column that holds the text"),
        ]
        return [f"data.{key}={value!r}: {rule}" for ok, key, value, rule in checks + self._source_checks() if not ok]

    def _source_checks(self) -> list[tuple[bool, str, object, str]]:
        """What the kind of source asks of the other settings: (holds, key, value, rule)."""
        if self.source not in SOURCES:
            return []
        kind = SOURCES[self.source]
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
            rule = f"must be false: only {', '.join(names)} and {last} can be read while training"
            checks.append((kind.streams, "streaming", True, rule))
            rule = "must be positive with streaming=true, so that validation reads only the head of the stream"
            checks.append((self.validation_rows > 0, "validation_rows", self.validation_rows, rule))
        return checks
