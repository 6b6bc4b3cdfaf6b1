"""What a run can set about its optimizer, the learning rate aside: the three methods' numbers. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from .check import positive, require, share


@dataclass(frozen=True)
class MuonSettings:
    """Muon's numbers; the defaults are the report's.

    Attributes:
        momentum: factor of the momentum buffer.
        update_rms: root mean square of the update before the learning rate; matches Muon's step to AdamW's.
        bf16: run the iteration in bf16. None: bf16 on a GPU, fp32 on a CPU.

    Raises ValueError that lists every problem.
    """

    momentum: float = 0.95
    update_rms: float = 0.18
    bf16: bool | None = None

    def __post_init__(self) -> None:
        require("Muon", [share("momentum", self.momentum), positive("update_rms", self.update_rms)])


@dataclass(frozen=True)
class SinkhornSettings:
    """The numbers of Algorithm 1; the defaults are the report's.

    Attributes:
        momentum: decay factor b of the momentum average.
        iterations: number K of normalisations; odd ones act on rows, even ones on columns.
        tau: rows whose norm is at most tau times the mean row norm get no update.
        eps: added to every norm before dividing by it.
        update_rms: root mean square of a live row's update before the learning rate.

    Raises ValueError that lists every problem.
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
    """AdamW's numbers; the defaults are the report's. The small eps makes the update independent of the gradient's
    scale. Raises ValueError that lists every problem.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1.0e-20

    def __post_init__(self) -> None:
        require("AdamW", [share("beta1", self.beta1), share("beta2", self.beta2), positive("eps", self.eps)])


@dataclass(frozen=True)
class Settings:
    """The three methods' numbers; the defaults are the report's."""

    muon: MuonSettings = field(default_factory=MuonSettings)
    sinkhorn: SinkhornSettings = field(default_factory=SinkhornSettings)
    adamw: AdamWSettings = field(default_factory=AdamWSettings)
