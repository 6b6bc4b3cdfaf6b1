"""``accelerate launch`` starts two processes: of ``python -m train``, and of a script with a ``Trainer``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
# `accelerate` wants MPI for several processes on CPUs; as MULTI_GPU it starts them by torchrun's launcher, and
# `parallel.device=cpu` or `use_cpu=True` keeps them off GPUs.
CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 1
num_processes: 2
machine_rank: 0
mixed_precision: 'no'
use_cpu: false
main_process_port: {port}
"""
TRAINER = """
import sys, torch
sys.path.insert(0, "tests/model")
from tiny import tiny_model, tokens
from transformers import Trainer, TrainingArguments
from model.huggingface import DeepseekV41Config, DeepseekV41ForCausalLM
from model.huggingface.counts import count_whole_steps

class Rows(torch.utils.data.Dataset):
    ids = tokens(16, 16)
    def __len__(self): return len(self.ids)
    def __getitem__(self, row):  # unequal numbers of tokens and of targets
        labels, mask = self.ids[row].clone(), (torch.arange(16) < 16 - row % 4 * 4).long()
        labels[: row % 3 * 2] = -100
        return dict(input_ids=self.ids[row], labels=labels.masked_fill(mask == 0, -100), attention_mask=mask)

core = tiny_model()
model = DeepseekV41ForCausalLM(DeepseekV41Config(**core.config.to_dict()), core)
processes = int(sys.argv[2])
arguments = TrainingArguments(
    output_dir=sys.argv[1], optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0,
    max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
    per_device_train_batch_size=4 // processes, ddp_backend="gloo" if processes > 1 else None,
    train_sampling_strategy="sequential", ddp_find_unused_parameters=True,
)
trainer = Trainer(model, arguments, train_dataset=Rows())
count_whole_steps(trainer)
trainer.train()
if trainer.is_world_process_zero():
    torch.save(core.state_dict(), f"{sys.argv[1]}/{processes}.pt")
"""


def launched(command: list[str], config: Path | None = None) -> str:
    start = [sys.executable]
    if config is not None:
        start += ["-m", "accelerate.commands.launch", "--config_file", str(config)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*start, *command], cwd=ROOT, env=environment, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def two_processes(tmp_path: Path) -> Path:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "accelerate.yaml").write_text(CONFIG.format(port=port))
    return tmp_path / "accelerate.yaml"


def test_a_run_of_two_processes_has_the_losses_of_one(corpus: Path, two_processes: Path, tmp_path: Path) -> None:
    options = ["task=pretrain", "model=tiny", "data.source=text", f"data.paths=[{corpus}/text]", f"output={tmp_path}"]
    options += [f"data.cache_dir={corpus}/cache", "data.validation_share=0.3", "data.validation_rows=4"]
    options += ["task.tokens=1000", "task.seq_len=64", "task.micro_batch=1", "task.global_batch_rows=4"]
    options += ["task.sample_tokens=0", "data.vocab_size=512", "parallel.device=cpu", "logger.progress=false"]
    launched(["-m", "train", *options, "name=one"])
    launched(["-m", "train", *options, "name=two", "parallel.world_size=2"], two_processes)
    found = []
    for name in ("one", "two"):
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        found.append([record["loss"] for record in records])
    assert len(found[0]) == len(found[1]) >= 5
    assert max(abs(a - b) for a, b in zip(*found, strict=True)) < 1e-5


def test_trainer_on_two_processes_has_the_step_of_one(two_processes: Path, tmp_path: Path) -> None:
    """The whole method: also indexers, and router biases, whose load is summed over the processes."""
    (tmp_path / "script.py").write_text(TRAINER)
    launched([str(tmp_path / "script.py"), str(tmp_path), "1"])
    launched([str(tmp_path / "script.py"), str(tmp_path), "2"], two_processes)
    one, two = (torch.load(tmp_path / f"{count}.pt") for count in (1, 2))
    for name, tensor in one.items():
        if name.endswith((".bias", "bias_vl")) and ".gate." in name:
            assert torch.equal(tensor, two[name]), name
        else:
            torch.testing.assert_close(two[name], tensor, atol=2e-5, rtol=1e-3, msg=name)
