"""``task=plan``: what a job costs on a layout of GPUs, computed before machines are rented: ``train/planning``."""

from __future__ import annotations

from train.config.schema import Config
from train.planning.report import report
from train.planning.resources import plan


def run(config: Config) -> None:
    """Print the plan."""
    print(report(plan(config)))
