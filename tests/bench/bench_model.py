"""Time and peak memory of the linear-cost attention path against the dense reference.

    python -m tests.bench.bench_model [--lengths 1024 2048 ...] [--threads 2] [--parts layer step]

Rows: one Reuse layer (forward and backward) and one whole training step (forward, backward, AdamW) of
conf/model/bench.yaml, batch 1, fp32. Every case runs in a process of its own, so that its peak memory is its own:
resident memory above what the process held before the case. Ratios compare cases of this one run; nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
import yaml

from model import ForwardOptions, ModelConfig, build_model
from model.attention import Attention, CrossLayerState
from model.layout import build_layout
from optim import Optimizer, Settings, assign
from train.param_groups import adamw_rules

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [1024, 2048, 4096, 8192, 16384]
REUSE_LAYER = 6


def bench_config() -> ModelConfig:
    return ModelConfig.from_dict(yaml.safe_load((ROOT / "conf/model/bench.yaml").read_text(encoding="utf-8")))


def layer_case(path: str, length: int):
    """One Reuse layer over random entries and a random causal selection."""
    config = bench_config().text
    torch.manual_seed(0)
    layer = Attention(config, REUSE_LAYER)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    layout = build_layout(config, torch.zeros(1, length, dtype=torch.int64))
    seen = torch.arange(1, length + 1)
    chosen = (torch.rand(length, config.index_topk) * seen[:, None]).to(torch.int32)
    shared = CrossLayerState(compressed_kv=torch.randn(length, config.head_dim), topk_indices=chosen)
    x = torch.randn(length, config.hidden_size, requires_grad=True)
    runtime = ForwardOptions(attention=path)

    def run() -> None:
        layer(x, layout, shared, runtime).output.sum().backward()

    return run


def step_case(path: str, length: int):
    """One training step on random tokens."""
    config = bench_config()
    model = build_model(config, ForwardOptions(attention=path))
    optimizer = Optimizer(assign(model.named_parameters(), adamw_rules(config, engram_lr_factor=5.0)), Settings())
    optimizer.set_lr(1e-4)
    ids = torch.randint(0, config.text.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    denominators = model.loss_denominators(ids, ids)

    def run() -> None:
        model.losses(ids, ids, denominators).total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def measure(part: str, path: str, length: int) -> dict[str, float]:
    """Best seconds of several runs, and MiB of resident memory above the start of the case."""
    before = _peak_mib()
    run = {"layer": layer_case, "step": step_case}[part](path, length)
    run()
    best = float("inf")
    for _ in range(5 if part == "layer" and path == "sparse" else 3 if length <= 4096 else 1):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return {"seconds": best, "mib": _peak_mib() - before}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def dense_gib(part: str, length: int) -> float:
    """Rough peak of the dense path: score-sized tensors alive at once (layers keep theirs until the backward)."""
    config = bench_config().text
    scores = config.num_attention_heads * length * 2 * length * 4 / 2**30
    return scores * (6 if part == "layer" else 3 * config.num_hidden_layers)


def run_case(part: str, path: str, length: int, threads: int) -> dict[str, float] | str:
    """The measurement from a fresh process, or why there is none."""
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 2**30
    if path == "dense" and dense_gib(part, length) > 0.8 * have:
        return f"needs about {dense_gib(part, length):.0f} GiB"
    command = [
        sys.executable,
        "-m",
        "tests.bench.bench_model",
        "--case",
        part,
        path,
        str(length),
        "--threads",
        str(threads),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        return f"failed ({done.returncode})"
    return json.loads(done.stdout.splitlines()[-1])


def table(part: str, lengths: list[int], threads: int) -> None:
    title = {"layer": "One Reuse layer, forward and backward", "step": "One training step"}[part]
    print(f"\n{title}, {threads} thread{'s' * (threads > 1)} (ratio: against half the length)")
    head = f"{'S':>6} {'sparse s':>9} {'ratio':>6} {'tokens/s':>9} {'MiB':>7} {'ratio':>6} | "
    print(head + f"{'dense s':>9} {'MiB':>7} {'dense/sparse':>13}")
    before = None
    for length in lengths:
        sparse = run_case(part, "sparse", length, threads)
        dense = run_case(part, "dense", length, threads)
        if isinstance(sparse, str):
            print(f"{length:>6} {sparse}")
            continue
        ratios = ["", ""]
        if before is not None:
            ratios = [f"{sparse[k] / before[k]:.2f}" for k in ("seconds", "mib")]
        before = sparse
        row = f"{length:>6} {sparse['seconds']:>9.3f} {ratios[0]:>6} {length / sparse['seconds']:>9.0f} "
        row += f"{sparse['mib']:>7.0f} {ratios[1]:>6} | "
        if isinstance(dense, str):
            row += dense
        else:
            row += f"{dense['seconds']:>9.3f} {dense['mib']:>7.0f} {dense['seconds'] / sparse['seconds']:>12.1f}x"
        print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--parts", nargs="+", choices=["layer", "step"], default=["layer", "step"])
    parser.add_argument("--case", nargs=3, metavar=("PART", "PATH", "LENGTH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.case:
        part, path, length = arguments.case
        print(json.dumps(measure(part, path, int(length))))
        return
    for part in arguments.parts:
        table(part, arguments.lengths, arguments.threads)


if __name__ == "__main__":
    main()
