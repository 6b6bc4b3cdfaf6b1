"""Opening the sources of a configuration: one to train on and one that is held out.

There is one function per kind of source, `(DataConfig) -> (training source, validation source)`, named in the table
`SOURCES` of `data/config.py`. To add a kind, write a reader (see `data/sources.py`), a function here, and a row of that
table.
"""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any

from data.chat.source import ChatLines
from data.config import SOURCES, DataConfig
from data.digits import DigitSource
from data.document import Source, hash_share, missing_field
from data.errors import DataError
from data.files import File, find_files, stdlib_files
from data.sources import HashSplit, HubDataset, ImageTextLines, JsonLines, Parquet, TextFiles

Sources = tuple[Source, Source]  # training, validation


def open_sources(cfg: DataConfig) -> Sources:
    """The training and the validation source of a configuration.

    Raises `DataError` for a path without files, a data set that cannot be opened, or a split with an empty side.
    """
    return pkgutil.resolve_name(SOURCES[cfg.source].opener)(cfg)


def open_stdlib(cfg: DataConfig) -> Sources:
    return _split_files(stdlib_files(), cfg.validation_share)


def open_text(cfg: DataConfig) -> Sources:
    files, held_out = _files(cfg)
    return (TextFiles(files), TextFiles(held_out)) if held_out else _split_files(files, cfg.validation_share)


def open_jsonl(cfg: DataConfig) -> Sources:
    return _open_records(cfg, JsonLines)


def open_image_text(cfg: DataConfig) -> Sources:
    return _open_records(cfg, ImageTextLines)


def open_chat(cfg: DataConfig) -> Sources:
    return _open_records(cfg, ChatLines)


def open_parquet(cfg: DataConfig) -> Sources:
    return _open_records(cfg, Parquet)


def open_digits(cfg: DataConfig) -> Sources:
    return DigitSource("train", cfg.validation_share), DigitSource("validation", cfg.validation_share)


def open_hub(cfg: DataConfig) -> Sources:
    source = _load_dataset(cfg, cfg.hub_split)
    if cfg.hub_validation_split:
        return source, _load_dataset(cfg, cfg.hub_validation_split)
    return _split_records(source, cfg.validation_share)


def _files(cfg: DataConfig) -> tuple[list[File], list[File]]:
    """The files to train on and the held-out files. The latter are empty if none are configured. No file is in both."""
    suffixes = SOURCES[cfg.source].suffixes
    files = find_files(cfg.paths, suffixes)
    held_out = find_files(cfg.validation_paths, suffixes)
    kept_back = {file.path.resolve() for file in held_out}
    files = [file for file in files if file.path.resolve() not in kept_back]
    if not files:
        raise DataError(cfg.paths[0], 0, "no training data", "data.validation_paths includes every file of data.paths")
    return files, held_out


def _open_records(cfg: DataConfig, reader: type[JsonLines | Parquet]) -> Sources:
    files, held_out = _files(cfg)
    source = reader(files, cfg.field)
    return (source, reader(held_out, cfg.field)) if held_out else _split_records(source, cfg.validation_share)


def _split_files(files: list[File], share: float) -> Sources:
    """Split whole files by a hash of their names, so that a file's side does not depend on the other files."""
    held_out = [file for file in files if hash_share(file.name.encode()) < share]
    kept = [file for file in files if hash_share(file.name.encode()) >= share]
    for split, part in (("training", kept), ("validation", held_out)):
        if not part:
            detail = (
                f"none of {len(files)} files at data.validation_share={share}; change it or set data.validation_paths"
            )
            raise DataError(str(files[0].path.parent), 0, f"no {split} files", detail)
    return TextFiles(kept), TextFiles(held_out)


def _split_records(source: Source, share: float) -> Sources:
    return HashSplit(source, share, False), HashSplit(source, share, True)


def _load_dataset(cfg: DataConfig, split: str) -> HubDataset:
    import datasets  # slow to import

    name = cfg.paths[0]
    try:
        if (Path(name) / "dataset_info.json").exists() or (Path(name) / "dataset_dict.json").exists():
            dataset: Any = datasets.load_from_disk(name)
            dataset = dataset[split] if isinstance(dataset, dict) else dataset
            dataset = dataset.to_iterable_dataset() if cfg.streaming else dataset
        else:
            options = {"revision": cfg.hub_revision, "split": split, "streaming": cfg.streaming}
            dataset = datasets.load_dataset(name, cfg.hub_name, **options)
    except Exception as error:  # from network errors to parsing errors
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(name, 0, "cannot open data set", f"split {split}: {reason}") from error
    columns = dataset.column_names
    if columns is not None and cfg.field not in columns:
        raise DataError(name, 0, "wrong field", missing_field(cfg.field, columns))
    return HubDataset(dataset, f"{name}[{split}]", cfg.field, cfg.streaming)
