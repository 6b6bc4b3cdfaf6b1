"""``make docs-check``: run the commands of README and docs at tiny sizes, in a folder of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, all_commands, overrides_of, snippets

pytestmark = pytest.mark.slow
TINY = [
    "data.cache_dir=.cache/data",
    "logger.progress=false",
    "parallel.device=cpu",
]
SMALL_RUN = [
    "task.tokens=600",
    "task.eval_every=100",
    "optim.schedule.constant_until_tokens=600",
    "checkpoint.every=100",
]
OWN_MODEL = ["model=tiny", "model.text_config.vocab_size=600", "task.seq_len=64", "task.micro_batch=1"]
OWN_TEXT = ["data.source=text", "data.paths=[texts]"]
RL = [
    "task.seq_len=256",
    "rl.prompts=2",
    "rl.efforts=[50]",
    "rl.samples=[2]",
    "rl.eval_efforts=[50]",
    "rl.eval_prompts=2",
    "rl.max_tokens=8",
    "rl.in_flight=4",
    "rl.ahead=0",
]
COMMANDS = [(" ".join(words), overrides) for words in all_commands() if (overrides := overrides_of(words)) is not None]
# Servers stand in tests/train/rl/test_http.py, data sets of the hub in tests/data/test_sources.py, mixtures in
# tests/data/test_mixture.py.
MOST_PROCESSES = 4
NEEDS_MORE = ("rollout=sglang", "rollout=vllm", "data.source=hub", "data.mixture=")


def test_snippets(workplace: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(workplace)
    for block in snippets():
        exec(compile(block.text, block.where, "exec"), {})


@pytest.mark.parametrize("command, overrides", COMMANDS, ids=[command[:90] for command, _ in COMMANDS])
def test_command(command: str, overrides: list[str], workplace: Path, tmp_path: Path):
    """As the command line runs it: exit code 0, and the last lines of a finished run."""
    if any(word.startswith(NEEDS_MORE) for word in overrides) or command.startswith("sbatch"):
        pytest.skip("needs inference servers, a hub or a Slurm; composed in test_docs.py")
    if _processes(command) > MOST_PROCESSES:
        pytest.skip("is for a node of GPUs; composed in test_docs.py")
    for item in workplace.iterdir():
        if item.name == "runs":
            shutil.copytree(item, tmp_path / "runs", copy_function=os.link)
        elif item.name != ".cache":
            (tmp_path / item.name).symlink_to(item)
    if any(word.startswith("adapter=") for word in overrides):
        train(tmp_path, ["task=sft", "lora=all", "init_from=FOLDER", "data.paths=[chats.jsonl]"])
    shown = train(tmp_path, overrides, _processes(command))
    trains = _task(overrides) in ("pretrain", "sft", "rl", "distill", "distill_data", "dspark", "dpo")
    if trains and not any(word.startswith("--") for word in overrides):
        assert "metrics:" in shown


def train(folder: Path, overrides: list[str], processes: int = 1) -> str:
    """Run the trainer at a tiny size; what it prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    result = subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), "-m", "train", *overrides, *_sizes(overrides)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


def _processes(command: str) -> int:
    words = command.split()
    return int(words[words.index("--nproc-per-node") + 1]) if words[0] == "torchrun" else 1


def _task(overrides: list[str]) -> str:
    return next((word.removeprefix("task=") for word in overrides if word.startswith("task=")), "pretrain")


def _sizes(overrides: list[str]) -> list[str]:
    """What makes the run of a command tiny without changing what it shows."""
    task, started = _task(overrides), any(word.startswith("init_from=") for word in overrides)
    if task in ("convert", "merge", "plan", "chat", "generate", "eval") or any(
        word.startswith("--") for word in overrides
    ):
        return ["processes=2"] if "processes=8" in overrides else []
    extra = [*TINY, *SMALL_RUN]
    if task in ("rl", "distill"):
        return [*extra, *[word for word in RL if task == "rl" or not word.startswith("rl.ahead")]]
    ranks = next((int(word[-1]) for word in overrides if word.startswith("parallel=ep")), 1)
    silent = task in ("dspark", "dpo", "distill_data")
    extra += [f"task.global_batch_rows={2 * ranks}", f"task.sample_tokens={0 if silent else 4}"]
    if task in ("sft", "dpo"):
        return [*extra, "task.seq_len=64", "data.validation_share=0.2"]
    if started:
        return [*extra, "task.seq_len=64", "data.validation_share=0.3", "data.validation_rows=4"]
    if task == "distill_data":  # the vocabulary of its teacher
        text = ["data.validation_share=0.3", "data.validation_rows=4"]
        return [*extra, "model=tiny", "model.text_config.vocab_size=4096", "task.seq_len=64", *text]
    if "data.source=image_text" in overrides:  # needs a vision tower, and has too little text for a tokenizer
        return [*extra, "data.tokenizer=FOLDER", "model.text_config.vocab_size=4096", "data.validation_share=0.3"]
    if any(word.startswith("task.eval_tasks=") for word in overrides):
        extra.append("model.text_config.max_position_embeddings=2048")  # its prompts have 1,024 tokens and more
    if any(word.startswith("data.vocab_size=") for word in overrides):
        extra.append("data.vocab_size=600")
    named = any(word.startswith("data.source=") for word in overrides)
    return [*extra, *OWN_MODEL, "data.validation_share=0.3", "data.validation_rows=4", *([] if named else OWN_TEXT)]
