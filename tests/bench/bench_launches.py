"""The operations that a micro-batch of the released layer schedule would launch on a GPU, by operation and by module.

    python tests/bench/bench_launches.py [--kernels triton] [--rows 15]

Counted without a GPU, as tests/model/test_launches.py says. The operations of the backward pass and of the losses
belong to no module ("-"); those of a recomputation are counted with their module.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.model.test_launches import LAYERS, micro_batch


def print_table(title: str, counts: Counter[str], rows: int) -> None:
    print(f"\n{title}")
    for name, count in counts.most_common(rows):
        print(f"{count:>7} {100 * count / counts.total():>5.1f} %  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", default=["plain", "triton"], choices=["plain", "triton"])
    parser.add_argument("--rows", type=int, default=15)
    arguments = parser.parse_args()
    for kernels in arguments.kernels:
        launches = micro_batch(kernels=kernels, fake=kernels == "triton")
        modules: Counter[str] = Counter()
        for (module, _), count in launches.launched_in.items():
            modules[module.removeprefix("layers.") or "-"] += count
        print(f"\nkernels={kernels}, {LAYERS} layers, forward, recomputation and backward: {launches.total} operations")
        print_table("by operation", launches.launched, arguments.rows)
        print_table("by module", modules, arguments.rows)


if __name__ == "__main__":
    main()
