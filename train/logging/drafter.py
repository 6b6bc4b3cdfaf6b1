"""What a drafter's training prints and draws."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.logging.log import Reporter, shown


class DrafterReporter(Reporter):
    """A ``Reporter`` of expected accepted lengths; it draws ``tau.png``."""

    picture = "tau.png"

    def step_line(self, record: Mapping[str, Any]) -> str:
        return step_line(record)

    def evaluation_line(self, record: Mapping[str, Any]) -> str:
        return f"step={record['step']} held out: {_measured(record)} seconds={record['seconds']:.1f}"

    def draw(self, records: list[dict[str, Any]], path: Path) -> None:
        plot(records, path)


def step_line(record: Mapping[str, Any]) -> str:
    """One greppable line of ``key=value`` pairs; acceptance by slot, expert load of the worst stage."""
    load = record["expert_load"].get("text")
    return " ".join([
        f"step={record['step']}",
        _measured(record),
        f"grad_norm={record['grad_norm']:.3f}",
        f"lr={record['lr']:.3e}",
        f"tokens={record['tokens']}",
        f"tok/s={record['tokens_per_second']:.0f}",
        f"data_wait={record['data_wait']:.1%}",
        f"mem={record['memory_gib']:.2f}GiB",
        *([f"load={max(load['max_over_mean']):.2f}/{min(load['entropy']):.3f}"] if load else []),
    ])  # fmt: skip


def _measured(record: Mapping[str, Any]) -> str:
    names = ("loss", "ce", "l1", "confidence", "tau")
    alpha = ",".join(shown(value, ".3f") for value in record["alpha"])
    return " ".join(
        [*(f"{n}={shown(record[n], '.4f')}" for n in names), f"alpha={alpha}", f"ece={shown(record['ece'], '.3f')}"]
    )


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Expected accepted length over tokens, as a PNG: training as a line, held-out rows as dots."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for kind, style in (("train", {"linewidth": 0.8, "alpha": 0.7}), ("valid", {"marker": "o"})):
        chosen = [record for record in records if record["kind"] == kind and record["tau"] is not None]
        axes.plot([record["tokens"] for record in chosen], [record["tau"] for record in chosen], label=kind, **style)
    axes.set(xlabel="tokens", ylabel="expected accepted length (tokens a block)")
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(path)
