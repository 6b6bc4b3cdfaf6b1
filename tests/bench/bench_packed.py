"""LoRA on packed frozen weights beside LoRA on their values: memory and time. Run `python tests/bench/bench_packed.py`.

A model of 825 M parameters (conf/model/bench.yaml with hidden 512 and 64 experts of 1,024, 4 a token) is written once
in the released format. A process of its own for each way then loads it and makes a few steps of an adapter on all of
attention and experts. Memory is what the process has beyond what it had before loading; nothing is asserted.
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
import yaml

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from model import ForwardOptions, ModelConfig, build_model, load_pretrained, save_pretrained
from train.config.schema import LoraConfig
from train.lora import inject

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"hidden_size": 512, "moe_intermediate_size": 1024, "n_routed_experts": 64, "num_experts_per_tok": 4}
TARGETS = ["attention", "shared_experts", "experts"]


def sizes() -> dict:
    """The configuration of the model."""
    raw = yaml.safe_load((ROOT / "conf/model/bench.yaml").read_text())
    raw["text_config"] |= SIZES
    return raw


def write(folder: Path) -> None:
    """The checkpoint that both ways begin from."""
    save_pretrained(build_model(ModelConfig.from_dict(sizes())), folder, format="released")


class Peak:
    """The largest resident memory since `start`, in MiB beyond what the process had then."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark begins anew
        self.before = psutil.Process().memory_info().rss

    def now(self) -> float:
        return (psutil.Process().memory_info().rss - self.before) / 2**20

    def most(self) -> float:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return (int(line.split()[1]) * 1024 - self.before) / 2**20


def work(folder: Path, packed: bool, tokens: int, steps: int) -> None:
    """One way, in this process: prints its numbers as JSON."""
    torch.set_num_threads(1)
    peak = Peak()
    model = load_pretrained(folder, packed=packed, runtime=ForwardOptions(recompute=True))
    loading, loaded = peak.most(), peak.now()
    inject.add_adapter(model, LoraConfig(targets=TARGETS, rank=8, alpha=16.0, dropout=0.0), seed=0)
    trained = list(inject.trained_parameters(model).values())
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    ids = torch.randint(5, 4096, (1, tokens), generator=torch.Generator().manual_seed(0))
    seconds, losses = [], []
    for _ in range(steps):
        started = time.perf_counter()
        total = model.losses(ids, ids, model.loss_denominators(ids, ids)).total
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
        losses.append(float(total))
    print(json.dumps({"loading": loading, "held": loaded, "all": peak.most(), "step": min(seconds), "losses": losses}))


def main(tokens: int, steps: int) -> None:
    """Both ways one after the other, and the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "released"
        write(folder)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**20
        print(f"folder {size:,.0f} MiB; {steps} steps of {tokens} tokens, recomputed, one thread; MiB beyond the start")
        print("weights    peak loading    held    peak in all    beyond the folder    s a step")
        found = {}
        for kind in ("packed", "values"):
            command = [sys.executable, __file__, "--work", kind, "--folder", str(folder)]
            command += ["--tokens", str(tokens), "--steps", str(steps)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            row = found[kind] = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{kind:8} {row['loading']:14,.0f} {row['held']:7,.0f} {row['all']:14,.0f} {row['all'] - size:20,.0f} "
                f"{row['step']:11.2f}"
            )
        print(f"same losses to the last bit: {found['packed']['losses'] == found['values']['losses']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--work", choices=("packed", "values"))
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.folder, arguments.work == "packed", arguments.tokens, arguments.steps)
    else:
        main(arguments.tokens, arguments.steps)
