"""The learning-rate schedule: a pure function of the number of steps and tokens trained so far (V4.1 report, arXiv
2609.19969, optimisation).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

from .check import positive, require


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule: linear warm-up over steps, constant up to a token count, cosine decay, and then a
    constant floor.

    Attributes:
        peak: learning rate after warm-up (report: 2.6e-4).
        floor: learning rate at the end of the decay (report: 2.6e-5).
        warmup_steps: steps of the linear rise; the last of them runs at the peak (report: 2000).
        constant_until_tokens: number of trained tokens at which the decay starts (report: 28e12).
        decay_until_tokens: number of trained tokens at which the decay ends (report: 40e12).
        vision_factor: factor of the vision tower's learning rate once the decay has started; until then the vision
            tower is frozen. The report says that this learning rate is "smaller" but gives no number; the default 0.1
            is our choice.

    Raises ValueError that lists every invalid value.
    """

    peak: float
    floor: float
    warmup_steps: int
    constant_until_tokens: float
    decay_until_tokens: float
    vision_factor: float = 0.1

    def __post_init__(self) -> None:
        rules = [
            positive("peak", self.peak),
            (0 <= self.floor <= self.peak, f"floor: must lie in [0, peak={self.peak!r}], got {self.floor!r}"),
            (self.warmup_steps >= 0, f"warmup_steps: must be at least 0, got {self.warmup_steps!r}"),
            (
                self.constant_until_tokens >= 0,
                f"constant_until_tokens: must be at least 0, got {self.constant_until_tokens!r}",
            ),
            (
                self.decay_until_tokens >= self.constant_until_tokens,
                f"constant_until_tokens: must be at most decay_until_tokens={self.decay_until_tokens!r} (the length of "
                f"the run by default), got {self.constant_until_tokens!r}; in a shorter run, lower it too",
            ),
            (
                self.vision_factor >= 0,
                f"vision_factor: must be at least 0 (0 keeps the tower frozen), got {self.vision_factor!r}",
            ),
        ]
        require("learning-rate schedule", rules)

    def lr(self, step: int, tokens: int) -> float:
        """Learning rate of the next step, after `step` finished steps and `tokens` trained tokens."""
        warmup = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return warmup * self._after_warmup(tokens)

    def factors(self, tokens: int) -> dict[str, float]:
        """The learning-rate factor of each named schedule (see `Rule.schedule`) after `tokens` trained tokens; 0 means
        frozen.
        """
        return {"vision": self.vision_factor if tokens >= self.constant_until_tokens else 0.0}

    def _after_warmup(self, tokens: int) -> float:
        if tokens <= self.constant_until_tokens:
            return self.peak
        if tokens >= self.decay_until_tokens:
            return self.floor
        progress = (tokens - self.constant_until_tokens) / (self.decay_until_tokens - self.constant_until_tokens)
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + cos(pi * progress))
