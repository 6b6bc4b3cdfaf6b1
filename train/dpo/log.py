"""Formats the log lines and draws the plot of a ``task=dpo`` run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.dpo.objective import PreferenceObjective
from train.logging.log import Reporter, speed_fields
from train.logging.plot import Panel, Series, draw

DRAWN = ("loss", "accuracy", "margin")


class PreferenceReporter(Reporter):
    """The ``Reporter`` of a run on preference pairs, which plots loss, accuracy and margin as ``dpo.png``."""

    picture = "dpo.png"
    drawn = ("kind", "tokens", *DRAWN)

    def step_line(self, record: Mapping[str, Any]) -> str:
        return " ".join([f"step={record['step']}", _measured(record), *speed_fields(record)])

    def evaluation_line(self, record: Mapping[str, Any]) -> str:
        return f"step={record['step']} held out: {_measured(record)} seconds={record['seconds']:.1f}"

    def draw(self, records: list[dict[str, Any]], path: Path) -> None:
        """Plot loss, accuracy and margin against the number of training tokens.

        Lines show the values on training pairs, and dots the values on held-out pairs.
        """
        kinds = {kind: [r for r in records if r["kind"] == kind] for kind in ("train", "valid")}
        panels = [
            Panel(
                "tokens",
                name,
                [Series(k, [r["tokens"] for r in rs], [r[name] for r in rs], k) for k, rs in kinds.items()],
            )
            for name in DRAWN
        ]
        draw(path, panels, (13.0, 4.0))


def _measured(record: Mapping[str, Any]) -> str:
    return " ".join([*(f"{name}={record[name]:.4f}" for name in PreferenceObjective.NAMES), f"pairs={record['pairs']}"])
