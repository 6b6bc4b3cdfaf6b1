"""Formats the log lines and tables, and draws the plots, of an RL run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.logging.log import Reporter, shown
from train.logging.plot import Panel, Series, draw

MEASURES = ("reward", "accuracy", "length")


class RlReporter(Reporter):
    """The ``Reporter`` of an RL run, which plots reward, accuracy and reasoning length as ``rl.png``."""

    picture = "rl.png"
    drawn = ("kind", "step", "efforts")

    def step_line(self, record: Mapping[str, Any]) -> str:
        return step_line(record)

    def evaluation_line(self, record: Mapping[str, Any]) -> str:
        return evaluation_line(record)

    def draw(self, records: list[dict[str, Any]], path: Path) -> None:
        """Plot reward, accuracy and reasoning length at each effort against the number of optimizer steps.

        Lines show the values on training prompts, and dots the values on held-out prompts.
        """
        efforts = sorted({int(effort) for record in records for effort in record["efforts"]})
        panels = []
        for name in MEASURES:
            series = [
                _series(records, kind, effort, name, number / max(len(efforts) - 1, 1))
                for number, effort in enumerate(efforts)
                for kind in ("train", "valid")
            ]
            panels.append(Panel("step", "reasoning tokens" if name == "length" else name, series))
        draw(path, panels, (13.0, 4.0))


def step_line(record: Mapping[str, Any]) -> str:
    """Format the record of a step as one line of ``key=value`` pairs, with the response length for each effort."""
    parts = [
        f"step={record['step']}",
        f"reward={record['reward']:.3f}",
        f"accuracy={record['accuracy']:.3f}",
        f"length={_by_effort(record, 'length', '.1f')}",
        *([f"zero_variance={record['zero_variance']}/{record['groups']}"] if "zero_variance" in record else []),
        *(f"{name}={record[name]:.3f}" for name in ("entropy", "clipped", "off_policy") if name in record),
        f"stale={record['stale']:.3f}",
        f"lag={record['version_lag']:.2f}",
        f"kl={record['kl']:.1e}",
        f"grad_norm={shown(record.get('grad_norm'), '.3f')}",
        f"lr={shown(record.get('lr'), '.1e')}",
        f"tokens={record['tokens']}",
        f"seconds={record['seconds']:.1f}",
        f"collect={record['collect_seconds'] / max(record['seconds'], 1e-9):.0%}",
    ]
    parts += [f"reward_{name}={count}" for name, count in sorted(record["failures"].items())]
    return " ".join([*parts, *_drafter(record.get("drafter", {}))])


def _drafter(record: Mapping[str, Any]) -> list[str]:
    """Return ``key=value`` texts of the drafter's record for the step line. ``accepted`` is the mean number of drafts
    that the policy accepted per forward pass of generation. ``tau`` (expected accepted length in tokens), ``ece``
    (calibration error) and ``alpha`` (acceptance rate of each slot) are measured in drafter training.
    """
    names = (("accepted", ".2f"), ("tau", ".3f"), ("ece", ".3f"))
    alpha = ",".join(shown(value, ".2f") for value in record.get("alpha", ()))
    return [
        *(f"{name}={shown(record[name], form)}" for name, form in names if name in record),
        *([f"alpha={alpha}"] if alpha else []),
    ]


def evaluation_line(record: Mapping[str, Any]) -> str:
    """Format the record of an evaluation as one line of ``key=value`` pairs, with every metric for each effort."""
    shares = [f"{name}={_by_effort(record, name, '.1f' if name == 'length' else '.3f')}" for name in MEASURES]
    failures = [f"reward_{name}={count}" for name, count in sorted(record["failures"].items())]
    return " ".join([f"step={record['step']}", "held out:", *shares, *failures, f"seconds={record['seconds']:.1f}"])


def table(first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """Make a Markdown table of the results on the held-out prompts before and after training, for each effort."""
    head = ["effort", *(f"{name} {when}" for name in MEASURES for when in ("before", "after"))]
    rows = []
    for effort in sorted(last["efforts"], key=int):
        cells = [(first["efforts"].get(effort, {}).get(m), last["efforts"][effort][m], m) for m in MEASURES]
        rows.append([effort, *(shown(v, ".1f" if m == "length" else ".3f") for *values, m in cells for v in values)])
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _series(records: list[dict[str, Any]], kind: str, effort: int, name: str, shade: float) -> Series:
    """Collect the values of one metric at one reasoning effort as a curve over steps."""
    chosen = [r for r in records if r["kind"] == kind and str(effort) in r["efforts"]]
    values = [r["efforts"][str(effort)][name] for r in chosen]
    label = f"effort {effort}" if kind == "valid" else None
    return Series(kind, [r["step"] for r in chosen], values, label, shade, joined=kind == "train")


def _by_effort(record: Mapping[str, Any], name: str, form: str) -> str:
    return ",".join(f"{effort}:{values[name]:{form}}" for effort, values in record["efforts"].items())
