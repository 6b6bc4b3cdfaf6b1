import pytest

from data import DataError
from data.chat.prompt import prompt_ids, read_prompt
from data.images import VisionSettings, plan_grid

from .records import assistant, encode, picture, user


def test_a_prompt_is_the_document_up_to_its_answer(tokenizer):
    messages = [user("1"), assistant("a1", "t1"), user("2"), assistant("a2", "t2")]
    for thinking in (False, True):
        ids, mask = encode(tokenizer, {"messages": messages, "thinking": thinking, "effort": 9})[-1]
        start = len(mask) - mask[::-1].index(False)
        assert prompt_ids(tokenizer, messages[:-1], thinking=thinking, effort=9) == ids[:start]
    with pytest.raises(DataError, match="a prompt must end with a user message"):
        prompt_ids(tokenizer, messages)


def test_images_take_their_spans(tokenizer):
    """The same token ids as the training document has, and the types of every image's tokens at its place."""
    vision = VisionSettings(patch_size=4, downsample_ratio=2, min_pixels=0)
    parts = [{"type": "image", "bytes": picture()}, {"type": "text", "text": "this?"}]
    question = {"messages": [user(parts)]}
    whole = {"messages": [*question["messages"], assistant("red")]}
    ids, mask = encode(tokenizer, whole, vision=vision)[-1]
    prompt = read_prompt(tokenizer, question, vision)
    assert list(prompt.ids) == ids[: mask.index(True)]
    grid = plan_grid(24, 16, vision)
    span = [n for n, kind in enumerate(prompt.types) if kind >= 0]
    assert span == list(range(span[0], span[0] + grid.num_tokens))
    assert [prompt.types[n] for n in span] == grid.token_types().tolist()
    assert prompt.images()["image_grid_hws"].tolist() == [list(grid.patches)]
    assert read_prompt(tokenizer, {"messages": [user("1")]}, None).images() is None
    with pytest.raises(DataError, match="f.jsonl:3: image for a model without vision"):
        read_prompt(tokenizer, question, None, "f.jsonl", 3)
