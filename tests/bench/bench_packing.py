"""Time of best-fit packing. Run `python tests/bench/bench_packing.py`; figures depend on the machine.

Prints the CPU seconds to pack 250,000, 500,000 and 1,000,000 documents into rows: short documents (log-normal lengths),
and documents of more than half a row with some of five rows, which leave a gap in almost every row.
"""

from __future__ import annotations

import time

import numpy as np

from data.packing import pack_rows

COUNTS = (250_000, 500_000, 1_000_000)


def lengths(kind: str, count: int, seq_len: int) -> np.ndarray:
    """Lengths of documents in tokens, int64 [count]."""
    numbers = np.random.default_rng(0)
    if kind == "short":
        return np.minimum(numbers.lognormal(6, 1, count).astype(np.int64) + 1, 4 * seq_len)
    found = numbers.integers(seq_len // 2, seq_len, count)
    found[::50] = 5 * seq_len
    return found


def main() -> None:
    print("documents " + " ".join(f"{count:>10,}" for count in COUNTS))
    for kind in ("short", "gaps"):
        for seq_len in (8192, 65536):
            taken = []
            for count in COUNTS:
                sizes = lengths(kind, count, seq_len)
                started = time.process_time()
                pack_rows(sizes, seq_len)
                taken.append(time.process_time() - started)
            print(f"{kind}, rows of {seq_len:,}: " + " ".join(f"{seconds:8.2f} s" for seconds in taken))


if __name__ == "__main__":
    main()
