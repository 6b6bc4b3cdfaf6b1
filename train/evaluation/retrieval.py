"""Long-context retrieval tasks: a long text states a number once, and the prompt asks for it at the end of the text.

needle      one sentence of the text states a number
multikey    each of several sentences states a number for a different name; the prompt asks for one of them

The text consists of sentences drawn from small word lists, so nothing is downloaded. A prompt has at most the
configured number of tokens, and falls short of this number by at most the length of one sentence. The sentence with the
number is at the configured depth (0: beginning of the text, 1: end), counted in sentences. In multikey, the sentences
with the numbers of other names are at random positions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from data.tokenizer import special_ids
from train.config.evaluation import EvalTask
from train.evaluation.scorer import Question

ANSWER = 16  # largest number of tokens in an answer
BEGINNING = "The following text states some secret numbers.\n\n"
ADJECTIVES = "old quiet green small tall broken narrow warm heavy plain early distant".split()
NOUNS = "river garden house wagon teacher window market bridge farmer letter forest harbour".split()
VERBS = "passed painted watched followed described measured visited repaired remembered reached".split()
PLACES = "in the morning,near the hill,after the rain,behind the mill,on the third day,before winter".split(",")
SYLLABLES = "ba ke lo mi nu ra se ti vo za fe gu".split()


@dataclass(frozen=True)
class Hidden:
    """A prompt that asks for a number, the number, and the length and depth for which the prompt was made."""

    prompt: tuple[int, ...]
    number: str
    length: int
    depth: float


def make(task: EvalTask, tokenizer: Tokenizer, seed: int) -> list[Hidden]:
    """Make the questions of a task; the same task, tokenizer and seed always give the same questions.

    Raises:
        ValueError: a configured length is too short for the sentences that a prompt must contain.
    """
    return [
        _one(task, tokenizer, random.Random(f"{seed}/{task.task}/{length}/{depth}/{number}"), length, depth)
        for length in task.lengths
        for depth in task.depths
        for number in range(task.samples)
    ]


def _one(task: EvalTask, tokenizer: Tokenizer, draw: random.Random, length: int, depth: float) -> Hidden:
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    names: list[str] = []
    while len(names) < (task.keys if task.task == "multikey" else 1):
        name = "".join(draw.choice(SYLLABLES) for _ in range(3)).capitalize()
        if name not in names:
            names.append(name)
    numbers = [str(draw.randrange(10_000, 100_000)) for _ in names]
    wanted, *others = (ids(f" The secret number of {n} is {x}.") for n, x in zip(names, numbers, strict=True))
    bos, end = special_ids(tokenizer).bos, ids(f"\n\nThe secret number of {names[0]} is")
    begin = ([] if bos is None else [bos]) + ids(BEGINNING)
    room = length - sum(map(len, (begin, end, wanted, *others)))
    sentences: list[list[int]] = []
    while len(added := ids(_sentence(draw))) <= room:
        room -= len(added)
        sentences.append(added)
    if not sentences:
        least = length - room + 32
        raise ValueError(f"{task.task}: prompts of {length} tokens are too short for this task; use {least} or more")
    for other in others:
        sentences.insert(draw.randrange(len(sentences) + 1), other)
    sentences.insert(round(depth * len(sentences)), wanted)
    return Hidden((*begin, *(token for each in sentences for token in each), *end), numbers[0], length, depth)


def _sentence(draw: random.Random) -> str:
    subject, other = draw.sample(NOUNS, 2)
    verb, place = draw.choice(VERBS), draw.choice(PLACES)
    return f" The {draw.choice(ADJECTIVES)} {subject} {verb} the {draw.choice(ADJECTIVES)} {other} {place}."


def score(
    hidden: Sequence[Hidden], tokenizer: Tokenizer, answers: Callable[[Sequence[Question]], list[str]]
) -> dict[str, Any]:
    """Compute the share of right answers for each length and depth. An answer is right if it begins with the number.

    answers: function that returns the greedy continuations of some prompts.
    """
    questions = [Question(h.prompt, ANSWER) for h in hidden]
    right = [_first_word(text) == h.number for h, text in zip(hidden, answers(questions), strict=True)]
    cells: dict[str, dict[str, float]] = {}
    for length in dict.fromkeys(h.length for h in hidden):
        row = cells[str(length)] = {}
        for depth in dict.fromkeys(h.depth for h in hidden):
            chosen = [r for r, h in zip(right, hidden, strict=True) if (h.length, h.depth) == (length, depth)]
            row[f"{depth:g}"] = sum(chosen) / len(chosen)
    return {"accuracy": sum(right) / len(right), "questions": len(right), "by_length_and_depth": cells}


def _first_word(text: str) -> str:
    return (text.split() or [""])[0].rstrip(".,")
