"""Writes example conversations for fine-tuning, without any download: ``python -m data.examples NAME FOLDER``.

NAME is ``modules`` or ``digits``. In ``modules`` the user shows a line of the running Python's standard library in
which the name of a module is blanked out, and the answer is that name. In ``digits`` the user shows one of
scikit-learn's images and asks which digit it is. ``train.jsonl`` and ``valid.jsonl`` are written to FOLDER, in the
format of ``data/chat``. The files of the standard library are split into training and held-out files in the same way as
by ``data.source=stdlib``, so a model trained on that corpus has not seen the held-out lines. Held-out lines that also
occur in a training file are left out.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from data.digits import DigitSource
from data.document import Picture, hash_share
from data.errors import BadRecordPolicy
from data.files import stdlib_files

HELD_OUT = 0.05  # fraction of the files that is held out, equal to the default of `data.validation_share`
HELD_OUT_DIGITS = 0.2
BLANK = "____"
SHORTEST = 8  # lines with fewer characters are left out


def modules() -> tuple[list[dict], list[dict]]:
    """Returns two lists of conversations that ask for the blanked-out module name in a line: one list from training
    files, and one from held-out files.
    """
    # By whether the line is held out; lines in order, without duplicates
    lines: dict[bool, dict[tuple[str, str], None]] = {False: {}, True: {}}
    for file in stdlib_files():
        held_out = hash_share(file.name.encode()) < HELD_OUT
        lines[held_out].update(dict.fromkeys(_blanked(file.path.read_bytes())))
    known = {line for line, _ in lines[False]}
    train = [_chat(f"Which module is {BLANK}?\n{line}", name) for line, name in lines[False]]
    valid = [_chat(f"Which module is {BLANK}?\n{line}", name) for line, name in lines[True] if line not in known]
    return train, valid


def digits() -> tuple[list[dict], list[dict]]:
    """Returns two lists of conversations that ask which digit an image shows: one for training, and one held out by a
    hash of the pixels.
    """
    return list(_digits("train")), list(_digits("validation"))


EXAMPLES = {"modules": modules, "digits": digits}


def write(name: str, folder: Path) -> tuple[int, int]:
    """Write the conversations of one example data set. Returns the number of training conversations and the number of
    held-out conversations.
    """
    train, valid = EXAMPLES[name]()
    folder.mkdir(parents=True, exist_ok=True)
    for split, records in (("train", train), ("valid", valid)):
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return len(train), len(valid)


def _blanked(source: bytes) -> Iterator[tuple[str, str]]:
    """Yield (line, name) for every line of a Python file that uses an imported module; in the line the module's name is
    blanked out.

    Modules whose name the file also uses for something else are left out, and so are lines in which the name occurs
    twice.
    """
    try:
        text = source.decode("utf-8")
        tree = ast.parse(text)
    except (UnicodeDecodeError, SyntaxError):
        return
    nodes, lines = list(ast.walk(tree)), text.split("\n")
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names if not alias.asname}
    names -= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    names -= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name) or node.value.id not in names:
            continue
        name, line = node.value.id, lines[node.value.lineno - 1].strip()
        blanked = re.sub(rf"(?<![\w.]){name}(?=\.)", BLANK, line)
        if BLANK in blanked and name not in blanked and len(line) >= SHORTEST and line.isascii():
            yield blanked, name


def _digits(split: str) -> Iterator[dict]:
    from data.images import load_picture  # needs torch

    for document, _ in DigitSource(split, HELD_OUT_DIGITS).read(BadRecordPolicy("stop")):
        picture, name = document.parts
        assert isinstance(picture, Picture) and isinstance(name, str)
        file = io.BytesIO()
        load_picture(picture).save(file, "PNG")
        image = {"type": "image", "image": {"base64": base64.b64encode(file.getvalue()).decode()}}
        yield _chat([{"type": "text", "text": "Which digit is this?"}, image], name)


def _chat(question: Any, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def main(arguments: Iterable[str]) -> None:
    """Run the command line with these arguments."""
    arguments = list(arguments)
    if len(arguments) != 2 or arguments[0] not in EXAMPLES:
        sys.exit(f"usage: python -m data.examples {'|'.join(EXAMPLES)} FOLDER")
    train, valid = write(arguments[0], Path(arguments[1]))
    print(f"{arguments[1]}: {train} conversations in train.jsonl, {valid} held out in valid.jsonl")


if __name__ == "__main__":
    main(sys.argv[1:])
