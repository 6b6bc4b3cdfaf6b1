"""Built-in prompts and rewards for RL. Only the standard library is used, because reward processes import this file.

An RL task consists of a source of records and a reward function. A record is a JSON object with `prompt` (the user's
message) and the fields that the reward function reads. A source is a JSONL file of records, or a function that draws a
record from a random generator, like the functions here.
"""

from __future__ import annotations

import random
import string
from typing import Any

LEVELS = 5


def arithmetic(draw: random.Random) -> dict[str, Any]:
    """Draw an integer calculation of difficulty 1 (a sum of two digits) to 5 (three terms, one of them a product)."""
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
    """Draw a prompt such as "a3X9b0c4...", which asks for the highest of twelve digits.

    Each of the twelve digits follows a lowercase letter that gives its place; digits after capital letters do not
    count. No digit is above a bound that is drawn between 2 and 9; the prompt does not mention this bound. The more
    digits are read, the more often the answer is right, with diminishing returns.
    """
    bound = draw.randint(2, 9)
    digits = [draw.randint(0, bound) for _ in range(12)]
    items = [letter + str(digit) for letter, digit in zip(string.ascii_lowercase, digits, strict=False)]
    for letter in "XYZ":
        items.insert(draw.randint(0, len(items)), letter + str(draw.randint(0, 9)))
    return {"prompt": "".join(items), "solution": str(max(digits))}


def letters(draw: random.Random) -> dict[str, Any]:
    """Draw a prompt that asks to reverse or to sort three to eight letters."""
    word = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 8)))
    order = draw.choice(("reverse", "sort"))
    solution = word[::-1] if order == "reverse" else "".join(sorted(word))
    return {"prompt": f"{order} the letters: {word}", "solution": solution}


def exact(record: dict[str, Any], answer: str, reasoning: str) -> float:
    """Return 1 if the answer equals the record's `solution`, apart from surrounding white space, otherwise 0."""
    return float(answer.strip() == str(record["solution"]))


def _value(text: str) -> int:
    """Compute the value of a text of terms joined by + and -; a term is a number or a product of two numbers."""
    tokens = text.split()
    total, sign, at = 0, 1, 0
    while at < len(tokens):
        term = int(tokens[at])
        if tokens[at + 1 : at + 2] == ["*"]:
            term, at = term * int(tokens[at + 2]), at + 2
        total += sign * term
        sign, at = {"+": 1, "-": -1}.get("".join(tokens[at + 1 : at + 2]), 0), at + 2
    return total
