"""Preference optimisation over two processes, with experts split, or with dense matrices divided, and a packed
reference: as on one process.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import steps
import torch
from ranks import Group

from model import save_pretrained
from train.build import build

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_two_processes_have_the_losses_of_one(corpus: Path) -> None:
    base = build(steps.configure("plain", 1, 1, corpus))
    save_pretrained(base.model, corpus / "quantised", base.tokenizer, format="released")
    lines = [{"prompt": f"{n} + 1", "chosen": f"It is {n + 1}.", "rejected": f"No, not {n}!"} for n in range(40)]
    (corpus / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = [
        "-m", "train", "task=dpo", f"init_from={corpus}/quantised", f"data.paths=[{corpus}/pairs.jsonl]",
        "parallel.device=cpu", f"output={corpus}", f"data.cache_dir={corpus}/cache", "data.validation_share=0.2",
        "task.seq_len=64", "task.micro_batch=1", "task.global_batch_rows=4", "task.tokens=1000", "task.eval_every=3",
        "optim.schedule.peak=1.0e-4", "logger.progress=false",
    ]  # fmt: skip
    layouts = {
        "one": ["parallel=single"],
        "experts": ["parallel=ep2"],
        "dense": ["parallel=single", "parallel.world_size=2", "parallel.dense_shards=2"],
    }
    records = {}
    for name, layout in layouts.items():
        with Group(1 if name == "one" else 2, [*settings, *layout, f"name={name}"], corpus / f"ranks-{name}") as group:
            for rank, ended in enumerate(group.finish()):
                assert ended.code == 0, f"{name}, rank {rank}:\n{ended.output}"
        lines = (corpus / name / "metrics.jsonl").read_text().splitlines()
        records[name] = [json.loads(line) for line in lines]
    expected = records["one"]
    for found in (records["experts"], records["dense"]):
        assert [record["kind"] for record in found] == [record["kind"] for record in expected] and len(found) > 4
        for name, tolerance in (("loss", 1e-5), ("margin", 1e-4), ("pairs", 0)):
            values = [torch.tensor([float(record[name]) for record in records]) for records in (found, expected)]
            torch.testing.assert_close(*values, rtol=0, atol=tolerance)
