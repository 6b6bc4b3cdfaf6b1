"""The exception that refuses a configuration, with a message that lists all problems at once."""

from __future__ import annotations

import json

from train.errors import InputError


class ConfigError(InputError):
    """The configuration cannot be used. The message lists every problem that was found: key, value, rule, remedy.

    common: a last line of the message, which concerns all problems.
    """

    def __init__(self, problems: list[str], common: str = ""):
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"{count} in the configuration:", *(f"  - {problem}" for problem in problems), common]
        super().__init__("\n".join(filter(None, lines)))


def problem(key: str, value: object, rule: str, remedy: str) -> str:
    """Format one problem of a ``ConfigError``: key, value, the rule that the value breaks, and what to do."""
    return f"{key} = {shown(value)}: {rule}. {remedy}"


def shown(value: object, limit: int = 80) -> str:
    """Format a configuration value for a message, shortened to ``limit`` characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 3] + "..."
