"""Optimizer cost. Run `python tests/bench/bench_optim.py`; figures depend on the machine, so compare within a run.

Prints one Muon step over 64 experts of [512, 1024], batched and one matrix at a time, and one Sinkhorn step over a table
of which few rows are live, with and without leaving dead rows out. `optimizer_share` serves the step benchmark.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from optim import MuonSettings, SinkhornSettings
from optim.muon import muon_step
from optim.sinkhorn import balance, sinkhorn_step


def optimizer_share(optimizer_seconds: Sequence[float], step_seconds: Sequence[float]) -> float:
    """The optimizer's part of a training step, 0..1: ratio of the medians of times taken in the same run.

    `step_seconds` are whole steps, the optimizer's call included. Raises ValueError if either is empty.
    """
    if not optimizer_seconds or not step_seconds:
        raise ValueError("optimizer_share needs at least one timing of each kind")
    return median(optimizer_seconds) / median(step_seconds)


def seconds(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median time of a call after one warm-up call."""
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def bench_muon(experts: int, m: int, n: int, repeats: int, device: torch.device) -> tuple[float, float]:
    """Seconds of one Muon step over [experts, m, n]: as one stack, and as a loop over separate matrices."""
    weight, grad, momentum = (torch.randn(experts, m, n, device=device) for _ in range(3))
    numbers = {"lr": 1e-3, "weight_decay": 0.1, "settings": MuonSettings()}

    def batched() -> None:
        muon_step([weight], [grad], [momentum], [None], **numbers)

    def loop() -> None:
        for expert in range(experts):
            muon_step([weight[expert]], [grad[expert]], [momentum[expert]], [None], **numbers)

    return seconds(batched, repeats, device), seconds(loop, repeats, device)


def bench_sinkhorn(rows: int, columns: int, live: float, repeats: int, device: torch.device) -> tuple[float, float]:
    """Seconds of one Sinkhorn step over [rows, columns] with a share `live` of nonzero rows: as it is, and with the
    balancing run over all rows.
    """
    settings = SinkhornSettings()
    grad = torch.randn(rows, columns, device=device)
    grad[torch.rand(rows, device=device) >= live] = 0
    param, momentum = torch.zeros_like(grad), torch.zeros_like(grad)
    whole = torch.randn_like(grad)

    def gathered() -> None:
        sinkhorn_step(param, grad, momentum, lr=1e-3, settings=settings)

    def everything() -> None:
        momentum.lerp_(grad, 0.05)
        param.add_(balance(whole.clone(), None, settings).update(), alpha=-1e-3)

    return seconds(gathered, repeats, device), seconds(everything, repeats, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--experts", type=int, default=64)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    batched, loop = bench_muon(arguments.experts, 512, 1024, arguments.repeats, device)
    print(
        f"Muon step, {arguments.experts} experts of [512, 1024], {where}: "
        f"batched {batched:.3f} s, loop {loop:.3f} s, loop/batched {loop / batched:.2f}"
    )
    for live in (0.02, 0.2, 1.0):
        gathered, everything = bench_sinkhorn(200_000, 256, live, arguments.repeats, device)
        print(
            f"Sinkhorn step, table [200000, 256], {live:.0%} of rows live, {where}: "
            f"{gathered:.3f} s, balancing every row {everything:.3f} s, ratio {everything / gathered:.2f}"
        )


if __name__ == "__main__":
    main()
