"""Draw the plots of these pages from the recorded numbers: ``python docs/plot.py [FOLDER]`` (or ``make docs``).

Reads ``docs/numbers/*.json``; writes one SVG per page that has plots into FOLDER (``docs/plots`` by default). The same
numbers and the same matplotlib give the same bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
COLOURS = ("#1f6fb4", "#d1622b", "#4a8f3c", "#7b5aa6")
STYLE = {
    "svg.hashsalt": "narrows",  # ids that do not change from run to run
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
}


def attention(numbers: dict[str, Any]) -> Figure:
    """Time and memory of a layer and of a whole step over the row length, sparse path and dense reference."""
    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3))
    columns = numbers["columns"]
    for axis, part, suffix, unit, title in (
        (axes[0], "layer", "seconds", "seconds", "one Reuse layer, forward and backward"),
        (axes[1], "step", "seconds", "seconds", "one training step"),
        (axes[2], "layer", "mib", "MiB", "one Reuse layer, peak memory"),
    ):
        for colour, path in zip(COLOURS, ("sparse", "dense"), strict=False):
            at = columns.index(f"{path}_{suffix}")
            points = [(row[0], row[at]) for row in numbers[part] if row[at] is not None]
            axis.plot(*zip(*points, strict=True), "o-", color=colour, label=path, markersize=4)
        axis.set(xscale="log", yscale="log", xlabel="tokens in a row", ylabel=unit, title=title)
        axis.title.set_size(9)
        lengths = [row[0] for row in numbers[part]]
        axis.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
        axis.minorticks_off()
    axes[0].legend(frameon=False)
    return figure


def decode(numbers: dict[str, Any]) -> Figure:
    """Decoding speed over the context, with the packed cache and without a cache."""
    figure, axis = pyplot.subplots(figsize=(5, 3))
    contexts = [row[0] for row in numbers["decode"]]
    for colour, at, label in ((COLOURS[0], 2, "packed cache"), (COLOURS[1], 3, "no cache")):
        axis.plot(contexts, [row[at] for row in numbers["decode"]], "o-", color=colour, label=label, markersize=4)
    axis.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="decoded tokens per second")
    axis.set_xticks(contexts, [f"{context // 1024}K" for context in contexts])
    axis.minorticks_off()
    axis.legend(frameon=False)
    return figure


def effort(numbers: dict[str, Any]) -> Figure:
    """Reasoning length and accuracy over the effort, before RL and after it under two seeds."""
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3))
    columns, rows = numbers["columns"], numbers["rows"]
    for axis, measure in zip(axes, ("length", "accuracy"), strict=True):
        for colour, arm in zip(("#8a8a8a", *COLOURS), ("before", "seed 0", "seed 1"), strict=False):
            at = columns.index(f"{measure} {arm}")
            axis.plot([row[0] for row in rows], [row[at] for row in rows], "o-", color=colour, label=arm, markersize=4)
        axis.set(xlabel="effort (60 and 90 are not trained by RL)", ylim=(0, None))
        axis.set_xticks([row[0] for row in rows])
    axes[0].set_ylabel("mean reasoning tokens")
    axes[1].set_ylabel("accuracy")
    axes[0].legend(frameon=False)
    return figure


def studies(numbers: dict[str, Any]) -> Figure:
    """Every seed of every arm of the studies, and the mean of each arm."""
    figure, axes = pyplot.subplots(2, 4, figsize=(13, 4.6))
    for axis, study in zip(axes.flat, numbers["studies"], strict=True):
        _arms(axis, study["arms"])
        axis.set(xlabel=study["measure"], title=study["title"])
        axis.title.set_size(9)
    return figure


def _arms(axis: Axes, arms: dict[str, list[float]]) -> None:
    for number, (colour, values) in enumerate(zip(COLOURS, arms.values(), strict=False)):
        axis.plot(values, [-number] * len(values), "o", color=colour, markersize=5, alpha=0.6)
        axis.plot(sum(values) / len(values), -number, "|", color=colour, markersize=18, markeredgewidth=2)
    axis.set_yticks([-number for number in range(len(arms))], list(arms))
    axis.set_ylim(0.6 - len(arms), 0.4)


PLOTS: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "attention": attention,
    "decode": decode,
    "effort": effort,
    "studies": studies,
}


def draw(folder: Path) -> list[Path]:
    """Draw every plot into ``folder``; returns the files."""
    matplotlib.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(STYLE):
        for name, plot in PLOTS.items():
            figure = plot(json.loads((HERE / "numbers" / f"{name}.json").read_text(encoding="utf-8")))
            figure.tight_layout()
            path = folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            pyplot.close(figure)
            written.append(path)
    return written


if __name__ == "__main__":
    for file in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "plots"):
        print(file)
