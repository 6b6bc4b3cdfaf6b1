"""Sources that read documents from files and from data sets of the `datasets` library."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from data.document import (
    WHOLE,
    Document,
    Picture,
    Position,
    Reading,
    Share,
    SharedSource,
    Source,
    Tokens,
    encodable,
    hash_share,
    kind_of,
    missing_field,
    text_of,
    value_of,
)
from data.errors import BadRecordPolicy, DataError
from data.files import UNPACKING_ERRORS, File, deal_files, decode, files_hash, open_unpacked
from data.network import Tries, passes
from data.records import Item, part_of, read_records, without_nulls

TOKEN_KEYS = ("input_ids", "labels", "attention_mask", "loss_mask", "completion_mask", "assistant_masks")


class FileSource:
    """The base class of sources that read files. The names of the subclasses are part of saved positions (see
    `identity`), so they must not change.
    """

    field = ""
    divisible = True  # whether several shares can have parts of one file

    def __init__(self, files: list[File]):
        self.files = files
        self.own = WHOLE  # the share of the files that is read
        self.hash_cache: Path | None = None  # a folder that keeps the hash of the files' contents

    def share(self, share: Share) -> Self:
        """Returns a source of one share of the documents; see `deal_files`. The `identity` of a share is the same as
        that of the whole source.
        """
        other = copy.copy(self)
        other.own = share
        return other

    def _dealt(self) -> dict[int, Share]:
        """Map the index of each file that belongs to this share to the part of the file that belongs to it."""
        if self.own == WHOLE:
            return dict.fromkeys(range(len(self.files)), WHOLE)
        return deal_files([file.num_bytes for file in self.files], self.own, self.divisible)

    def identity(self, content: bool = True) -> str:
        """Returns a hash of the name of the source's class, of the field, and of the name and content of each file.
        With `content=False`, the size of a file replaces its content.
        """
        return files_hash(self.files, f"{type(self).__name__} {self.field}", content, self.hash_cache)


class TextFiles(FileSource):
    """A source that makes one document of each text file. A position is the number of the file after the last one that
    has been read.
    """

    divisible = False

    def read(self, policy: BadRecordPolicy, position: Position = None) -> Reading:
        for index in (index for index in self._dealt() if index >= (position or 0)):
            path = self.files[index].path
            try:
                with open_unpacked(path) as file:
                    text = decode(file.read(), str(path), policy)
                if not text.strip():
                    raise DataError(str(path), 0, "empty file")
            except UNPACKING_ERRORS as error:
                detail = getattr(error, "strerror", None) or str(error)
                policy.report(DataError(str(path), 0, "unreadable file", detail))
            except DataError as error:
                policy.report(error)
            else:
                yield Document((text,), str(path), 0), partial(int, index + 1)


class _Records:
    """The base class of sources that read records. Unless a subclass overrides `documents`, each record becomes one
    document, which consists of the text of one field.

    format: one of the values of `data.format`; with "auto" each record's format is recognised by its keys.
    """

    formats: tuple[str, ...] = ("text", "tokens")
    several = False  # whether a record can become several documents

    def __init__(self, field: str, format: str = "auto"):
        self.field, self.format = field, format

    def columns(self, name: str, names: Sequence[str]) -> Sequence[str]:
        """Returns the columns to read from the table `name`, which has the columns `names`. Raises `DataError` if there
        is no column to read.
        """
        if self.field in names and self.format != "tokens":
            return [self.field]
        if "input_ids" in names and self.format != "text":
            return [column for column in TOKEN_KEYS if column in names]
        raise DataError(name, 0, "wrong field", missing_field(self.field, names))

    def documents(self, record: Any, file: str, line: int, policy: BadRecordPolicy) -> Sequence[Document]:
        """Returns the documents of one record. Raises `DataError` with file and line if the record is invalid."""
        if self.format == "tokens" or (
            self.format == "auto" and isinstance(record, dict) and self.field not in record and "input_ids" in record
        ):
            policy.formats["tokens"] += 1
            return (pretokenised(record, file, line),)
        return (Document((text_of(record, self.field, file, line),), file, line),)

    def _within(
        self,
        items: Iterable[tuple[Any, int, Position, Callable[[], Position]]],
        file: str,
        policy: BadRecordPolicy,
        done: int,
    ) -> Reading:
        """Yield the documents of the records in `items`. An item is a tuple (record, line of the record, position
        before the record, function that returns the position after the record).

        A record may hold several documents. After some of them, the position for resuming is [position before the
        record, number of its documents already used]. done: number of documents of the first record to skip, because
        they were used before.
        """
        for record, line, before, after in items:
            try:
                if isinstance(record, DataError):
                    raise record
                documents = self.documents(record, file, line, policy)
            except DataError as error:
                policy.report(error)
            else:
                for number in range(done, len(documents)):
                    last = number + 1 == len(documents)
                    yield documents[number], after if last else partial(list, (before, number + 1))
            done = 0


class RecordFiles(FileSource, _Records):
    """A source that reads files of records (see `data/records.py`). A position between two records is [index of the
    file, *position inside the file]. Between two documents of the same record, a position is [position before the
    record, number of documents of the record already used].
    """

    def __init__(self, files: list[File], field: str, format: str = "auto"):
        FileSource.__init__(self, files)
        _Records.__init__(self, field, format)

    def identity(self, content: bool = True) -> str:
        known = super().identity(content)
        return known if self.format == "auto" else f"{known} {self.format}"

    def read(self, policy: BadRecordPolicy, position: Position = None) -> Reading:
        position, done = position if position and isinstance(position[0], list | tuple) else (position, 0)
        first, *start = position or (0,)
        for index, share in self._dealt().items():
            if index < first:
                continue
            if index > first:
                start, done = [], 0
            path = self.files[index].path
            try:
                part = part_of(path, share)
                items = read_records(path, tuple(start), policy, partial(self.columns, str(path)), part)
                yield from self._within(_numbered(index, items), part.name, policy, done)
            except OSError as error:
                policy.report(DataError(str(path), 0, "unreadable file", error.strerror or str(error)))
            except DataError as error:
                policy.report(error)


def _numbered(index: int, items: Iterable[Item]) -> Iterator[tuple[Any, int, list, Callable[[], list]]]:
    """The items of file `index` in the form that `_Records._within` takes, with positions in the whole source."""
    for item in items:
        yield item.record, item.line, [index, *item.before], partial(list, (index, *item.after))


class JsonLines(RecordFiles):
    """A source that makes one text document of each record in files of records (see `data/records.py`)."""


class Parquet(JsonLines):
    """A source of Parquet files that behaves like `JsonLines`. Parquet files have their own class because the class
    name of a source is part of its `identity`, which saved positions contain.
    """


class ImageTextLines(RecordFiles):
    """A source of records with images, whose field is a list of parts {"type": "text", "text": ...} or {"type":
    "image", "image": path}.

    Image paths are relative to the folder of the file. Reading decodes every image once, to check it.
    """

    formats = ("parts",)

    def columns(self, name: str, names: Sequence[str]) -> Sequence[str]:
        if self.field not in names:
            raise DataError(name, 0, "wrong field", missing_field(self.field, names))
        return [self.field]

    def documents(self, record: Any, file: str, line: int, policy: BadRecordPolicy) -> Sequence[Document]:
        from data.images import open_picture  # needs Pillow and torch

        items = value_of(record, self.field, file, line)
        if not isinstance(items, list) or not items:
            raise DataError(file, line, "field is not a list of parts", f"{self.field} is {kind_of(items)}")
        parts: list[str | Picture] = []
        for number, item in enumerate(items, 1):
            kind = item.get("type") if isinstance(item, dict) else None
            value = item.get(kind) if kind in ("text", "image") else None
            if not isinstance(value, str):
                detail = f'part {number} must be {{"type": "text", "text": ...}} or {{"type": "image", "image": path}}'
                raise DataError(file, line, "part is neither text nor image", detail)
            if kind == "text":
                parts.append(encodable(value, file, line))
            else:
                parts.append(open_picture(Path(file).parent / value, file, line))
        return (Document(tuple(parts), file, line),)


class HubDataset(_Records):
    """A source that reads a data set of the `datasets` library, map-style or streaming.

    A position between two records is {"row": number of rows read}; for a streaming data set, the position also contains
    the state of the data set under the key "state". Between two documents of the same record, a position is [position
    before the record, number of documents of the record already used].
    """

    def __init__(self, dataset: Any, name: str, field: str, streaming: bool, format: str = "auto"):
        super().__init__(field, format)
        self.dataset, self.name, self.streaming = dataset, name, streaming

    def identity(self, content: bool = True) -> str:
        known = f"{self.name} {self.field} {getattr(self.dataset, '_fingerprint', '')}"
        known += "" if self.format == "auto" else f" {self.format}"
        return hashlib.blake2b(known.encode(), digest_size=16).hexdigest()

    def share(self, share: Share) -> Self:
        """Returns a source of one share of a streaming data set.

        With n shares and s files (shards) of the data set, the shares form gcd(n, s) sets, which read different files.
        The shares of a set read the same files, and each takes its part of the records.
        """
        from datasets.distributed import split_dataset_by_node

        index, count = share
        sets = math.gcd(self.dataset.num_shards, count)
        other, files = copy.copy(self), self.dataset.shard(sets, index % sets)
        other.dataset = split_dataset_by_node(files, index // sets, count // sets) if sets < count else files
        return other

    def read(self, policy: BadRecordPolicy, position: Position = None) -> Reading:
        position, done = position if isinstance(position, list | tuple) else (position, 0)
        row = position["row"] if position else 0
        dataset = self.dataset
        if self.streaming:
            dataset = _own_position(dataset)
            if position:
                dataset.load_state_dict(position["state"])
        elif row >= len(dataset):
            return
        else:
            dataset = dataset.skip(row)
        yield from self._within(self._items(dataset, row), self.name, policy, done)

    def _items(self, dataset: Any, row: int) -> Iterator[tuple[Any, int, Position, Callable[[], Position]]]:
        records, tries = iter(dataset), Tries(self.name)
        before = self._position(dataset, row) if self.several else None
        while True:
            try:
                record = next(records)
                tries.succeeded()
            except StopIteration:
                return
            except Exception as error:  # builders of data sets raise exceptions of all kinds
                if self.streaming and passes(error):
                    tries.wait(error)
                    reached = dataset.state_dict()
                    dataset = _own_position(self.dataset)
                    dataset.load_state_dict(reached)
                    records = iter(dataset)
                    continue
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise DataError(self.name, row + 1, "unreadable data set", reason) from error
            row += 1
            record = {key: without_nulls(value) for key, value in record.items()}
            yield record, row, before, partial(self._position, dataset, row)
            before = self._position(dataset, row) if self.several else None

    def _position(self, dataset: Any, row: int) -> dict[str, Any]:
        return {"row": row, "state": dataset.state_dict()} if self.streaming else {"row": row}


def pretokenised(record: Any, file: str, line: int, masked: bool = False) -> Document:
    """Make a document of a record that has `input_ids` instead of text.

    masked: whether `labels` (-100 for a token that is not a target) or a mask of the record selects the targets. If
    False, a record in which some token is not a target raises `DataError`.
    """
    ids = _numbers(record, "input_ids", file, line)
    supervised = np.ones(len(ids), np.bool_)
    for key in TOKEN_KEYS[1:]:
        if record.get(key) is None:
            continue
        given = _numbers(record, key, file, line)
        if len(given) != len(ids):
            raise DataError(file, line, f"wrong {key}", f"{len(given)} numbers for {len(ids)} input_ids")
        taught = np.array([label != -100 for label in given]) if key == "labels" else np.array(given) == 1
        if key == "labels" and any(label not in (-100, token) for label, token in zip(given, ids, strict=True)):
            raise DataError(
                file, line, "wrong labels", "every label must be the token of input_ids at the same position, or -100"
            )
        if key == "attention_mask" and not taught.all():
            raise DataError(file, line, "padded tokens", "attention_mask has zeros; store the tokens without padding")
        supervised &= taught
    if masked and not supervised.any():
        raise DataError(file, line, "no supervised token", "labels or mask exclude every token")
    if not masked and not supervised.all():
        raise DataError(
            file, line, "masked tokens", "labels or mask exclude some tokens; use task=sft, which applies them"
        )
    return Document((Tokens(tuple(ids), tuple(supervised.tolist())),), file, line, (True,) if masked else None)


def _numbers(record: Any, key: str, file: str, line: int) -> list[int]:
    value = value_of(record, key, file, line)
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list) or not value or not all(type(number) in (int, bool) for number in value):
        raise DataError(file, line, f"wrong {key}", "must be a list of whole numbers")
    return value


def _own_position(dataset: Any) -> Any:
    """Returns a copy of a streaming data set. A streaming data set stores its read position, so two passes over the
    data set at the same time need two copies.

    The cache of file systems inside the data set is shared, not copied, because other threads may change the cache
    during the copy, and because a copied cache would open every file system again.
    """
    from huggingface_hub import HfFileSystem

    return copy.deepcopy(dataset, {id(HfFileSystem._cache): HfFileSystem._cache})


class HashSplit:
    """The training documents or the held-out documents of a source. The source is split by a hash of the content of
    each document, so that equal documents are on the same side of the split.
    """

    def __init__(self, source: Source, share: float, held_out: bool):
        self.source, self.share_held_out, self.held_out = source, share, held_out

    def identity(self, content: bool = True) -> str:
        return f"{self.source.identity(content)} {self.share_held_out} {self.held_out}"

    def share(self, share: Share) -> HashSplit:
        """Returns the same side of the split for one share of the source. The records are divided into shares first,
        and each share is then split.
        """
        return HashSplit(cast(SharedSource, self.source).share(share), self.share_held_out, self.held_out)

    def read(self, policy: BadRecordPolicy, position: Position = None) -> Reading:
        for document, after in self.source.read(policy, position):
            if (hash_share(document.key) < self.share_held_out) == self.held_out:
                yield document, after
