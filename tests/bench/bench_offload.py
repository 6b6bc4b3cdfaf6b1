"""A checkpoint that is larger than the memory it may use, through `device_map="auto"`. Run
`python tests/bench/bench_offload.py`.

The model of bench_packed.py without its Engram table (825 M parameters) is written once in bf16 and once in the
released format. A process of its own for each way loads it, runs one forward pass over 512 tokens, and generates 16
tokens greedily. Memory is what the process has beyond what it had before loading; nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from model import ModelConfig, build_model, save_pretrained
from tests.bench.bench_packed import sizes

WAYS = ("whole", "disk")
FORMATS = ("bf16", "released")


class Peak:
    """The largest resident memory since `start`, with the pages of mapped files, in MiB beyond what the process had
    then.
    """

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark begins anew
        self.before = psutil.Process().memory_info().rss

    def now(self) -> float:
        return (psutil.Process().memory_info().rss - self.before) / 2**20

    def most(self) -> float:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return (int(line.split()[1]) * 1024 - self.before) / 2**20


def write(folder: Path) -> None:
    """The two checkpoints."""
    built = build_model(ModelConfig.from_dict(sizes()), dtype=torch.bfloat16)
    save_pretrained(built, folder / "bf16", format="plain")
    save_pretrained(built, folder / "released", format="released")


def work(folder: Path, way: str, limit: str) -> None:
    """One way, in this process: prints its numbers as JSON."""
    from transformers import AutoModelForCausalLM

    import model.huggingface  # noqa: F401  registers the class

    torch.set_num_threads(1)
    peak = Peak()
    options = (
        {"packed": False}
        if way == "whole"
        else {"max_memory": {"cpu": limit}, "offload_folder": folder.parent / "offload"}
    )
    started = time.perf_counter()
    loaded = AutoModelForCausalLM.from_pretrained(folder, device_map="auto" if way == "disk" else None, **options)
    found = {"load": time.perf_counter() - started, "loading": peak.most(), "held": peak.now()}
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    ids = torch.randint(5, 4096, (1, 512), generator=torch.Generator().manual_seed(0))
    started = time.perf_counter()
    with torch.no_grad():
        logits = loaded(ids).logits
    found |= {"forward": time.perf_counter() - started, "sum": float(logits.double().sum())}
    started = time.perf_counter()
    loaded.generate(ids[:, :64], max_new_tokens=16, do_sample=False, pad_token_id=2, eos_token_id=1)
    print(json.dumps({**found, "generate": time.perf_counter() - started, "running": peak.most()}))


def main(limit: str) -> None:
    """All ways one after the other, and the table."""
    with tempfile.TemporaryDirectory() as temporary:
        write(Path(temporary))
        print(f"max_memory {limit}; MiB beyond the process, seconds")
        heads = (
            "checkpoint",
            "weights",
            "file",
            "peak loading",
            "held",
            "peak running",
            "load",
            "512 tokens",
            "16 new",
        )
        print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
        for format in FORMATS:
            sums = set()
            folder = Path(temporary) / format
            file = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**20
            for way in WAYS:
                command = [sys.executable, __file__, "--folder", str(folder), "--way", way, "--limit", limit]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found = json.loads(done.stdout.splitlines()[-1])
                sums.add(found["sum"])
                memory = " | ".join(
                    f"{size:,.0f}" for size in (file, *(found[k] for k in ("loading", "held", "running")))
                )
                times = f"{found['load']:.1f} | {found['forward']:.1f} | {found['generate']:.1f}"
                print(f"| {format} | {way} | {memory} | {times} |", flush=True)
            print(f"logits {'equal' if len(sums) == 1 else 'differ'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--limit", default="200MB")
    given = parser.parse_args()
    work(given.folder, given.way, given.limit) if given.folder else main(given.limit)
