"""The operations that a micro-batch and a decoding step of the released layer schedule would launch on a GPU, by
operation and by module.

    python tests/bench/bench_launches.py [--rows 15]

Counted without a GPU, as tests/model/test_launches.py says. The operations of the backward pass and of the losses
belong to no module ("-"); those of a recomputation are counted with their module.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.model.launches import Launches
from tests.model.test_launches import LAYERS, decoding_step, micro_batch


def print_table(title: str, counts: Counter[str], rows: int) -> None:
    print(f"\n{title}")
    for name, count in counts.most_common(rows):
        print(f"{count:>7} {100 * count / counts.total():>5.1f} %  {name}")


def print_tables(title: str, launches: Launches, rows: int) -> None:
    modules: Counter[str] = Counter()
    for (module, _), count in launches.launched_in.items():
        modules[module.removeprefix("layers.") or "-"] += count
    print(f"\n{title}: {launches.total} operations")
    print_table("by operation", launches.launched, rows)
    print_table("by module", modules, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=15)
    rows = parser.parse_args().rows
    for kernels in ("plain", "triton"):
        title = f"kernels={kernels}, {LAYERS} layers, forward, recomputation and backward"
        print_tables(title, micro_batch(kernels=kernels, fake=kernels == "triton"), rows)
    with pytest.MonkeyPatch.context() as patch:
        launches, moved, _ = decoding_step(patch)
    title = f"kernels=triton, {LAYERS} layers, decoding one token of two sequences, {moved} index tensors moved"
    print_tables(title, launches, rows)


if __name__ == "__main__":
    main()
