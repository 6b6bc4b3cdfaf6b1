"""Draws the plots of a run as PNG files. Only this file imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

STYLES: dict[str, dict[str, Any]] = {"train": {"linewidth": 0.8, "alpha": 0.7}, "valid": {"marker": "o"}}
SIZE = (8.0, 4.5)  # size of a single panel in inches


@dataclass(frozen=True)
class Series:
    """The points of one curve; the kind of the curve (a key of ``STYLES``) determines how it is drawn."""

    kind: str
    x: Sequence[float]
    y: Sequence[float]
    label: str | None
    shade: float | None = None  # colour from 0 (dark) to 1 (bright); None: matplotlib's next colour
    joined: bool = True  # whether a line joins the points


@dataclass(frozen=True)
class Panel:
    """One plot: the labels of its axes and the curves drawn in it."""

    xlabel: str
    ylabel: str
    series: Sequence[Series]


def available() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(path: Path, panels: Sequence[Panel], size: tuple[float, float] = SIZE) -> None:
    """Draw several plots side by side into one PNG file; the last plot shows the legend."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for series in panel.series:
            style: dict[str, Any] = {**STYLES[series.kind], "label": series.label}
            if series.shade is not None:
                style["color"] = colormaps["viridis"](series.shade)
            if not series.joined:
                style["linestyle"] = ""
            axes.plot(series.x, series.y, **style)
        axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    FigureCanvasAgg(figure).print_png(path)
