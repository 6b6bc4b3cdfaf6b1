"""The data settings of a run: one dataclass, every problem reported at once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

SOURCES = ("stdlib", "text", "jsonl", "parquet", "hub", "image_text", "chat", "digits")
BUILT_IN = ("stdlib", "digits")  # bring their own data, so they take no paths
MIN_VOCAB_SIZE = 512  # 256 bytes, the special tokens and room for merges


@dataclass
class DataConfig:
    """Where documents come from, how they become tokens, and how they are packed.

    Attributes:
        source: `stdlib` (the .py files of the running Python's standard library), `text` (one document a file),
            `jsonl`, `parquet`, `hub` (a dataset id or local dataset folder, read with `datasets`), `image_text` (JSONL
            records whose `field` is a list of text and image parts), `chat` (JSONL conversations, see `chat.py`; a
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
        if self.source in BUILT_IN:
            rule = f"must be empty: source={self.source} brings its own data"
            checks.append((not self.paths, "paths", self.paths, rule))
            checks.append((not self.validation_paths, "validation_paths", self.validation_paths, rule))
        elif self.source == "hub":
            checks.append((len(self.paths) == 1, "paths", self.paths, "must hold one hub id or dataset folder"))
            rule = "must be empty for source=hub; name a split with hub_validation_split"
            checks.append((not self.validation_paths, "validation_paths", self.validation_paths, rule))
        elif self.source in SOURCES:
            rule = f"must name at least one file, folder or pattern for source={self.source}"
            checks.append((bool(self.paths), "paths", self.paths, rule))
        if self.streaming:
            rule = "must be false: only text, jsonl, parquet and hub can be read while training"
            checks.append((self.source in ("text", "jsonl", "parquet", "hub"), "streaming", True, rule))
            rule = "must be positive with streaming=true, so that validation reads only the head of the stream"
            checks.append((self.validation_rows > 0, "validation_rows", self.validation_rows, rule))
        return [f"data.{key}={value!r}: {rule}" for ok, key, value, rule in checks if not ok]
