"""The tasks of an evaluation: what they ask, how a model is scored on them, and that training is not disturbed."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch

from data.tokenizer import special_ids
from model import save_pretrained
from model.generation import Request, generate
from train.build import Run, build
from train.config import rules
from train.config.evaluation import EvalTask
from train.config.parse import parse
from train.config.problems import ConfigError
from train.distributed.world import World
from train.errors import InputError
from train.evaluation import retrieval
from train.evaluation.evaluate import evaluate
from train.evaluation.scorer import Question, Scorer
from train.evaluation.tasks import prepare
from train.tasks import eval as evaluation
from train.tasks import pretrain

HARNESS_TASK = """task: toy
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}, cache_dir: {cache}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def run(compose_raw, overrides, tmp_path_factory) -> Run:
    return build(parse(compose_raw(*overrides, f"output={tmp_path_factory.mktemp('run')}")))


@pytest.fixture
def scorer(run: Run) -> Scorer:
    return Scorer(run.model, run.tokenizer, World(torch.device("cpu")), batch=3)


@pytest.fixture(scope="module")
def folder(run: Run, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model"
    save_pretrained(run.model, path, run.tokenizer)
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Six conversations of unequal length."""
    lines = [
        {"messages": [{"role": "user", "content": "x" * n}, {"role": "assistant", "content": f"{n} " * n}]}
        for n in range(1, 7)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def reader(run: Run, window: int | None = None):
    """A model that finds what it is asked for in the last `window` tokens of a prompt."""

    def answer(questions: list[Question]) -> list[str]:
        found = []
        for question in questions:
            text = run.tokenizer.decode(list(question.prompt)[-(window or 10**9) :])
            name = re.search(r"secret number of (\w+) is$", text)
            number = name and re.search(rf"secret number of {name[1]} is (\d+)\.", text)
            found.append(f" {number[1]}. The" if number else " none")
        return found

    return answer


@pytest.mark.parametrize("name", ["needle", "multikey"])
def test_numbers_are_hidden_where_the_depth_says(run: Run, name: str) -> None:
    task = EvalTask(name, lengths=[320, 640], depths=[0.0, 0.5, 1.0], samples=5, keys=3)
    hidden = retrieval.make(task, run.tokenizer, seed=1)
    assert len(hidden) == 2 * 3 * 5 and len({h.number for h in hidden}) > 25
    assert hidden == retrieval.make(task, run.tokenizer, seed=1) != retrieval.make(task, run.tokenizer, seed=2)
    for each in hidden:
        assert each.length - 60 < len(each.prompt) <= each.length
        text = run.tokenizer.decode(list(each.prompt))
        sentences = re.findall(r"[^.\n]+\.", text.partition("\n\n")[2])
        stated = [n for n, sentence in enumerate(sentences) if "secret number of" in sentence]
        assert len(stated) == (3 if name == "multikey" else 1)
        (place,) = (n for n in stated if each.number in sentences[n])
        assert abs(place / (len(sentences) - 1) - each.depth) <= 0.5 / (len(sentences) - 1) + 1e-9
    found = retrieval.score(hidden, run.tokenizer, reader(run))
    assert found["accuracy"] == 1.0 and found["questions"] == 30
    assert found["by_length_and_depth"]["640"] == {"0": 1.0, "0.5": 1.0, "1": 1.0}
    near = retrieval.score(hidden, run.tokenizer, reader(run, window=100))["by_length_and_depth"]["640"]
    assert near["1"] == 1.0 and near["0"] == 0.0
    wrong = retrieval.score(hidden, run.tokenizer, lambda questions: [" 1" for _ in questions])
    assert wrong["accuracy"] == 0.0


def test_likelihoods_are_those_of_plain_passes(run: Run, scorer: Scorer) -> None:
    pairs = [([0, *range(20, 20 + n)], [40 + n, 50]) for n in (1, 9, 4, 30)]
    with torch.no_grad():
        for (context, rest), (value, hit) in zip(pairs, scorer.likelihoods(pairs, "test"), strict=True):
            log_p = run.model(input_ids=torch.tensor([context + rest])).logits[0].log_softmax(-1)
            rows = log_p[len(context) - 1 : -1]
            assert abs(value - rows.gather(-1, torch.tensor(rest)[:, None]).sum().item()) < 1e-3
            assert hit == (rows.argmax(-1).tolist() == rest)
    (sample,) = generate(run.model, [Request((0, 20, 21), 4, temperature=0.0)])
    assert scorer.likelihoods([([0, 20, 21], sample.tokens)], "test")[0][1], "what greedy decoding writes"


def test_answers_are_greedy_and_end_where_they_are_done(run: Run, scorer: Scorer) -> None:
    prompts = [[0, *range(20, 20 + n)] for n in (1, 9, 4, 30, 2)]
    eos = special_ids(run.tokenizer).eos
    requests = [Request(tuple(prompt), 12, temperature=0.0, stop=frozenset({eos})) for prompt in prompts]
    expected = [s.tokens[: s.tokens.index(eos)] if eos in s.tokens else s.tokens for s in generate(run.model, requests)]
    found = scorer.answers([Question(prompt, 12) for prompt in prompts], "test")
    assert found == [run.tokenizer.decode(tokens, skip_special_tokens=False) for tokens in expected]
    early = scorer.answers([Question(prompt, 12, lambda text: len(text) > 0) for prompt in prompts], "test")
    assert all(whole.startswith(text) for whole, text in zip(found, early, strict=True))
    assert any(len(text) < len(whole) for whole, text in zip(found, early, strict=True))


def test_conversations_are_judged_as_in_an_evaluation_of_training(
    make_config, folder: Path, chats: Path, tmp_path: Path
) -> None:
    others = tmp_path / "others.jsonl"
    others.write_text(chats.read_text().replace("x", "y"))
    data = ["data.source=chat", "data.field=messages", f"data.paths=[{others}]", f"data.validation_paths=[{chats}]"]
    run = build(make_config("task=sft", f"init_from={folder}", *data, "data.validation_rows=0"))
    run.model.load_state_dict(build(make_config()).model.state_dict())
    record = evaluate(run)
    assert record is not None and record["answers"] == 6
    scorer = Scorer(run.model, run.tokenizer, run.world, batch=4)
    (prepared,) = prepare([EvalTask(str(chats))], run.tokenizer, 1000, 0)
    found = prepared.run(scorer)["chats"]
    assert found["answers"] == 6 and found["exact_match"] == record["exact_match"]
    assert abs(found["loss"] - record["loss"]) < 1e-4
    (some,) = prepare([EvalTask(str(chats), limit=2)], run.tokenizer, 1000, 0)
    assert some.run(scorer)["chats"]["answers"] == 2


@pytest.mark.slow
def test_training_with_tasks_has_the_losses_of_training_without(make_config, chats: Path) -> None:
    records = {}
    tasks = f"task.eval_tasks=[{{task: needle, lengths: [128], depths: [0, 1], samples: 2}}, {chats}]"
    for name, changes in (("with", [tasks]), ("without", [])):
        config = make_config(f"name={name}", "task.eval_every=2", "lora=off", *changes)
        pretrain.run(config)
        lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
        records[name] = [json.loads(line) for line in lines]
        log = (config.run_dir / "train.log").read_text()
    assert "needle: accuracy" not in log
    train = {name: [r["loss"] for r in some if r["kind"] == "train"] for name, some in records.items()}
    assert train["with"] == train["without"] and len(train["with"]) == 6
    measured = [r["tasks"] for r in records["with"] if r["kind"] == "valid"]
    assert len(measured) == 4 and all(m["needle"]["questions"] == 4 for m in measured)
    assert measured[-1]["chats"]["loss"] < measured[0]["chats"]["loss"]
    assert not any("tasks" in r for r in records["without"])


def test_the_command_prints_and_writes_the_results(compose_raw, folder: Path, chats: Path, tmp_path: Path, capsys):
    tasks = f"tasks=[{{task: needle, lengths: [128, 256], depths: [0, 1], samples: 2}}, {chats}]"
    evaluation.run(parse(compose_raw("task=eval", f"init_from={folder}", tasks, f"dst={tmp_path}/found/eval.json")))
    out = capsys.readouterr().out
    assert re.search(r"length +depth 0 +depth 1\n +128 +\d+\.\d% +\d+\.\d%\n +256 ", out)
    found = json.loads((tmp_path / "found" / "eval.json").read_text())
    assert found["results"]["chats"]["answers"] == 6 and found["results"]["needle"]["questions"] == 8
    assert f"chats: exact_match={found['results']['chats']['exact_match']:.4f}" in out
    assert found["tasks"][0]["lengths"] == [128, 256] and found["init_from"] == str(folder)


@pytest.mark.parametrize(
    ("tasks", "error", "message"),
    [
        ("[needle, needle]", ConfigError, "lists a task twice"),
        ("[{task: needle, depths: [2]}]", ConfigError, "tasks.0.depths.0 = 2: should be less than or equal to 1"),
        ("[{task: needle, length: [64]}]", ConfigError, "Did you mean tasks.0.lengths"),
        ("[]", ConfigError, "tasks"),
        ("[{task: needle, lengths: [100000000]}]", InputError, "exceed the model's"),
        ("[{task: multikey, lengths: [64], keys: 9}]", InputError, "are too short for this task; use"),
        ("[gone.jsonl]", ValueError, "gone.jsonl: missing file"),
    ],
)
def test_what_cannot_be_run_is_refused(compose_raw, folder: Path, tasks: str, error, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        evaluation.run(parse(compose_raw("task=eval", f"init_from={folder}", f"tasks={tasks}")))


def test_a_missing_library_is_named_before_anything_is_loaded(compose_raw, make_config, monkeypatch) -> None:
    monkeypatch.setattr(rules, "_is_installed", lambda name: name != "lm_eval")
    with pytest.raises(ConfigError, match=r"arc_easy.*not installed. Install it \(pip install 'narrows\[eval\]'\)"):
        parse(compose_raw("task=eval", "init_from=nowhere", "tasks=[arc_easy]"))
    with pytest.raises(ConfigError, match="task.eval_tasks = .*not installed"):
        make_config("task.eval_tasks=[arc_easy]")


ROWS = [{"question": f"def f{n}", "choices": ["(self):", "zz qq xx", "\n"], "answer": n % 3} for n in range(9)]


@pytest.fixture
def harness_task(tmp_path: Path) -> Path:
    """A task file of lm-evaluation-harness on local data."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'narrows[eval]'")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    file = tmp_path / "toy.yaml"
    file.write_text(HARNESS_TASK.format(rows=tmp_path / "rows.jsonl", cache=tmp_path / "cache"))
    return file


@pytest.mark.slow
def test_a_task_file_of_the_harness(compose_raw, folder: Path, harness_task: Path, run: Run, scorer, tmp_path, capsys):
    """Its accuracy is that of direct likelihoods."""
    options = [f"init_from={folder}", f"tasks=[{harness_task}]", f"dst={tmp_path}/e.json"]
    evaluation.run(parse(compose_raw("task=eval", *options)))
    (found,) = json.loads((tmp_path / "e.json").read_text())["results"].items()

    def ids(text: str) -> list[int]:
        return [special_ids(run.tokenizer).bos, *run.tokenizer.encode(text).ids]

    right = 0
    for row in ROWS:
        begin = ids(row["question"])
        pairs = [(begin, ids(row["question"] + choice)[len(begin) :]) for choice in row["choices"]]
        values = [value for value, _ in scorer.likelihoods(pairs, "test")]
        right += values.index(max(values)) == row["answer"]
    assert found[0] == "toy" and found[1]["acc"] == pytest.approx(right / 9) and "toy: acc=" in capsys.readouterr().out
    with pytest.raises(InputError, match="has no task of this name. Did you mean"):
        evaluation.run(parse(compose_raw("task=eval", f"init_from={folder}", "tasks=[arc_eazy]")))


@pytest.mark.slow
@pytest.mark.slow
def test_a_task_file_of_the_harness_during_training(make_config, harness_task: Path) -> None:
    """No loss is another, and the random numbers that follow are the same."""
    states, losses = [], []
    for name, changes in (("with", [f"task.eval_tasks=[{{task: {harness_task}, limit: 3}}]"]), ("without", [])):
        config = make_config(f"name={name}", *changes)
        pretrain.run(config)
        states.append((random.getstate(), torch.get_rng_state().tolist()))
        records = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
        losses.append([r["loss"] for r in records])
        assert all("acc" in r["tasks"]["toy"] for r in records if name == "with" and r["kind"] == "valid")
    assert losses[0] == losses[1] and states[0] == states[1]
