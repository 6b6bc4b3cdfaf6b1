"""Sources of conversations: files of records, or a data set of the `datasets` library."""

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

FORMAT = 2  # the version of the rendering; increase it when records are rendered differently


class _Conversations(RecordFiles):
    """A source whose records are conversations; one conversation can become several documents (see
    data/chat/__init__.py).
    """

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
            # This key is equal for all documents of a conversation and of its duplicates, so that all of them are on
            # the same side of a training/held-out split.
            key = json.dumps(record[self.field], sort_keys=True, default=_digest).encode()
            found = list(documents(conversation, file, line, key))
            policy.unused.update(unused_keys(record, self.field))
        policy.formats[shape] += 1
        return found


class ChatLines(_Conversations, JsonLines):
    """A source of conversations in files of records (JSONL, JSON, Parquet or Arrow)."""

    def identity(self, content: bool = True) -> str:
        return f"{super().identity(content)} {FORMAT}"


class ChatDataset(HubDataset):
    """A source of conversations in a data set of the `datasets` library."""

    several = True
    formats, columns, documents = _Conversations.formats, _Conversations.columns, _Conversations.documents

    def identity(self, content: bool = True) -> str:
        return f"{super().identity(content)} chat {FORMAT}"


def _digest(value: Any) -> str:
    """A hash that replaces the bytes of an image, which JSON cannot represent."""
    return hashlib.blake2b(value if isinstance(value, bytes) else repr(value).encode(), digest_size=16).hexdigest()
