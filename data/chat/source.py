"""Conversations as a source: JSONL, one record a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from data.chat.read import read_conversation
from data.chat.render import documents
from data.document import Document
from data.errors import Policy
from data.sources import JsonLines

FORMAT = 1  # raise when the same record becomes other parts


class ChatLines(JsonLines):
    """One conversation a line; see the package's description."""

    def identity(self, content: bool = True) -> str:
        return f"{super().identity(content)} {FORMAT}"

    def _documents(self, raw: bytes, path: Path, line: int, policy: Policy) -> Sequence[Document]:
        record = self._record(raw, path, line, policy)
        conversation = read_conversation(record, str(path), line, self.field)
        # Copies of a conversation, and all documents of one, stay on one side of a split.
        key = json.dumps(record[self.field], sort_keys=True).encode()
        return list(documents(conversation, str(path), line, key))
