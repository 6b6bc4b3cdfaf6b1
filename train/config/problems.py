"""How a configuration is refused: one error that lists every problem."""

from __future__ import annotations

import json

from train.errors import InputError


class ConfigError(InputError):
    """The configuration cannot be used. The message lists every problem found (key, value, rule, remedy), then what
    they have in common, if anything.
    """

    def __init__(self, problems: list[str], common: str = ""):
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"{count} in the configuration:", *(f"  - {problem}" for problem in problems), common]
        super().__init__("\n".join(filter(None, lines)))


def problem(key: str, value: object, rule: str, remedy: str) -> str:
    """One line of a ``ConfigError``."""
    return f"{key} = {shown(value)}: {rule}. {remedy}"


def shown(value: object, limit: int = 80) -> str:
    """A value as people read it, cut at ``limit`` characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 3] + "..."
