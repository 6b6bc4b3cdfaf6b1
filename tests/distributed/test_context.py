"""Whole runs whose rows are split over two processes (context parallelism): the records are those of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import Group

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

BOTH = ("parallel.world_size=2", "parallel.context_parallel=2", "parallel.expert_parallel=2", "parallel.table_shards=2")


def train(size: int, corpus: Path, name: str, *settings: str) -> list[dict[str, Any]]:
    """Run to the end; the records of its metrics."""
    common = [
        "-m", "train", f"output={corpus}/runs", f"name={name}", "task.seq_len=64", "task.micro_batch=1",
        "task.global_batch_rows=4", "task.eval_every=4", "data.validation_rows=3", "logger.progress=false",
        "parallel.device=cpu", "runtime.kv_quant=false", "optim.settings.adamw.eps=1.0e-6",
        f"data.cache_dir={corpus}/cache",
    ]  # fmt: skip
    with Group(size, [*common, *settings], corpus / "runs" / f"{name}-{size}") as group:
        for rank, ended in enumerate(group.finish()):
            assert ended.code == 0, f"rank {rank}:\n{ended.output}"
    lines = (corpus / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def assert_same(
    records: list[dict[str, Any]], wanted_ones: list[dict[str, Any]], tolerance: float, *left_out: str
) -> None:
    """All records but for what depends on the machine, and `left_out`."""
    for found, expected in zip(records, wanted_ones, strict=True):
        assert found.keys() == expected.keys()
        for key in found.keys() - {"seconds", "tokens_per_second", "data_wait", "memory_gib", "expert_load", *left_out}:
            ours, theirs = (one[key] if isinstance(one[key], list) else [one[key]] for one in (found, expected))
            for mine, wanted in zip(ours, theirs, strict=True):  # a number, a text, or None for a recall of nothing
                same = pytest.approx(wanted, rel=tolerance, abs=1e-5) if isinstance(wanted, float) else wanted
                assert mine == same, (found["step"], key)


def text(corpus: Path) -> list[str]:
    return [
        "task=pretrain", "model=tiny", "data.source=text", f"data.paths=[{corpus}/text]", "data.vocab_size=512",
        f"data.validation_paths=[{corpus}/text/token.txt]", "task.sample_tokens=4",
    ]  # fmt: skip


def test_a_run_on_text_and_its_continuation_by_one_process(corpus: Path) -> None:
    """Steps, held-out losses and the recall of the indexers, half of the run split over two, the rest on one. Rows
    become longer while they are split.
    """
    longer = "task.length_schedule=[{tokens: 500, seq_len: 128}]"
    settings = [*text(corpus), "checkpoint.export=plain", longer]
    alone = train(1, corpus, "text-alone", *settings, "task.tokens=1500")
    train(2, corpus, "text", *settings, *BOTH, "task.tokens=700")
    found = train(1, corpus, "text", *settings, "task.tokens=1500")
    assert [record["seq_len"] for record in found if record["kind"] == "train"][:4] == [64, 64, 128, 128]
    at_the_break = [record for record in found if record["kind"] == "valid" and record["step"] == 3]
    assert len(at_the_break) == 1, "a run that is complete evaluates"
    assert_same([record for record in found if record not in at_the_break], alone, 1e-4)
    assert alone[-1]["index_recall"][0] > 0.5


@pytest.mark.parametrize("method", [[], ["lora=all", "lora.rank=4"]], ids=["all weights", "adapter"])
def test_conversations_count_once(corpus: Path, method: list[str]) -> None:
    """Fine-tuning, and how many answers are right to the last token, of conversations on both sides of the cut."""
    path = corpus / "chats.jsonl"
    turns = [
        [{"role": "user", "content": f"{n} + 1"}, {"role": "assistant", "content": "Odd." if n % 3 else "Even."}]
        for n in range(60)
    ]
    path.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns), encoding="utf-8")
    train(1, corpus, "base", *text(corpus), "task.tokens=300", "checkpoint.export=plain")
    settings = [
        "task=sft", f"init_from={corpus}/runs/base/export", "data=chat", f"data.paths=[{path}]", "task.tokens=6000",
        "data.validation_share=0.3", "optim.schedule.peak=4.0e-3", "optim.schedule.floor=0.0",
        "optim.schedule.warmup_steps=5", "task.sample_tokens=0", *method,
    ]  # fmt: skip
    name = f"chats-{len(method)}"
    alone = train(1, corpus, f"{name}-alone", *settings)
    found = train(2, corpus, name, *settings, *BOTH)
    # what a step of a high learning rate does with the last bits grows in these
    assert_same(found, alone, 5e-3, "grad_norm", "index_kl", "index_recall")
    last = alone[-1]
    assert 0 < last["exact_match"] < 1 and last["answers"] == 10


def test_preference_pairs_count_once(corpus: Path) -> None:
    """The log-probabilities of an answer are summed over both processes, its loss is counted by one."""
    path = corpus / "pairs.jsonl"
    pairs = [{"prompt": f"{n} + 1", "chosen": f"It is {n + 1}.", "rejected": f"No, not {n}!"} for n in range(40)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    train(1, corpus, "base", *text(corpus), "task.tokens=300", "checkpoint.export=plain")
    settings = [
        "task=dpo", f"init_from={corpus}/runs/base/export", f"data.paths=[{path}]", "task.tokens=2500",
        "data.validation_share=0.3", "task.seq_len=128", "optim.schedule.peak=1.0e-3", "optim.schedule.floor=0.0",
        "optim.schedule.warmup_steps=0",
    ]  # fmt: skip
    alone = train(1, corpus, "pairs-alone", *settings)
    found = train(2, corpus, "pairs", *settings, *BOTH)
    assert_same(found, alone, 5e-3, "grad_norm", "index_kl")
    assert alone[-1]["pairs"] > 2 and alone[-1]["loss"] < 0.69
