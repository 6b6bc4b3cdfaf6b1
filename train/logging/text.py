"""Text of models and data on a terminal."""

from __future__ import annotations

import unicodedata

LINE_ENDS = "\n\t"  # are shown as what they are


def visible(text: str) -> str:
    """The text with control characters and escape sequences spelled out (`\\x1b`).

    They neither act on a terminal then nor make a log a binary file. Half surrogates are among them, and characters
    that change the direction of writing, but not the joiners of scripts and emoji.
    """
    return "".join(char if char in LINE_ENDS or not _acts(char) else _spelled(char) for char in text)


def _acts(char: str) -> bool:
    category = unicodedata.category(char)
    bidirectional = unicodedata.bidirectional(char)
    return category in ("Cc", "Cs") or (category == "Cf" and bidirectional not in ("BN", "AN", "AL", "L", "R", "ON"))


def _spelled(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"
