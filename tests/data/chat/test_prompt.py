import pytest

from data import DataError
from data.chat.prompt import prompt_ids

from .records import assistant, encode, user


def test_a_prompt_is_the_document_up_to_its_answer(tokenizer):
    messages = [user("1"), assistant("a1", "t1"), user("2"), assistant("a2", "t2")]
    for thinking in (False, True):
        ids, mask = encode(tokenizer, {"messages": messages, "thinking": thinking, "effort": 9})[-1]
        start = len(mask) - mask[::-1].index(False)
        assert prompt_ids(tokenizer, messages[:-1], thinking=thinking, effort=9) == ids[:start]
    with pytest.raises(DataError, match="a prompt must end with a user message"):
        prompt_ids(tokenizer, messages)
