"""Built-in prompts and rewards. Standard library only, because reward processes import this file.

A task is a source of records and a reward function. A record is a JSON object with `prompt` (what the user says) and
whatever its reward function reads. A source is a JSONL file of records, or a function like those here that draws one
from a random generator.
"""

from __future__ import annotations

import random
import string
from typing import Any

LEVELS = 5


def arithmetic(draw: random.Random) -> dict[str, Any]:
    """An integer calculation of level 1 (a sum of two digits) to 5 (three terms, with a product)."""
    level = draw.randint(1, LEVELS)
    if level == 1:
        text = f"{draw.randint(0, 9)} + {draw.randint(0, 9)}"
    elif level == 2:
        text = f"{draw.randint(10, 99)} {draw.choice('+-')} {draw.randint(10, 99)}"
    elif level == 3:
        text = f"{draw.randint(2, 9)} * {draw.randint(2, 9)}"
    elif level == 4:
        text = " ".join(str(draw.randint(10, 99)) + sign for sign in (" +", " -", ""))
    else:
        text = f"{draw.randint(10, 99)} {draw.choice('+-')} {draw.randint(2, 9)} * {draw.randint(2, 9)}"
    return {"prompt": f"{text} = ?", "solution": str(_value(text)), "level": level}


def highest(draw: random.Random) -> dict[str, Any]:
    """The highest of twelve digits, each after a lowercase letter that gives its place; capitals do not count:
    a3X9b0c4...

    The digits go up to a hidden bound between 2 and 9, so the only way to know is to look: the more digits are looked
    at, the more often the answer is right, with diminishing returns.
    """
    bound = draw.randint(2, 9)
    digits = [draw.randint(0, bound) for _ in range(12)]
    items = [letter + str(digit) for letter, digit in zip(string.ascii_lowercase, digits, strict=False)]
    for letter in "XYZ":
        items.insert(draw.randint(0, len(items)), letter + str(draw.randint(0, 9)))
    return {"prompt": "".join(items), "solution": str(max(digits))}


def letters(draw: random.Random) -> dict[str, Any]:
    """Three to eight letters, to be reversed or sorted."""
    word = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 8)))
    order = draw.choice(("reverse", "sort"))
    solution = word[::-1] if order == "reverse" else "".join(sorted(word))
    return {"prompt": f"{order} the letters: {word}", "solution": solution}


def exact(record: dict[str, Any], answer: str, reasoning: str) -> float:
    """1 if the answer is the record's `solution`, ignoring surrounding white space."""
    return float(answer.strip() == str(record["solution"]))


def _value(text: str) -> int:
    """The value of terms joined by + and -, each a number or a product of two."""
    tokens = text.split()
    total, sign, at = 0, 1, 0
    while at < len(tokens):
        term = int(tokens[at])
        if tokens[at + 1 : at + 2] == ["*"]:
            term, at = term * int(tokens[at + 2]), at + 2
        total += sign * term
        sign, at = {"+": 1, "-": -1}.get("".join(tokens[at + 1 : at + 2]), 0), at + 2
    return total
