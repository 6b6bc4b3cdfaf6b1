"""The settings of the three optimizer methods (the learning rate is set in schedule.py). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from .check import positive, require, share


@dataclass(frozen=True)
class MuonSettings:
    """The settings of Muon; the defaults are the values of the V4.1 report (arXiv 2609.19969).

    Attributes:
        momentum: decay factor of the momentum buffer.
        update_rms: root mean square of the update before it is multiplied by the learning rate; 0.18 makes Muon's
            updates about as large as AdamW's.
        bf16: whether the Newton-Schulz iteration runs in bf16. None means bf16 on a GPU and fp32 on a CPU.

    Raises ValueError that lists every invalid value.
    """

    momentum: float = 0.95
    update_rms: float = 0.18
    bf16: bool | None = None

    def __post_init__(self) -> None:
        require("Muon", [share("momentum", self.momentum), positive("update_rms", self.update_rms)])


@dataclass(frozen=True)
class SinkhornSettings:
    """The settings of Sinkhorn-balanced momentum (Algorithm 1 of the V4.1 report, arXiv 2609.19969); the defaults are
    the values of the report.

    Attributes:
        momentum: decay factor b of the moving average of gradients.
        iterations: number K of normalisations; the first, third, ... normalise rows, the others columns.
        tau: rows whose norm is at most tau times the mean row norm are not updated.
        eps: added to every norm before dividing by it.
        update_rms: root mean square of the update of an updated row, before it is multiplied by the learning rate.

    Raises ValueError that lists every invalid value.
    """

    momentum: float = 0.95
    iterations: int = 11
    tau: float = 1.0e-3
    eps: float = 1.0e-20
    update_rms: float = 0.18

    def __post_init__(self) -> None:
        rules = [
            share("momentum", self.momentum),
            (self.iterations >= 1, f"iterations: must be at least 1, got {self.iterations!r}"),
            (0 <= self.tau and isfinite(self.tau), f"tau: must be at least 0 and finite, got {self.tau!r}"),
            positive("eps", self.eps),
            positive("update_rms", self.update_rms),
        ]
        require("Sinkhorn", rules)


@dataclass(frozen=True)
class AdamWSettings:
    """The settings of AdamW; the defaults are the values of the V4.1 report (arXiv 2609.19969). Because eps is so
    small, the update does not depend on the scale of the gradient. Raises ValueError that lists every invalid value.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1.0e-20

    def __post_init__(self) -> None:
        require("AdamW", [share("beta1", self.beta1), share("beta2", self.beta2), positive("eps", self.eps)])


@dataclass(frozen=True)
class Settings:
    """The settings of the three optimizer methods; the defaults are the report's values."""

    muon: MuonSettings = field(default_factory=MuonSettings)
    sinkhorn: SinkhornSettings = field(default_factory=SinkhornSettings)
    adamw: AdamWSettings = field(default_factory=AdamWSettings)
