"""LoRA on packed frozen weights beside LoRA on their values: memory and time. Run `python tests/bench/bench_packed.py`.

A model of 927 M parameters (conf/model/bench.yaml with hidden 512, 64 experts of 1,024, 4 a token, and an Engram table
of 102 M) is written once in the released format. A process of its own for each way then loads it and makes a few steps
of an adapter on all of attention and experts. Memory is what the process has beyond what it had before loading; nothing
is asserted.

Memory is counted without the pages of mapped files, which the operating system can drop at any time: while a folder is
read, up to its whole size counts as resident besides. The last lines compare the peak of the packed run with what it
should be: the bytes of the folder, one matrix unpacked, the adapter with gradients and optimizer state, and
activations, which are taken from the run on values.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, models

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from model import ForwardOptions, ModelConfig, build_model, load_pretrained, save_pretrained
from model.packed import PackedWeight
from train.config.schema import LoraConfig
from train.lora import inject

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"hidden_size": 512, "moe_intermediate_size": 1024, "n_routed_experts": 64, "num_experts_per_tok": 4}
WAYS = ("packed", "host", "values")  # host: packed, with Engram tables mapped from the files
ENGRAM = {  # one table of 102 M values
    "engram_layer_ids": [1],
    "engram_num_embeddings": [],
    "engram_vocab_size": 200_000,
    "engram_n_heads": 4,
    "engram_max_ngram_size": 3,
    "engram_head_dim": 64,
    "engram_compressed_vocab_size": 4096,
}
TARGETS = ["attention", "shared_experts", "experts"]


def sizes(**more: object) -> dict:
    """The configuration of the model."""
    raw = yaml.safe_load((ROOT / "conf/model/bench.yaml").read_text())
    raw["text_config"] |= SIZES | more
    return raw


def write(folder: Path) -> None:
    """The checkpoint that both ways begin from."""
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(4096)}, unk_token="w0"))
    built = build_model(ModelConfig.from_dict(sizes(**ENGRAM)), token_map=torch.arange(4096))
    save_pretrained(built, folder, words, format="released")


class Peak:
    """The largest memory of this process since `start`, without mapped files, in MiB beyond what it had then. A thread
    reads it every few milliseconds.
    """

    def __init__(self) -> None:
        self.before = self.largest = anonymous()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.largest = max(self.largest, anonymous())
            time.sleep(0.003)

    def now(self) -> float:
        return (anonymous() - self.before) / 2**20

    def most(self) -> float:
        """The largest memory since the last call."""
        found, self.largest = self.largest, anonymous()
        return (max(found, self.largest) - self.before) / 2**20


def anonymous() -> int:
    """The resident bytes of this process that are not pages of a mapped file."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def work(folder: Path, kind: str, tokens: int, steps: int) -> None:
    """One way, in this process: prints its numbers as JSON."""
    torch.set_num_threads(1)
    peak = Peak()
    runtime = ForwardOptions(recompute=True, tables="host" if kind == "host" else "device")
    model = load_pretrained(folder, packed=kind != "values", runtime=runtime)
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
    packed = [p for name, p in model.named_parameters() if isinstance(p, PackedWeight) and ".embed." not in name]
    matrices = [p.shape[-2:].numel() * 4 for p in packed] or [0]  # of a table, only rows are unpacked
    found = {"loading": loading, "held": loaded, "all": peak.most(), "step": min(seconds), "losses": losses}
    found["adapter"] = 16 * sum(parameter.numel() for parameter in trained) / 2**20
    print(json.dumps(found | {"matrix": max(matrices) / 2**20}))


def main(tokens: int, steps: int) -> None:
    """Both ways one after the other, and the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "released"
        write(folder)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**20
        print(f"folder {size:,.0f} MiB; {steps} steps of {tokens} tokens, recomputed, one thread; MiB beyond the start")
        print("weights    peak loading    held    peak in all    s a step")
        found = {}
        for kind in WAYS:
            command = [sys.executable, __file__, "--work", kind, "--folder", str(folder)]
            command += ["--tokens", str(tokens), "--steps", str(steps)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            row = found[kind] = json.loads(done.stdout.splitlines()[-1])
            print(f"{kind:8} {row['loading']:14,.0f} {row['held']:7,.0f} {row['all']:14,.0f} {row['step']:11.2f}")
        print(f"same losses to the last bit: {len({str(row['losses']) for row in found.values()}) == 1}")
        packed, values = found["packed"], found["values"]
        activations = values["all"] - values["held"] - values["adapter"]
        expected = size + packed["matrix"] + packed["adapter"] + activations
        print(
            f"expected: folder {size:,.0f} + a matrix {packed['matrix']:,.0f} + adapter with gradients and AdamW "
            f"{packed['adapter']:,.0f} + activations {activations:,.0f} = {expected:,.0f} MiB; "
            f"the packed run needs {packed['all'] / expected - 1:+.1%}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--work", choices=WAYS)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.folder, arguments.work, arguments.tokens, arguments.steps)
    else:
        main(arguments.tokens, arguments.steps)
