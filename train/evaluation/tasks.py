"""Reads the data of evaluation tasks, runs the tasks on a `Scorer`, and formats their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data.chat.source import ChatLines
from data.errors import BadRecordPolicy, DataError
from data.files import find_files
from data.tokens import Encoder
from train.build import Run
from train.config.evaluation import EvalTask
from train.evaluation import retrieval
from train.evaluation.scorer import Pair, Scorer, Stopped

Result = dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """A task whose data have been read.

    run: function that evaluates a model and returns the results of this task, or of all tasks in its group.
    """

    task: EvalTask
    run: Callable[[Scorer], dict[str, Result]]


def prepare(tasks: Sequence[EvalTask], tokenizer: Tokenizer, positions: int, seed: int) -> list[Prepared]:
    """Read the data that the tasks need.

    positions: the context length of the model in tokens.

    Raises:
        ValueError, DataError: a task cannot be run on this model, or its data cannot be read.
    """
    makers = {"retrieval": _retrieval, "conversations": _conversations, "harness": _harness}
    return [Prepared(task, makers[task.kind](task, tokenizer, positions, seed)) for task in tasks]


def _retrieval(task: EvalTask, tokenizer: Tokenizer, positions: int, seed: int):
    if max(task.lengths) + retrieval.ANSWER > positions:
        raise ValueError(
            f"{task.task}: a prompt of {max(task.lengths):,} tokens and its answer exceed the model's context length "
            f"of {positions:,} tokens; use shorter lengths"
        )
    hidden = retrieval.make(task, tokenizer, seed)
    return lambda scorer: {
        task.task: retrieval.score(hidden, tokenizer, lambda questions: scorer.answers(questions, task.task))
    }


def _conversations(task: EvalTask, tokenizer: Tokenizer, positions: int, seed: int):
    path = Path(task.task).expanduser()
    if not path.is_file():
        raise DataError(task.task, 0, "missing file", "a task whose name ends in .jsonl must be a conversation file")
    policy = BadRecordPolicy("stop")
    source = ChatLines(find_files([str(path)], (".jsonl",)), "messages")
    encoder = Encoder(tokenizer, positions, vision=None, count_bytes=False, conversations=True)
    pairs: list[Pair] = []
    for encoded in encoder.encode_all((document for document, _ in source.read(policy)), policy):
        assert encoded.loss_mask is not None, "an encoded conversation must have a loss mask"
        if task.limit is not None and len(pairs) >= task.limit:
            break
        begin = int(encoded.loss_mask.argmax())  # one answer, up to the end of the document
        if encoded.loss_mask.any():
            pairs.append((encoded.ids[:begin].tolist(), encoded.ids[begin:].tolist()))
    if not pairs:
        raise DataError(task.task, 0, "no answers", "no record has a supervised answer")
    return lambda scorer: {path.stem: _judged(scorer.likelihoods(pairs, path.stem), pairs)}


def _judged(found: Sequence[tuple[float, bool]], pairs: Sequence[Pair]) -> Result:
    tokens = sum(len(answer) for _, answer in pairs)
    right = sum(hit for _, hit in found)
    return {"exact_match": right / len(pairs), "loss": -sum(x for x, _ in found) / tokens, "answers": len(pairs)}


def _harness(task: EvalTask, tokenizer: Tokenizer, positions: int, seed: int):
    from train.evaluation.harness import Loaded  # imports an optional library, which takes seconds

    return Loaded(task, seed).run


def run_all(prepared: Sequence[Prepared], scorer: Scorer) -> dict[str, Result]:
    """Run all tasks and return their results by name. All ranks call this function together. Raises ``scorer.Stopped``
    if a rank was asked to stop.
    """
    found: dict[str, Result] = {}
    for each in prepared:
        found |= each.run(scorer)
    return found


def measure(
    run: Run, prepared: Sequence[Prepared], stop: Callable[[], bool], say: Callable[[str], None]
) -> dict[str, Result] | None:
    """Run all tasks on the model of a run and return their results by name. Nothing in ``run`` changes.

    Returns None on all ranks if ``stop`` returns True on any rank. say: function that receives progress lines.
    """
    batch = run.config.task.division_of_step(run.world.size)[0]
    scorer = Scorer(run.backbone, run.tokenizer, run.world, batch, run.autocast, stop, say)
    try:
        return run_all(prepared, scorer)
    except Stopped:
        return None


def table(result: Result) -> Iterator[str]:
    """Yield the lines of a table with the accuracy of a retrieval task by length (rows) and depth (columns). For a task
    of another kind, no line is yielded.
    """
    cells = result.get("by_length_and_depth", {})
    for number, (length, row) in enumerate(cells.items()):
        if not number:
            yield f"{'length':>10}" + "".join(f"{f'depth {depth}':>12}" for depth in row)
        yield f"{int(length):>10,}" + "".join(f"{value:>12.1%}" for value in row.values())
