"""``task=plan``: prints the memory, the traffic and the time that a run needs (``train/planning`` computes them)."""

from __future__ import annotations

from train.config.schema import Config
from train.planning.report import report
from train.planning.resources import plan


def run(config: Config) -> None:
    """Print the plan for the run that ``config`` describes."""
    print(report(plan(config)))
