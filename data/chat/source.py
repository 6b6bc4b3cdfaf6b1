"""Sources of conversations: files of records, or a data set of the `datasets` library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from data.chat.formats import SHAPES, as_messages, as_pair, shape_of
from data.chat.read import read_conversation, unused_keys
from data.chat.render import documents
from data.document import Control, Document
from data.errors import BadRecordPolicy, DataError
from data.sources import HubDataset, JsonLines, RecordFiles, pretokenised
from data.tokenizer import BOS, EOS

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
            key = _key(record[self.field])
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
    kind = "chat"  # part of the identity: the same records are other documents in another kind of source

    def identity(self, content: bool = True) -> str:
        return f"{super().identity(content)} {self.kind} {FORMAT}"


class _Pairs(_Conversations):
    """A source of preference pairs: each record has a preferred and a rejected answer to one prompt. A record becomes
    one document, so that both answers are in the same row: the conversation with the preferred answer, EOS, BOS, and
    the conversation with the rejected answer.
    """

    formats = ("preference",)

    def documents(self, record: Any, file: str, line: int, policy: BadRecordPolicy) -> Sequence[Document]:
        sides = as_pair(record, self.field, file, line)
        read = [read_conversation(side, file, line, self.field) for side in sides]
        thinking = read[0].thinking
        if thinking is None:  # both answers get the same mode: thinking if one of them has reasoning
            thinking = any(message.reasoning for side in read for message in side.messages if message.supervised)
        made = [list(documents(replace(side, thinking=thinking), file, line)) for side in read]
        for name, found in zip(("chosen", "rejected"), made, strict=True):
            if len(found) != 1:
                detail = f"{name} has {len(found)} answers with reasoning; move all but the last into the prompt"
                raise DataError(file, line, "several answers", detail)
        policy.unused.update(unused_keys(sides[0], self.field))
        policy.formats["preference"] += 1
        return [_joined(made[0][0], made[1][0], _prompt_key(sides[0], self.field))]


class PairLines(_Pairs, JsonLines):
    """A source of preference pairs in files of records (JSONL, JSON, Parquet or Arrow)."""

    def identity(self, content: bool = True) -> str:
        return f"{super().identity(content)} pairs {FORMAT}"


class PairDataset(ChatDataset):
    """A source of preference pairs in a data set of the `datasets` library."""

    formats, documents = _Pairs.formats, _Pairs.documents
    kind = "pairs"


def _joined(chosen: Document, rejected: Document, key: bytes) -> Document:
    assert chosen.supervised is not None and rejected.supervised is not None, "a conversation says what is supervised"
    return Document(
        (*chosen.parts, Control(EOS), Control(BOS), *rejected.parts),
        chosen.file,
        chosen.line,
        (*chosen.supervised, chosen.supervised[-1], False, *rejected.supervised),
        key,
    )


def _prompt_key(record: Mapping[str, Any], field: str) -> bytes:
    """A key that is equal for all pairs with the same prompt, so that all of them are on the same side of a
    training/held-out split.
    """
    messages = record[field]
    end = next((n for n, message in enumerate(messages) if message.get("role") == "user"), 0)
    return _key(messages[: end + 1])


def _key(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=_digest).encode()


def _digest(value: Any) -> str:
    """A hash that replaces the bytes of an image, which JSON cannot represent."""
    return hashlib.blake2b(value if isinstance(value, bytes) else repr(value).encode(), digest_size=16).hexdigest()
