"""Opens the data sources of a configuration: one for training and one that is held out.

For each kind of source, the table `SOURCES` of `data/config.py` names a function of this file that takes a `DataConfig`
and returns (training source, validation source). To add a kind of source, write a reader (see `data/sources.py`), a
function here, and a row in that table.
"""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path
from typing import Any

from data.chat.source import ChatDataset, ChatLines, PairDataset, PairLines
from data.config import SOURCES, DataConfig
from data.digits import DigitSource
from data.document import Source, hash_share
from data.errors import DataError, NetworkError
from data.files import File, find_files, stdlib_files, suffix_of
from data.network import retried
from data.records import RECORD_SUFFIXES
from data.sources import FileSource, HashSplit, HubDataset, ImageTextLines, JsonLines, Parquet, RecordFiles, TextFiles

Sources = tuple[Source, Source]  # training, validation
# Every folder that `datasets` has saved has one of these files
SAVED_DATASET = ("dataset_info.json", "dataset_dict.json")


def open_sources(cfg: DataConfig) -> Sources:
    """Open the training source and the validation source of a configuration.

    Raises `DataError` for a path without files, for a data set that cannot be opened, and if no data are left to train
    on or to hold out.
    """
    opened: Sources = pkgutil.resolve_name(SOURCES[cfg.source].opener)(cfg)
    for source in opened:
        files = source.source if isinstance(source, HashSplit) else source
        if isinstance(files, FileSource):
            files.hash_cache = cfg.cache_path
    return opened


def open_stdlib(cfg: DataConfig) -> Sources:
    return _split_files(stdlib_files(), cfg.validation_share)


def open_text(cfg: DataConfig) -> Sources:
    files, held_out = _files(cfg)
    return (TextFiles(files), TextFiles(held_out)) if held_out else _split_files(files, cfg.validation_share)


def open_jsonl(cfg: DataConfig) -> Sources:
    return _open_records(cfg, JsonLines)


def open_image_text(cfg: DataConfig) -> Sources:
    return _open_records(cfg, ImageTextLines)


def open_image_folder(cfg: DataConfig) -> Sources:
    from data.image_folder import ImageFiles

    files, held_out = _files(cfg)
    return (
        (ImageFiles(files), ImageFiles(held_out))
        if held_out
        else _split_records(ImageFiles(files), cfg.validation_share)
    )


def open_chat(cfg: DataConfig) -> Sources:
    return _open_conversations(cfg, ChatLines, ChatDataset)


def open_preference(cfg: DataConfig) -> Sources:
    return _open_conversations(cfg, PairLines, PairDataset)


def _open_conversations(cfg: DataConfig, lines: type[RecordFiles], dataset: type[HubDataset]) -> Sources:
    if len(cfg.paths) == 1 and is_dataset(cfg.paths[0]):
        return _open_dataset(cfg, dataset)
    return _open_records(cfg, lines)


def open_parquet(cfg: DataConfig) -> Sources:
    return _open_records(cfg, Parquet)


def open_digits(cfg: DataConfig) -> Sources:
    return DigitSource("train", cfg.validation_share), DigitSource("validation", cfg.validation_share)


def open_hub(cfg: DataConfig) -> Sources:
    return _open_dataset(cfg, HubDataset)


def is_dataset(name: str) -> bool:
    """Whether a path is a folder that `datasets` has saved, or the id `user/name` of a data set on the hub."""
    path = Path(name).expanduser()
    if path.exists():
        return any((path / file).is_file() for file in SAVED_DATASET)
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and suffix_of(path) not in RECORD_SUFFIXES


def _open_dataset(cfg: DataConfig, reader: type[HubDataset]) -> Sources:
    source = _load_dataset(cfg, cfg.hub_split, reader)
    if cfg.hub_validation_split:
        return source, _load_dataset(cfg, cfg.hub_validation_split, reader)
    return _split_records(source, cfg.validation_share)


def _files(cfg: DataConfig) -> tuple[list[File], list[File]]:
    """The training files and the held-out files. The list of held-out files is empty if none are configured. No file is
    in both lists.
    """
    suffixes = SOURCES[cfg.source].suffixes
    files = find_files(cfg.paths, suffixes)
    held_out = find_files(cfg.validation_paths, suffixes)
    kept_back = {file.path.resolve() for file in held_out}
    files = [file for file in files if file.path.resolve() not in kept_back]
    if not files:
        raise DataError(cfg.paths[0], 0, "no training data", "data.validation_paths includes every file of data.paths")
    return files, held_out


def _open_records(cfg: DataConfig, reader: type[RecordFiles]) -> Sources:
    files, held_out = _files(cfg)
    source = reader(files, cfg.field, cfg.format)
    return (
        (source, reader(held_out, cfg.field, cfg.format)) if held_out else _split_records(source, cfg.validation_share)
    )


def _split_files(files: list[File], share: float) -> Sources:
    """Split whole files into training and held-out files by a hash of their names, so that the split of one file does
    not depend on the other files.
    """
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


def _load_dataset(cfg: DataConfig, split: str, reader: type[HubDataset]) -> HubDataset:
    import datasets  # slow to import

    name = cfg.paths[0]
    try:
        saved = Path(name).expanduser()
        if any((saved / file).is_file() for file in SAVED_DATASET):
            dataset: Any = datasets.load_from_disk(str(saved))
            dataset = dataset[split] if isinstance(dataset, dict) else dataset
            dataset = dataset.to_iterable_dataset() if cfg.streaming else dataset
        else:
            options = {"revision": cfg.hub_revision, "split": split, "streaming": cfg.streaming}
            dataset = retried(lambda: datasets.load_dataset(name, cfg.hub_name, **options), name)
    except NetworkError:
        raise
    except Exception as error:  # network errors, parsing errors and others
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(name, 0, "cannot open data set", f"split {split}: {reason}") from error
    source = reader(_undecoded(dataset), f"{name}[{split}]", cfg.field, cfg.streaming, cfg.format)
    if dataset.column_names is not None:
        source.columns(name, dataset.column_names)
    return source


def _undecoded(dataset: Any) -> Any:
    """A copy of the data set that returns images as their stored bytes; `data/images.py` then decodes them as an image
    viewer does.
    """
    from datasets import Image, List

    for name, feature in (dataset.features or {}).items():
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
        elif isinstance(feature, List) and isinstance(feature.feature, Image):
            dataset = dataset.cast_column(name, List(Image(decode=False)))
    return dataset
