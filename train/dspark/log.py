"""The log lines and the plot of a run that trains a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.logging.log import Reporter, shown, speed_fields
from train.logging.plot import Panel, Series, draw


class DrafterReporter(Reporter):
    """The ``Reporter`` of a run that trains a drafter, which plots the expected accepted length as ``tau.png``."""

    picture = "tau.png"
    drawn = ("kind", "tokens", "tau")

    def step_line(self, record: Mapping[str, Any]) -> str:
        return step_line(record)

    def evaluation_line(self, record: Mapping[str, Any]) -> str:
        return f"step={record['step']} held out: {_measured(record)} seconds={record['seconds']:.1f}"

    def draw(self, records: list[dict[str, Any]], path: Path) -> None:
        """Plot the expected accepted length against the number of training tokens."""
        chosen = {
            kind: [r for r in records if r["kind"] == kind and r["tau"] is not None] for kind in ("train", "valid")
        }
        series = [
            Series(kind, [r["tokens"] for r in some], [r["tau"] for r in some], kind) for kind, some in chosen.items()
        ]
        draw(path, [Panel("tokens", "expected accepted length (tokens per block)", series)])


def step_line(record: Mapping[str, Any]) -> str:
    """Format a step's record as a line of ``key=value`` pairs. The expert load is that of the least balanced layer."""
    load = record["expert_load"].get("text")
    return " ".join([
        f"step={record['step']}",
        _measured(record),
        *speed_fields(record),
        *([f"load={max(load['max_over_mean']):.2f}/{min(load['entropy']):.3f}"] if load else []),
    ])  # fmt: skip


def _measured(record: Mapping[str, Any]) -> str:
    names = ("loss", "ce", "l1", "confidence", "tau")
    alpha = ",".join(shown(value, ".3f") for value in record["alpha"])
    return " ".join(
        [*(f"{n}={shown(record[n], '.4f')}" for n in names), f"alpha={alpha}", f"ece={shown(record['ece'], '.3f')}"]
    )
