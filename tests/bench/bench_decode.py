"""Decoding with the packed cache against running the whole sequence again; samples of one prompt against prompts that
share nothing; what the cache holds.

    python tests/bench/bench_decode.py [--lengths 1024 2048 ...] [--batch 1] [--threads 2]

conf/model/bench.yaml, random weights and prompts, fp32, greedy. A decode step passes one token of every sequence;
without a cache it passes all of them. Ratios compare cases of this one run; nothing is asserted. Bytes are those of the
tensors.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import yaml

from model import DeepseekV41, Generator, ModelConfig, Request, TextConfig, build_model
from model.cache.pages import Cache
from model.count import kv_bytes, window_kv_bytes

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [1024, 2048, 4096, 8192, 16384]


def bench_model() -> DeepseekV41:
    return build_model(ModelConfig.from_dict(yaml.safe_load((ROOT / "conf/model/bench.yaml").read_text("utf-8"))))


def best_seconds(run, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def decoding(model: DeepseekV41, prompts: torch.Tensor) -> tuple[float, float]:
    """Seconds of the prefill, best seconds of a decode step."""
    generator = Generator(model)
    for prompt in prompts.tolist():
        generator.submit(Request(tuple(prompt), 1000, temperature=0))
    prefill = best_seconds(generator.step, 1)
    return prefill, best_seconds(generator.step, 20)


@torch.no_grad()
def rerunning(model: DeepseekV41, prompts: torch.Tensor) -> float:
    """Best seconds of a forward over everything, which a decode step without a cache is."""
    return best_seconds(lambda: model(prompts), 1 if prompts.shape[1] > 4096 else 2)


def speed_table(lengths: list[int], batch: int, threads: int) -> None:
    model = bench_model()
    vocabulary = model.config.text.vocab_size
    print(f"\nDecoding {batch} sequence{'s' * (batch > 1)}, {threads} thread{'s' * (threads > 1)} (ratio: against the")
    print("first context); without a cache a token costs a forward over the whole context")
    names = f"{'context':>8} {'prefill tok/s':>14} {'decode tok/s':>13} {'ratio':>6} "
    print(names + f"{'no cache tok/s':>15} {'faster':>8}")
    first = None
    for length in lengths:
        prompts = torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
        prefill, step = decoding(model, prompts)
        again = rerunning(model, prompts)
        first = first or step
        row = f"{length:>8} {batch * length / prefill:>14.0f} {batch / step:>13.1f} {first / step:>6.2f} "
        print(row + f"{batch / again:>15.2f} {again / step:>7.0f}x", flush=True)


def sharing_table(lengths: list[int], samples: int, threads: int) -> None:
    """Samples of one prompt, as reinforcement learning asks for, against as many prompts that share nothing."""
    model = bench_model()
    vocabulary = model.config.text.vocab_size
    print(f"\n{samples} samples of 64 tokens, {threads} thread{'s' * (threads > 1)}:", end=" ")
    print("seconds to their first tokens, and in all")
    print(f"{'prompt':>8} {'one prompt':>18} {'unlike prompts':>18} {'ratios':>14}")
    for length in lengths:
        prompt = torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(0)).tolist()
        found = []
        for changed in (0, 1):
            generator, started = Generator(model), time.perf_counter()
            for seed in range(samples):
                first = (prompt[0] + changed * seed) % vocabulary
                generator.submit(Request((first, *prompt[1:]), 64, seed=seed))
            generator.step()
            begun = time.perf_counter() - started
            while generator.in_flight:
                generator.step()
            found.append((begun, time.perf_counter() - started))
        (one, whole), (apart, all_apart) = found
        times = f"{one:>9.2f} {whole:>8.2f} {apart:>9.2f} {all_apart:>8.2f}"
        print(f"{length:>8} {times} {apart / one:>6.1f}x {all_apart / whole:>5.1f}x", flush=True)


def bytes_table() -> None:
    """Measured on the released head sizes and schedule: one page of every Full layer written, without the weights."""
    config = TextConfig()
    cache = Cache(config)
    for stores, width in ((cache.main, config.head_dim), (cache.index, config.index_head_dim)):
        for layer, store in stores.items():
            store.fit(cache.page_tokens // config.ratio(layer), torch.zeros(1, width))
    print("\nCache of the released configuration")
    for name, stores in (("main KV", cache.main), ("index keys", cache.index)):
        measured = sum(store.nbytes for store in stores.values()) / cache.page_tokens
        print(f"{name:>34}: {measured:>9.1f} bytes a token")
    total = cache.entry_bytes() / cache.page_tokens
    print(f"{'both':>34}: {total:>9.1f} bytes a token (arithmetic: {sum(kv_bytes(config).values()):.1f})")
    plain = (3 / 2 + 1) * 2 * (config.head_dim + config.index_head_dim)
    print(f"{'the same unquantised, in bf16':>34}: {plain:>9.1f} bytes a token")
    print(f"{'windows of all layers':>34}: {window_kv_bytes(config) / 2**20:>9.2f} MiB a sequence, whatever its length")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    bytes_table()
    speed_table(arguments.lengths, arguments.batch, arguments.threads)
    sharing_table([128, 512, 1024], 8, arguments.threads)


if __name__ == "__main__":
    main()
