"""Configuration to sources: where each kind of `data.source` lies, and what of it is held out.

One function a kind, `(DataConfig) -> (train source, validation source)`; the table `SOURCES` of `data/config.py` names
it. To add a kind: a reader (`data/sources.py` has those of files), a function here, a row of that table.
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

Sources = tuple[Source, Source]  # train, validation


def open_sources(cfg: DataConfig) -> Sources:
    """The train and validation sources of a configuration.

    Raises `DataError` for a path that matches nothing, a data set that cannot be opened or a split without files.
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
    """Files to train on and files held out, the latter empty where none are named; no file is both."""
    suffixes = SOURCES[cfg.source].suffixes
    files = find_files(cfg.paths, suffixes)
    held_out = find_files(cfg.validation_paths, suffixes)
    kept_back = {file.path.resolve() for file in held_out}
    files = [file for file in files if file.path.resolve() not in kept_back]
    if not files:
        raise DataError(cfg.paths[0], 0, "no training data", "data.validation_paths names every file of data.paths")
    return files, held_out


def _open_records(cfg: DataConfig, reader: type[JsonLines | Parquet]) -> Sources:
    files, held_out = _files(cfg)
    source = reader(files, cfg.field)
    return (source, reader(held_out, cfg.field)) if held_out else _split_records(source, cfg.validation_share)


def _split_files(files: list[File], share: float) -> Sources:
    """Split whole files by a hash of their names, so that a file keeps its side whatever its neighbours."""
    held_out = [file for file in files if hash_share(file.name.encode()) < share]
    kept = [file for file in files if hash_share(file.name.encode()) >= share]
    for split, part in (("train", kept), ("validation", held_out)):
        if not part:
            detail = f"{len(files)} files at validation_share {share} leave none; raise it or set data.validation_paths"
            raise DataError(str(files[0].path.parent), 0, f"no {split} files", detail)
    return TextFiles(kept), TextFiles(held_out)


def _split_records(source: Source, share: float) -> Sources:
    return HashSplit(source, share, False), HashSplit(source, share, True)


def _load_dataset(cfg: DataConfig, split: str) -> HubDataset:
    import datasets  # slow to import, and only this source needs it

    name = cfg.paths[0]
    try:
        if (Path(name) / "dataset_info.json").exists() or (Path(name) / "dataset_dict.json").exists():
            dataset: Any = datasets.load_from_disk(name)
            dataset = dataset[split] if isinstance(dataset, dict) else dataset
            dataset = dataset.to_iterable_dataset() if cfg.streaming else dataset
        else:
            options = {"revision": cfg.hub_revision, "split": split, "streaming": cfg.streaming}
            dataset = datasets.load_dataset(name, cfg.hub_name, **options)
    except Exception as error:  # the library raises dozens of kinds, from network to parsing
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(name, 0, "cannot open data set", f"split {split}: {reason}") from error
    columns = dataset.column_names
    if columns is not None and cfg.field not in columns:
        raise DataError(name, 0, "wrong field", missing_field(cfg.field, columns))
    return HubDataset(dataset, f"{name}[{split}]", cfg.field, cfg.streaming)
