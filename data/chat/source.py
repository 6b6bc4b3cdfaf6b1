"""Conversations as a source: files of records, or a data set of the `datasets` library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from data.chat.formats import SHAPES, as_messages, shape_of
from data.chat.read import read_conversation, unused_keys
from data.chat.render import documents
from data.document import Document
from data.errors import BadRecordPolicy
from data.sources import HubDataset, JsonLines, RecordFiles, pretokenised

FORMAT = 2  # increase it when the rendering of records changes


class _Conversations(RecordFiles):
    """A record is a conversation, which can become several documents (see the package's docstring)."""

    formats = tuple(SHAPES)
    several = True

    def columns(self, name: str, names: Sequence[str]) -> Sequence[str]:
        return names

    def documents(self, record: Any, file: str, line: int, policy: BadRecordPolicy) -> Sequence[Document]:
        shape = shape_of(record, self.field) if self.format == "auto" else self.format
        if shape == "tokens":
            found = [pretokenised(record, file, line, masked=True)]
        else:
            record = as_messages(record, shape, self.field, file, line)
            conversation = read_conversation(record, file, line, self.field)
            # Equal for all documents of a conversation and of its duplicates, so that a split does not separate them.
            key = json.dumps(record[self.field], sort_keys=True, default=_digest).encode()
            found = list(documents(conversation, file, line, key))
            policy.unused.update(unused_keys(record, self.field))
        policy.formats[shape] += 1
        return found


class ChatLines(_Conversations, JsonLines):
    """Conversations from files of records (JSONL, JSON, Parquet, Arrow)."""

    def identity(self, content: bool = True) -> str:
        return f"{super().identity(content)} {FORMAT}"


class ChatDataset(HubDataset):
    """Conversations from a data set of the `datasets` library."""

    several = True
    formats, columns, documents = _Conversations.formats, _Conversations.columns, _Conversations.documents

    def identity(self, content: bool = True) -> str:
        return f"{super().identity(content)} chat {FORMAT}"


def _digest(value: Any) -> str:
    """A digest in place of a value that JSON cannot hold: the bytes of an image."""
    return hashlib.blake2b(value if isinstance(value, bytes) else repr(value).encode(), digest_size=16).hexdigest()
