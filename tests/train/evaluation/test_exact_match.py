"""Exact match: what one pass says is what greedy decoding writes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data.chat.prompt import prompt_ids
from tests.model.tiny import no_rounding  # noqa: F401
from tests.train.tasks.test_sft import base, chats, make_sft  # noqa: F401  (fixtures)
from train import loop
from train.build import build
from train.evaluation.exact_match import ExactMatch, most_frequent
from train.tasks.sample import sample


@pytest.mark.slow
def test_a_pass_counts_what_greedy_decoding_writes(no_rounding, make_sft, tmp_path) -> None:  # noqa: F811
    """On a question that a short training answers always the same way: sometimes right, sometimes wrong."""
    answers = {f"{n} + 1": "It is odd." if n % 3 else "It is even." for n in range(60)}
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in answers.items()]
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns), encoding="utf-8")
    run = build(make_sft(f"data.paths=[{path}]", "optim.schedule.peak=1.0e-2"))
    batches, found, wanted, text = iter(run.train_batches), 0, [0, 0], ""
    for step in range(25):
        loop.train_step(run, [next(batches)], step, 0)
    for batch in run.valid_batches:
        judge = ExactMatch()
        run.model.losses(**batch, denominators=run.model.loss_denominators(**batch), objective=judge)
        found += judge.count(batch["seq_lens"], batch["input_ids"].shape[1])
        text += "".join(run.tokenizer.decode_batch(batch["input_ids"].tolist(), skip_special_tokens=False))
    for question, answer in answers.items():
        if f"<｜User｜>{question}<｜Assistant｜>" in text:
            prompt = prompt_ids(run.tokenizer, [{"role": "user", "content": question}])
            written = sample(run.model, run.tokenizer, prompt, tokens=12, stop=run.model_config.eos_token_id)
            wanted = [wanted[0] + (written == answer), wanted[1] + 1]
    assert found.tolist() == wanted and 0 < wanted[0] < wanted[1]


def test_counting_by_conversation() -> None:
    """Rows of 8 tokens: conversations of 3, 4 and 8 tokens, then padding; the second has nothing taught."""
    judge = ExactMatch()
    judge.places, judge.hits = torch.tensor([1, 2, 9, 10, 12]), torch.tensor([1, 1, 1, 0, 1])
    assert judge.count(torch.tensor([[3, 4], [8, 0]]), 8).tolist() == [1, 2]
    judge.hits = torch.ones(5, dtype=torch.int64)
    assert judge.count(torch.tensor([[3, 4], [8, 0]]), 8).tolist() == [2, 2]


def test_the_most_frequent_answer() -> None:
    tokens, taught = np.arange(10) % 5, np.array([False, False, False, True, True] * 2)
    store = SimpleNamespace(tokens=tokens, loss_mask=taught, offsets=np.array([0, 5, 9, 10]))
    share, answer = most_frequent(SimpleNamespace(window=SimpleNamespace(store=store, rows=SimpleNamespace(
        document=np.array([0, 1, 2])))))  # fmt: skip
    assert share == 1 / 3 and answer.tolist() in ([3, 4], [3], [4])
