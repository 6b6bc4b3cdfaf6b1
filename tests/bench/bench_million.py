"""A training step on a row of 1,048,576 tokens split over four processes, with the released candidate pool of 2,048
blocks of 8 entries. Run `make bench-million` (half an hour on two free cores), or a shorter row with `--length 65536
--ratio 3`.

The model is tiny: a Full layer that keeps candidate blocks, and a Reindex layer that selects among these blocks; ratio
16, one index head, 32 selected entries. The run fails if the pool does not restrict the Reindex layer. It takes 15 GB.

With `--equal` the same step is computed by one process and by several, in fp32 without fake quantisation; losses,
gradients, selections and candidates must be equal (2 processes, ratio 2 and 65,536 tokens unless given).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests import processes
from tests.model.candidate_pool import BLOCK, POOL, Row, compare, train

TIMEOUT = 4 * 3600.0


def million(row: Row, ranks: int) -> None:
    """Run one step and print time and memory of every rank."""
    entries = row.length // row.ratio
    print(
        f"{row.length:,} tokens on {ranks} processes, ratio {row.ratio}: {entries:,} entries in {entries // BLOCK:,} "
        f"blocks, of which a query keeps {POOL:,}; {row.heads} index head(s), {row.topk} selected entries",
        flush=True,
    )
    found = processes.run(ranks, train, row, ranks, timeout=TIMEOUT)
    columns = {"rank": 4, "tokens": 10, "forward s": 11, "backward s": 12, "peak MiB": 10, "in the step": 13}
    print("".join(f"{name:>{width}}" for name, width in {**columns, "restricted": 12}.items()))
    for rank, one in enumerate(found):
        forward, backward = one["seconds"]
        before, peak = one["resident"]
        print(
            f"{rank:>4}{one['tokens']:>10,}{forward:>11.0f}{backward:>12.0f}{peak / 2**20:>10,.0f}"
            f"{(peak - before) / 2**20:>13,.0f}{one['seen'].restricted:>12,}"
        )
    last, nats = found[-1]["seen"], sum(one["sums"]["lm_sum"] for one in found)
    targets = sum(int(one["sums"]["supervised"]) for one in found)
    print(f"loss {nats / targets:.4f} over {targets:,} targets")
    print(f"of the last {last.probed} queries {last.otherwise} select other entries than without candidates")
    assert sum(one["seen"].restricted for one in found) == row.length - POOL * BLOCK * row.ratio - row.ratio + 1
    assert last.otherwise > 0, "the pool changes no selection"
    assert all(gradient.isfinite().all() for one in found for gradient in one["gradients"].values())


def equal(row: Row, ranks: int) -> None:
    """Compare one process with several, and print the largest differences."""
    alone = processes.run(1, train, row, 1, timeout=TIMEOUT)
    for line in compare(alone[0], processes.run(ranks, train, row, ranks, timeout=TIMEOUT)):
        print(line)
    print(f"equal: {row.length:,} tokens of ratio {row.ratio} on 1 and on {ranks} processes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--equal", action="store_true", help="compare one process with several")
    parser.add_argument("--length", type=int, help="tokens in the row")
    parser.add_argument("--ratio", type=int, help="tokens of an entry")
    parser.add_argument("--ranks", type=int, help="processes")
    parser.add_argument("--heads", type=int, default=1, help="index heads")
    options = parser.parse_args()
    if options.equal:
        equal(Row(options.length or 65_536, options.ratio or 2, options.heads), options.ranks or 2)
        return
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000")  # glibc: give memory back; a third less is resident
    row = Row(options.length or 2**20, options.ratio or 16, options.heads, topk=32, rounding=True, keep=False)
    million(row, options.ranks or 4)


if __name__ == "__main__":
    main()
