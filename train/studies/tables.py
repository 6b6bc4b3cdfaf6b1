"""Formats the summary of a study as tables, for the screen and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from train.studies.settings import Study


def tables(study: Study, result: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Make the tables of a study. Returns a tuple (caption, column headers, rows of cells) for each table."""
    found = []
    if result["tuning"]:
        rows = [
            [name, study.tune_of(name).key, *(f"{value}: {loss:.4f}" for value, loss in losses.items())]
            for name, losses in result["tuning"].items()
        ]
        width = max(map(len, rows))
        header = ["arm", "setting", *["value: loss"] * (width - 2)]
        rows = [row + [""] * (width - len(row)) for row in rows]
        found.append((f"Tuning: validation loss on seed {result['seeds'][0]}", header, rows))
    header = ["arm", *study.measures, "tokens", "seconds", "CPU seconds"]
    rows = []
    for name, arm in result["arms"].items():
        tuned = "".join(f" ({key.split('.')[-1]} {value:g})" for key, value in (arm["tuned"] or {}).items())
        row = [name + tuned]
        for measure, settings in study.measures.items():
            values = " ".join(f"{numbers[measure]:.{settings.digits}f}" for numbers in arm["seeds"].values())
            row.append(f"{arm['mean'][measure]:.{settings.digits}f} ({values})")
        mean = arm["mean"]
        rows.append([*row, f"{mean['tokens']:,.0f}", f"{mean['seconds']:.0f}", f"{mean['cpu_seconds']:.0f}"])
    seeds = ", ".join(map(str, result["seeds"]))
    found.append((f"Result: mean (seeds {seeds})", header, rows))
    rows = [claim_row(claim, study.measures[claim["measure"]].digits) for claim in result["claims"]]
    if rows:
        found.append(("Claims", ["claim", "measure", "difference", "mean (per seed)", "right in", "verdict"], rows))
    rows = [recovery_row(part, study.measures[part["measure"]].digits) for part in result["recoveries"]]
    if rows:
        header = ["claim", "measure", "possible gain (per seed)", "arm", "its gain (per seed)", "recovered", "verdict"]
        found.append(("Gains", header, rows))
    return found


def claim_row(claim: Mapping[str, Any], digits: int) -> list[str]:
    deltas = " ".join(f"{delta:+.{digits}f}" for delta in claim["differences"])
    return [
        claim["text"],
        claim["measure"],
        f"{claim['arm']} - {claim['than']}",
        f"{claim['mean']:+.{digits}f} ({deltas})",
        f"{claim['right_in']} of {len(claim['differences'])} seeds",
        "holds" if claim["holds"] else "does not hold at this scale",
    ]


def recovery_row(part: Mapping[str, Any], digits: int) -> list[str]:
    verdicts = {None: "no effect to recover", True: "holds", False: "does not hold at this scale"}
    possible, gained = (
        f"{fmean(part[key]):+.{digits}f} ({' '.join(f'{gain:+.{digits}f}' for gain in part[key])})"
        for key in ("possible", "gained")
    )
    share = "-" if part["share"] is None else f"{part['share']:.0%}"
    return [part["text"], part["measure"], possible, part["arm"], gained, share, verdicts[part["holds"]]]


def markdown(study: Study, result: Mapping[str, Any]) -> str:
    lines = [f"### {study.title}"]
    for caption, header, rows in tables(study, result):
        cells = [header, ["---"] * len(header), *rows]
        lines += ["", f"{caption}:", "", *("| " + " | ".join(row) + " |" for row in cells)]
    return "\n".join([*lines, "", *(f"- {note}" for note in result["notes"])]).rstrip() + "\n"


def show(study: Study, result: Mapping[str, Any], console: Console) -> None:
    """Print the tables of a study on the screen."""
    console.print(study.title, style="bold")
    for caption, header, rows in tables(study, result):
        table = Table(title=caption, title_justify="left")
        for column in header:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in result["notes"]:
        console.print(f"- {note}", highlight=False)
