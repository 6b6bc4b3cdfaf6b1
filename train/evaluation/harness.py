"""Runs tasks of lm-evaluation-harness on a `Scorer`. Only this file imports lm_eval, an optional library."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from data.tokenizer import special_ids
from train.config.evaluation import HARNESS_FILE, EvalTask
from train.evaluation.scorer import Pair, Question, Scorer

MAX_TOKENS = 256  # largest number of tokens in an answer if the task gives no limit
RESAMPLES = 1000  # bootstrap samples for the standard errors of metrics that have no formula for it


class Loaded:
    """A task of lm-evaluation-harness, or a group of tasks, with its data.

    Raises:
        ValueError: there is no task of this name, or its data cannot be read.
    """

    def __init__(self, task: EvalTask, seed: int):
        self.task, self.name = task, Path(task.task).stem if task.task.endswith(HARNESS_FILE) else task.task
        with _same_random_state():
            self.tasks = _load(task.task)
        for each in self.tasks["tasks"].values():
            if task.few_shot is not None:
                each.set_config(key="num_fewshot", value=task.few_shot)
            elif each.get_config("num_fewshot") is None:
                each.set_config(key="num_fewshot", value=0)
            each.set_fewshot_seed(seed=seed)

    def run(self, scorer: Scorer) -> dict[str, dict[str, float]]:
        """Run the task, or all tasks of the group. Returns the metrics of each task, such as {"arc_easy": {"acc": 0.25,
        "acc_stderr": 0.01}}.
        """
        with _same_random_state(), _quiet():
            found = evaluate(
                _Model(scorer), self.tasks, limit=self.task.limit, log_samples=False, bootstrap_iters=RESAMPLES
            )
        return {name: _measures(values) for name, values in found["results"].items()}


def _load(name: str) -> Any:
    file = name.endswith(HARNESS_FILE)
    if file and not Path(name).is_file():
        raise ValueError(f"{name}: this file does not exist; name a task file of lm-evaluation-harness")
    manager = lm_eval.tasks.TaskManager(include_defaults=not file)
    if not file and name not in manager.task_index:
        close = difflib.get_close_matches(name, [*manager.all_tasks, "needle", "multikey"], n=3)
        hint = f"Did you mean {' or '.join(close)}?" if close else "`lm-eval ls tasks` lists its tasks"
        raise ValueError(f"{name}: lm-evaluation-harness has no task of this name. {hint}")
    try:
        return manager.load([str(Path(name).resolve())] if file else [name])
    except Exception as error:  # network errors, or errors in the code of a task
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{name}: lm-evaluation-harness cannot load this task: {type(error).__name__}: {reason}"
        ) from error


def _measures(values: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a task. lm-evaluation-harness names a metric "metric,filter"; this function drops the
    suffix ",none" from the name.
    """
    found = {}
    for name, value in values.items():
        if isinstance(value, int | float) and "," in name:
            found[name.removesuffix(",none").replace(",", "_")] = float(value)
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context in which the library shows no progress bars and starts no processes to compute standard errors."""
    given = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        if given is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = given


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """Context that restores the state of the global random generators at its end."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class _Model(TemplateLM):
    """Presents a `Scorer` as a model of lm-evaluation-harness.

    Every rank passes the same requests to the scorer. The scorer divides the requests over the ranks, and each rank
    gets all results.
    """

    def __init__(self, scorer: Scorer):
        super().__init__()
        self.scorer, self.special = scorer, special_ids(scorer.tokenizer)

    @property
    def eot_token_id(self) -> int:
        return self.special.eos

    @property
    def prefix_token_id(self) -> int:
        return self.special.eos if self.special.bos is None else self.special.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        begin = [] if add_special_tokens is False or self.special.bos is None else [self.special.bos]
        return begin + self.scorer.tokenizer.encode(string, add_special_tokens=False).ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self.scorer.likelihoods([(context, rest) for _, context, rest in requests], "likelihoods")

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        pairs: list[Pair] = []
        owner: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.scorer.positions - 1, context_len=1)
            for context, rest in map(make_disjoint_window, windows):
                pairs.append((context, rest))
                owner.append(number)
        sums = [0.0] * len(requests)
        for number, (value, _) in zip(owner, self.scorer.likelihoods(pairs, "likelihoods"), strict=True):
            sums[number] += value
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        questions, stops = [], []
        for request in requests:
            prompt, options = request.args
            if options.get("do_sample") and options.get("temperature", 1.0) > 0:
                raise ValueError("a task samples its answers (do_sample), but only greedy answers are supported")
            until = options.get("until") or []
            until = [until] if isinstance(until, str) else list(until)
            most = int(options.get("max_gen_toks", MAX_TOKENS))
            stops.append(until)
            questions.append(Question(self.tok_encode(prompt), most, _holds(until)))
        return [_cut(text, s) for text, s in zip(self.scorer.answers(questions, "answers"), stops, strict=True)]


def _holds(stops: list[str]):
    return lambda text: any(stop in text for stop in stops)


def _cut(text: str, stops: list[str]) -> str:
    return text[: min([text.find(stop) for stop in stops if stop in text], default=len(text))]
