"""What README and the pages of ``docs/`` hold that can go stale: commands, snippets, links, paths, keys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = "configuration.md"
PROGRAMS = ("python", "narrows", "make", "torchrun", "deepspeed", "sbatch", "source")
LAUNCHERS = ("torchrun", "deepspeed", "sbatch")
ELSEWHERE = ("trl",)  # libraries whose snippets tests/interop runs, where they are installed
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language ("" for none), its text, and where it begins."""

    language: str
    text: str
    where: str


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def blocks(self) -> list[Block]:
        found = []
        for match in FENCE.finditer(self.text):
            line = self.text.count("\n", 0, match.start()) + 1
            found.append(Block(match[1], match[2], f"{self.name}:{line}"))
        return found

    @cached_property
    def prose(self) -> str:
        """The page without its fenced blocks."""
        return FENCE.sub("", self.text)

    @cached_property
    def inline(self) -> list[str]:
        """Every `code` of the prose."""
        return [match[1] for match in INLINE.finditer(self.prose)]

    @cached_property
    def anchors(self) -> set[str]:
        """What ``#...`` may name, as GitHub derives it from headings."""
        headings = re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}

    @cached_property
    def links(self) -> list[str]:
        return LINK.findall(self.prose)

    @cached_property
    def commands(self) -> list[tuple[str, list[str]]]:
        """(where, words) of every shell command, in blocks and in the prose."""
        found = [(block.where, words) for block in self.blocks if not block.language for words in _commands(block.text)]
        return found + [(self.name, words) for code in self.inline for words in _commands(code)]


def pages() -> list[Page]:
    """README, CONTRIBUTING and every page of docs/."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [Page(file) for file in files]


def all_commands() -> dict[tuple[str, ...], str]:
    """Every command once, and where it stands first."""
    found: dict[tuple[str, ...], str] = {}
    for page in pages():
        for where, words in page.commands:
            found.setdefault(tuple(words), where)
    return found


def snippets() -> list[Block]:
    """Every Python block, but those of libraries that other tests try."""
    blocks = [block for page in pages() for block in page.blocks if block.language == "python"]
    return [block for block in blocks if not any(f"from {name} import" in block.text for name in ELSEWHERE)]


def overrides_of(words: list[str] | tuple[str, ...]) -> list[str] | None:
    """The arguments that a command gives to ``python -m train``; None if it is another command."""
    words = list(words)
    if words[0] == "narrows":
        return words[1:]
    for start in (["python", "-m", "train"], ["--module", "train"], ["-m", "train"], ["slurm/train.sbatch"]):
        for at in range(len(words)):
            if words[at : at + len(start)] == start:
                return words[at + len(start) :]
    return None


def _commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell listing; other lines are what commands print."""
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"^(\w+=\S+ )+", "", line.strip())
        line = line.split(" # ")[0].split("  #")[0].strip()
        words = shlex.split(line) if line.split(" ")[0] in PROGRAMS and not line.endswith("...") else []
        names_a_program_only = len(words) < 2 or (words[0] in LAUNCHERS and overrides_of(words) is None)
        if not names_a_program_only:
            yield words
        elif line == "make":
            yield ["make"]
