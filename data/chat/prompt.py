"""Messages -> the token ids of a prompt, which the model continues with its answer."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from data.chat.conversation import DEFAULT_EFFORT
from data.chat.read import read_conversation
from data.chat.render import END_THINK, THINK, render
from data.document import Control, Picture
from data.errors import DataError
from data.tokenizer import ASSISTANT, special_ids
from data.tokens import control_ids


def prompt_ids(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    thinking: bool = False,
    effort: str | int = DEFAULT_EFFORT,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """Token ids of a conversation without images, up to and including the header of the next answer.

    thinking, effort, tools: as in a record (see the package's docstring). Raises `DataError` for malformed messages.
    """
    record = {"messages": messages, "thinking": thinking, "effort": effort, "tools": tools}
    rendered = render(read_conversation(record, "messages", 0, for_training=False), set())
    ids = [bos] if (bos := special_ids(tokenizer).bos) is not None else []
    for part in (*rendered.parts, Control(ASSISTANT), THINK if thinking else END_THINK):
        if isinstance(part, Picture):
            raise DataError("messages", 0, "image in a text prompt", part.key)
        if isinstance(part, Control):
            ids += control_ids(tokenizer, part)
        else:
            ids += tokenizer.encode(part, add_special_tokens=False).ids
    return ids
