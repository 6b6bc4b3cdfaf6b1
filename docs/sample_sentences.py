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
# A sentence ends behind its full stop (not that of "et al."), before an empty line, and before the next entry of a list
# of the form `name: ...` or of a table of names, whose columns are two spaces apart.
END = r"(?<=[.?!])(?<!et al\.)\s+(?=[A-Z`])|\n\s*\n|\n(?=\s*[`\w.]+(?:, [`\w.]+)*: | {4}[\w., ]+  \S)"


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """(place, text) of each docstring of a file, and of each string in its exceptions and log lines.

    The place of a docstring names what it documents, since its reader sees both together. An f-string is one text; the
    values that are filled in stand in braces.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield f"{place} {getattr(node, 'name', '')}".rstrip(), text
        elif isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _name(node) in ("log", "problem", "print")):
            yield from ((f"{place} (message)", text) for text in _strings(node))


def _strings(node: ast.AST) -> Iterator[str]:
    """The strings inside a statement; an f-string counts as one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else f"{{{_short(part)}}}" for part in node.values)
        yield "".join(map(str, parts))
    else:
        for part in ast.iter_child_nodes(node):
            yield from _strings(part)


def _short(part: ast.expr) -> str:
    """The expression that an f-string fills in, if it is a plain name; otherwise three dots."""
    value = part.value if isinstance(part, ast.FormattedValue) else part
    return ast.unparse(value) if isinstance(value, ast.Name | ast.Attribute) else "..."


def sentences() -> Iterator[tuple[str, str]]:
    """(place, sentence) of all packages; each entry of a list of attributes or arguments is split on its own."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for place, text in texts(path):
                for sentence in re.split(END, text):
                    words = " ".join(sentence.removeprefix("Attributes:").split())
                    if len(words.split()) >= SHORTEST and words[0].isalnum():
                        yield place, words


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def main(seed: int = 0, number: int = 40) -> None:
    """Print the sample."""
    found = list(sentences())
    for place, sentence in random.Random(seed).sample(found, number):
        print(f"{place}\n    {sentence}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
