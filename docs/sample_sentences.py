"""Forty sentences of docstrings and messages, drawn by a seed, to be read by somebody who is new here.

    python docs/sample_sentences.py [SEED] [NUMBER]

Whoever does not understand one at once marks it; it is then rewritten. At least nine of ten should be clear.
"""

from __future__ import annotations

import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("train", "model", "optim", "data")
SHORTEST = 5  # words; shorter ones are names, not sentences


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a file, and of each string in its exceptions and log lines.

    An f-string is one text, as its reader sees it: the values that are filled in stand in braces.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text
        elif isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _name(node) in ("log", "problem", "print")):
            yield from _strings(node)


def _strings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of the strings inside a statement; an f-string counts as one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    elif isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else f"{{{_short(part)}}}" for part in node.values)
        yield node.lineno, "".join(map(str, parts))
    else:
        for part in ast.iter_child_nodes(node):
            yield from _strings(part)


def _short(part: ast.expr) -> str:
    """The expression that an f-string fills in, if it is a plain name; otherwise three dots."""
    value = part.value if isinstance(part, ast.FormattedValue) else part
    return ast.unparse(value) if isinstance(value, ast.Name | ast.Attribute) else "..."


def sentences() -> Iterator[tuple[str, str]]:
    """(place, sentence) of all packages."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for line, text in texts(path):
                for sentence in re.split(r"(?<=[.:;?!])\s+(?=[A-Z`])|\n\s*\n", text):
                    words = " ".join(sentence.split())
                    if len(words.split()) >= SHORTEST and words[0].isalnum():
                        yield f"{path.relative_to(ROOT)}:{line}", words


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def main(seed: int = 0, number: int = 40) -> None:
    """Print the sample."""
    found = list(sentences())
    for place, sentence in random.Random(seed).sample(found, number):
        print(f"{place}\n    {sentence}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
