"""A preference record becomes one document of two conversations with the same prompt."""

import json

import pytest
import torch

from data import DataConfig, DataError, build_loaders, special_ids
from data.chat.formats import as_pair

from .records import assistant, user

PROMPT = [user("2 + 3?"), assistant("5"), user("And 4?")]
PAIRS = {
    "text": {"prompt": "2 + 3?", "chosen": "5", "rejected": "six"},
    "messages": {"prompt": PROMPT, "chosen": [assistant("9")], "rejected": [assistant("8")]},
    "the prompt in both": {"chosen": [*PROMPT, assistant("9")], "rejected": [*PROMPT, assistant("8")]},
    "openai": {
        "input": {"messages": PROMPT},
        "preferred_output": [assistant("9")],
        "non_preferred_output": [assistant("8")],
    },
    "reasoning on one side": {"prompt": PROMPT, "chosen": [assistant("9", "5 + 4.")], "rejected": [assistant("8")]},
}


def loader(tokenizer, folder, lines: list[dict], **options):
    for name in ("train", "held"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cfg = DataConfig(
        "preference", [str(folder / "train.jsonl")], [str(folder / "held.jsonl")], field="messages",
        cache_dir=str(folder / "cache"), window_tokens=8000, shuffle=False, **options,
    )  # fmt: skip
    return build_loaders(cfg, tokenizer, seq_len=256, batch_rows=1)[0]


@pytest.mark.parametrize("name", PAIRS)
def test_both_answers_follow_the_same_prompt(tokenizer, tmp_path, name: str) -> None:
    batch = next(loader(tokenizer, tmp_path, [PAIRS[name]]))
    first, second = batch["seq_lens"][0].tolist()
    ids, labels, special = batch["input_ids"][0], batch["labels"][0], special_ids(tokenizer)
    sides = [(ids[:first], labels[:first]), (ids[first : first + second], labels[first : first + second])]
    prompts = []
    for tokens, taught in sides:
        assert tokens[0] == special.bos and tokens[-1] == special.eos
        answer = taught >= 0
        begin = int(answer.int().argmax())
        assert answer[begin:].all() and torch.equal(taught[begin:], tokens[begin:])
        prompts.append(tokens[:begin].tolist())
    assert prompts[0] == prompts[1]
    texts = [tokenizer.decode(tokens[taught >= 0].tolist()) for tokens, taught in sides]
    expected = ("5", "six") if name == "text" else ("9", "8")
    assert texts[0].endswith(expected[0]) and texts[1].endswith(expected[1])
    assert (ids[first + second :] == special.pad).all()


def test_pairs_are_packed_whole_and_streamed_alike(tokenizer, tmp_path) -> None:
    lines = [{"prompt": f"What is {n} plus 1?", "chosen": f"It is {n + 1}.", "rejected": "No."} for n in range(40)]
    stored, streamed = (
        loader(tokenizer, tmp_path, lines, **options) for options in ({}, {"streaming": True, "validation_rows": 2})
    )
    seen = [0, 0]
    for _ in range(3):
        for number, source in enumerate((stored, streamed)):
            batch = next(source)
            lengths = batch["seq_lens"][batch["seq_lens"] > 0]
            assert len(lengths) % 2 == 0 and len(lengths) >= 4
            seen[number] += len(lengths) // 2
    assert stored.stats.split_documents == streamed.stats.split_documents == 0 and min(seen) > 8
    assert stored.stats.formats == {"preference": 40}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "no 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "no preference"),
        ({"prompt": "a", "chosen": "b", "rejected": [assistant("c")]}, "give both in one form"),
        ({"messages": PROMPT}, "no 'chosen'"),
        ({"chosen": "b", "rejected": "c"}, "text without a prompt"),
        ("text", "not an object"),
    ],
)
def test_what_is_no_pair_is_refused(record, message: str) -> None:
    with pytest.raises(DataError, match=message):
        as_pair(record, "messages", "f.jsonl", 1)
