"""Toy models trained by the command line, exported and converted as a user would; built once for all clients."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from model import DeepseekV41, load_pretrained
from model.generation import Request, generate

os.environ.setdefault("HF_HUB_OFFLINE", "1")

REPOSITORY = Path(__file__).resolve().parents[2]
FORMATS = ("plain", "bf16", "released")
# Sizes that whole quantisation groups divide: other implementations round nothing in a group that is cut short.
SIZES = dict(
    hidden_size=64,
    head_dim=64,
    qk_rope_head_dim=16,
    q_lora_rank=64,
    o_lora_rank=32,
    moe_intermediate_size=64,
    index_head_dim=32,
    hc_mult=4,
    hc_sinkhorn_iters=20,
)
VISION = dict(
    num_hidden_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    intermediate_size=48,
    patch_size=4,
    downsample_ratio=3,
    max_image_tokens=64,
    min_pixels=144,
    max_wh_ratio="null",
)


@dataclass(frozen=True)
class Toy:
    """The checkpoint folders of one trained model, by format."""

    folder: Path

    def __getitem__(self, format: str) -> Path:
        return self.folder / ("export" if format == "plain" else format)

    def load(self, format: str) -> DeepseekV41:
        """The model as this project computes it, in fp32."""
        return load_pretrained(self[format])


def run(*overrides: str) -> None:
    command = [sys.executable, "-m", "train", *overrides]
    done = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def trained(folder: Path, steps: int, *overrides: str) -> Toy:
    """A toy trained for some steps of 512 tokens, exported by the trainer and converted by `task=convert`."""
    sizes = [f"model.text_config.{key}={value}" for key, value in SIZES.items()]
    run(
        "task=pretrain",
        "name=toy",
        f"output={folder}",
        "model=tiny",
        "optim=report",
        *sizes,
        "task.seq_len=128",
        "task.micro_batch=4",
        "task.global_batch_rows=4",
        f"task.tokens={steps * 512}",
        "task.eval_every=100000",
        "task.sample_tokens=0",
        "data.vocab_size=512",
        f"data.cache_dir={folder}/cache",
        "optim.schedule.peak=5.0e-3",
        "optim.schedule.floor=5.0e-4",
        "optim.schedule.warmup_steps=10",
        f"optim.schedule.constant_until_tokens={steps * 256}",
        f"optim.schedule.decay_until_tokens={steps * 512}",
        "checkpoint.every=100000",
        "checkpoint.export=plain",
        "logger.progress=false",
        "parallel.device=cpu",
        *overrides,
    )
    toy = Toy(folder / "toy")
    for format in FORMATS[1:]:
        run("task=convert", f"src={toy['plain']}", f"dst={toy[format]}", f"format={format}")
    return toy


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Modules of this Python's standard library."""
    folder = tmp_path_factory.mktemp("corpus")
    names = "abc bisect copy glob heapq operator queue sched shlex string textwrap token"
    for name in names.split():
        text = Path(os.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def text_toy(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Text only, no Engram: what mlx-lm knows."""
    return trained(
        tmp_path_factory.mktemp("text"),
        160,
        "model.text_config.engram_layer_ids=[]",
        "data.source=text",
        f"data.paths=[{corpus}]",
        f"data.validation_paths=[{corpus}/token.txt]",
        "data.validation_rows=4",
    )


@pytest.fixture(scope="session")
def full_toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Everything: Engram, and a vision tower trained on images of digits."""
    pytest.importorskip("sklearn", reason="scikit-learn has the digits")
    vision = ",".join(f"{key}:{value}" for key, value in VISION.items())
    return trained(
        tmp_path_factory.mktemp("full"),
        40,
        "model.text_config.engram_head_dim=32",
        f"+model.vision_config={{{vision}}}",
        "data.source=digits",
    )


@pytest.fixture(scope="session")
def drafter_toy(full_toy: Toy) -> Toy:
    """The toy with everything and a drafter that was trained for it for some steps."""
    shape = "num_nextn_predict_layers: 2, dspark_target_layer_ids: [2, 4, 5], dspark_block_size: 4, "
    shape += "dspark_noise_token_id: 511, dspark_markov_rank: 32, dspark_n_routed_experts: 4, "
    shape += "dspark_num_experts_per_tok: 2"
    run(
        "task=dspark",
        "name=drafter",
        f"output={full_toy.folder}",
        f"init_from={full_toy['plain']}",
        f"dspark.drafter={{{shape}}}",
        "data.source=digits",
        f"data.cache_dir={full_toy.folder}/cache",
        "task.seq_len=128",
        "task.micro_batch=4",
        "task.global_batch_rows=4",
        "task.tokens=5000",
        "task.eval_every=100000",
        "dspark.tokens_per_anchor=1",
        "optim.schedule.peak=5.0e-3",
        "checkpoint.every=100000",
        "logger.progress=false",
        "parallel.device=cpu",
    )
    toy = Toy(full_toy.folder / "drafter")
    for format in FORMATS[1:]:
        run("task=convert", f"src={toy['plain']}", f"dst={toy[format]}", f"format={format}")
    return toy


@pytest.fixture(scope="session")
def passages(corpus: Path, text_toy: Toy) -> list[list[int]]:
    """Token ids of 4 real passages of 120 tokens, BOS in front."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(text_toy["plain"])
    texts = [(corpus / f"{name}.txt").read_text() for name in ("heapq", "copy", "shlex", "abc")]
    return [ids[:120] for ids in tokenizer(texts).input_ids]


def greedy(model: DeepseekV41, prompt: list[int], count: int) -> list[int]:
    (sample,) = generate(model, [Request(tuple(prompt), count, temperature=0.0)])
    return sample.tokens


def assert_agree(ours: Tensor, theirs: Tensor, tolerance: float = 1e-3, share: float = 0.9) -> None:
    """Logits [..., V]: the likeliest token is the same, and they are equal within `tolerance` for at
    least `share` of the tokens.

    Prints what was found (`make interop ARGS=-s`). A rounding difference of 1e-7 may take a value of an FP4 group to
    the next one, which moves a token's logits more.
    """
    difference = (ours - theirs).abs().amax(-1).flatten()
    largest, median = difference.max(), difference.median()
    print(f"\nlogits of {len(difference)} tokens: largest difference {largest:.1e}, median of tokens {median:.1e}")
    assert median <= tolerance / 10, f"median {median}"
    assert (difference <= tolerance).float().mean() >= share, f"{(difference > tolerance).sum()} of {len(difference)}"
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() >= 0.98
