"""Optimizer cost. Run `python tests/bench/bench_optim.py`; figures depend on the machine, so compare within a run.

Prints one Muon step over 64 experts of [512, 1024], batched and one matrix at a time, the same for many small matrices,
and one Sinkhorn step over a table by its share of live rows. `optimizer_share` serves the step benchmark.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from optim import MuonSettings, SinkhornSettings
from optim.muon import muon_step
from optim.sinkhorn import sinkhorn_step


def optimizer_share(optimizer_seconds: Sequence[float], step_seconds: Sequence[float]) -> float:
    """The optimizer's part of a training step, 0..1: ratio of the medians of times taken in the same run.

    `step_seconds` are whole steps, the optimizer's call included. Raises ValueError if either is empty.
    """
    if not optimizer_seconds or not step_seconds:
        raise ValueError("optimizer_share needs at least one timing of each kind")
    return median(optimizer_seconds) / median(step_seconds)


def seconds(functions: Sequence[Callable[[], object]], repeats: int, device: torch.device) -> list[float]:
    """Shortest time of a call to each function, after one warm-up. They take turns, so that other work on the machine
    disturbs them alike.
    """
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function, taken in zip(functions, times, strict=True):
            _synchronize(device)
            start = time.perf_counter()
            function()
            _synchronize(device)
            taken.append(time.perf_counter() - start)
    return [min(taken[1:]) for taken in times]


def bench_muon(experts: int, m: int, n: int, repeats: int, device: torch.device) -> list[float]:
    """Seconds of one Muon step over [experts, m, n]: as one stack, and as a loop over separate matrices."""
    weight, grad, momentum = (torch.randn(experts, m, n, device=device) for _ in range(3))
    numbers = {"lr": 1e-3, "weight_decay": 0.1, "settings": MuonSettings()}

    def batched() -> None:
        muon_step([weight], [grad], [momentum], [None], **numbers)

    def loop() -> None:
        for expert in range(experts):
            muon_step([weight[expert]], [grad[expert]], [momentum[expert]], [None], **numbers)

    return seconds([batched, loop], repeats, device)


def bench_sinkhorn(rows: int, columns: int, live: float, repeats: int, device: torch.device) -> float:
    """Seconds of one Sinkhorn step over [rows, columns] of which a share `live` of the rows has ever had a gradient."""
    grad = torch.randn(rows, columns, device=device)
    grad[torch.rand(rows, device=device) >= live] = 0
    param, momentum = torch.zeros_like(grad), torch.zeros_like(grad)
    settings = SinkhornSettings()
    return seconds([lambda: sinkhorn_step(param, grad, momentum, lr=1e-3, settings=settings)], repeats, device)[0]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--experts", type=int, default=64)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    for count, m, n in ((arguments.experts, 512, 1024), (1024, 16, 64)):
        batched, loop = bench_muon(count, m, n, arguments.repeats, device)
        print(
            f"Muon step, {count} matrices of [{m}, {n}], {where}: "
            f"batched {batched:.3f} s, loop {loop:.3f} s, loop/batched {loop / batched:.2f}"
        )
    whole = bench_sinkhorn(200_000, 256, 1.0, arguments.repeats, device)
    print(f"Sinkhorn step, table [200000, 256], all rows live, {where}: {whole:.3f} s")
    for live in (0.2, 0.02):
        part = bench_sinkhorn(200_000, 256, live, arguments.repeats, device)
        print(f"Sinkhorn step, {live:.0%} of its rows live: {part:.3f} s, all/live {whole / part:.2f}")


if __name__ == "__main__":
    main()
