"""``task=plan``: prints the memory, the traffic and the time that a run needs (``train/planning`` computes them)."""

from __future__ import annotations

from train.config.schema import Config
from train.planning.job import as_planned, job_of, settings
from train.planning.report import report
from train.planning.resources import plan
from train.planning.search import fitting, search_report


def run(config: Config) -> None:
    """Print the plan of the configured layout; with ``plan.search``, also print other layouts that fit."""
    config = as_planned(config)
    job = job_of(config)
    print(report(plan(config, job)))
    if settings(config).search:
        print(search_report(config, list(fitting(config, job))))
