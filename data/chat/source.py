"""Conversations as a source: JSONL, one record a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from data.chat.read import read_conversation
from data.chat.render import documents
from data.document import Document
from data.errors import BadRecordPolicy
from data.sources import JsonLines

FORMAT = 1  # raise it when a record is rendered differently


class ChatLines(JsonLines):
    """One conversation per line, which can become several documents (see the package's docstring)."""

    def identity(self, content: bool = True) -> str:
        return f"{super().identity(content)} {FORMAT}"

    def _documents(self, raw: bytes, path: Path, line: int, policy: BadRecordPolicy) -> Sequence[Document]:
        record = self._record(raw, path, line, policy)
        conversation = read_conversation(record, str(path), line, self.field)
        # The same for all documents of a conversation and of its copies, so that a split does not separate them.
        key = json.dumps(record[self.field], sort_keys=True).encode()
        return list(documents(conversation, str(path), line, key))
