"""Measures the parts of the time from the launch of a process to its first optimizer step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import psutil


@dataclass
class StartTimes:
    """The seconds that each part of the start took, in order. The first part begins when the process was launched."""

    parts: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=lambda: psutil.Process().create_time())  # in the clock of time.time

    def mark(self, part: str) -> None:
        """Add the time since the previous call of ``mark`` to the part named ``part``."""
        now = time.time()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items())
        return f"from launch to the end of the first step: {sum(self.parts.values()):.1f} s = {parts}"
