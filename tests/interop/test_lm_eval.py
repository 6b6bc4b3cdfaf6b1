"""lm-evaluation-harness runs on the model: its numbers are the model's own."""

from __future__ import annotations

import pytest
import torch

from tests.interop.conftest import Toy, greedy

pytestmark = [pytest.mark.interop, pytest.mark.slow]
huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval is not installed: make interop-install")

NEAR = 0.02  # a value on a rounding edge of the attention state moves logits by less
CONTEXTS = [("def main", "(self):\n"), ("import os\n\n\nclass Queue", ":\n    def"), ("The heap", " is a list")]


@pytest.fixture(scope="module")
def harness(text_toy: Toy):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import model.huggingface  # noqa: F401  registers the model

    model = AutoModelForCausalLM.from_pretrained(text_toy["plain"])
    tokenizer = AutoTokenizer.from_pretrained(text_toy["plain"])
    return huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, add_bos_token=True, max_length=128)


def requests(kind: str, arguments: list[tuple]) -> list:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


def log_probability(harness, context: list[int], continuation: list[int]) -> float:
    """Of a continuation, by one plain pass over it alone."""
    ids = torch.tensor([context + continuation])
    with torch.no_grad():
        log_p = harness.model.model(input_ids=ids).logits[0].log_softmax(-1)
    return sum(log_p[len(context) - 1 + i, token].item() for i, token in enumerate(continuation))


def test_likelihoods_of_batches_with_padding(harness) -> None:
    found = harness.loglikelihood(requests("loglikelihood", CONTEXTS))
    for (context, continuation), (value, _) in zip(CONTEXTS, found, strict=True):
        whole = harness.tokenizer(context + continuation).input_ids
        begin = harness.tokenizer(context).input_ids
        assert whole[: len(begin)] == begin
        assert abs(value - log_probability(harness, begin, whole[len(begin) :])) < NEAR


def test_rolling_likelihoods(harness) -> None:
    (found,) = harness.loglikelihood_rolling(requests("loglikelihood_rolling", [("for item in heap:\n",)]))
    ids = harness.tokenizer("for item in heap:\n").input_ids
    assert abs(found - log_probability(harness, [0], ids)) < NEAR  # the harness has BOS predict the text's own BOS


def test_generation_of_padded_prompts(harness, text_toy: Toy) -> None:
    """Where two tokens are all but equally likely, rounding may take either."""
    options = {"until": ["\x00"], "max_gen_toks": 12, "do_sample": False}
    found = harness.generate_until(requests("generate_until", [(context, options) for context, _ in CONTEXTS]))
    for (context, _), text in zip(CONTEXTS, found, strict=True):
        model, prompt = text_toy.load("plain"), harness.tokenizer(context).input_ids
        ids = greedy(model, prompt, 12)
        with torch.no_grad():
            best = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].topk(2).values
        ids = ids[: ids.index(1)] if 1 in ids else ids
        same = text == harness.tokenizer.decode(ids, skip_special_tokens=True)
        assert same or (best[:, 0] - best[:, 1]).min() < NEAR


def test_a_task_is_scored(harness, tmp_path) -> None:
    """A multiple-choice task through `simple_evaluate`, on local data."""
    import json

    import lm_eval.tasks

    rows = [{"question": "def f", "choices": ["(self):", "zzzz qqqq xxxx"], "answer": 0}] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "toy",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    manager = lm_eval.tasks.TaskManager(include_defaults=False)
    results = lm_eval.simple_evaluate(model=harness, tasks=[task], task_manager=manager, bootstrap_iters=0)
    assert results["results"]["toy"]["acc,none"] == 1.0
