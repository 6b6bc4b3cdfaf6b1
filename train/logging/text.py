"""Makes text that models or data contain safe to print on a terminal."""

from __future__ import annotations

import unicodedata

LINE_ENDS = "\n\t"  # control characters that stay unchanged


def visible(text: str) -> str:
    """Replace control characters and escape sequences by their escaped spelling, such as `\\x1b`.

    The returned text cannot control the terminal when it is printed, and a log file that contains it stays a text file.
    Lone surrogates and characters that change the direction of writing are replaced too; the zero-width joiners of
    scripts and emoji stay unchanged.
    """
    return "".join(char if char in LINE_ENDS or not _acts(char) else _spelled(char) for char in text)


def _acts(char: str) -> bool:
    category = unicodedata.category(char)
    bidirectional = unicodedata.bidirectional(char)
    return category in ("Cc", "Cs") or (category == "Cf" and bidirectional not in ("BN", "AN", "AL", "L", "R", "ON"))


def _spelled(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"
