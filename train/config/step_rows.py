"""Rules about the rows of a step: how they are divided, and how their length changes during a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from model import ModelConfig
from train.config.problems import problem
from train.config.schema import Config, ParallelConfig, TaskConfig, counted


def divides_rows(parallel: ParallelConfig, task: TaskConfig, where: str = "") -> Iterator[tuple[set[str], str]]:
    """Check that the rows of a step can be divided over micro-batches and processes.

    where: text inserted into messages, which says for which row length the rule is broken.
    """
    rows, multiple = task.global_batch_rows, math.lcm(task.micro_batch, parallel.row_groups)
    if rows is None or rows % multiple == 0:
        return
    divided = " / parallel.context_parallel" if parallel.context_parallel > 1 else ""
    processes = f"parallel.world_size{divided} = {parallel.row_groups}"
    rule = f"{where}must be a multiple of task.micro_batch = {task.micro_batch} and of {processes}"
    keys = {"task.micro_batch", "task.global_batch_rows", "parallel.world_size", "parallel.context_parallel"}
    remedy = f"The next larger multiple is {-(-rows // multiple) * multiple}"
    yield keys, problem("task.global_batch_rows", rows, rule, remedy)


def length_rules(config: Config, may_read_windows: bool) -> Iterator[tuple[set[str], str]]:
    """Check ``task.length_schedule``, and that model, layout and data allow the lengths in it.

    may_read_windows: whether ``data.window_tokens`` may be checked; False if the data section has problems of its own.
    """
    task, key = config.task, "task.length_schedule"
    entries = [asdict(entry) for entry in task.length_schedule]
    if entries and task.kind not in ("pretrain", "plan"):
        rule = f"task={task.kind} has rows of one length"
        yield {key, "task.kind"}, problem(key, entries, rule, "Use task=pretrain, or leave it out")
        return
    before = {"tokens": 0, "seq_len": task.seq_len}
    positions = _positions(config.model)
    windows = [part.window_tokens for part in config.data.parts().values()] if may_read_windows else []
    for entry in task.length_schedule:
        keys, given = {key, "task.seq_len"}, asdict(entry)
        if entry.tokens <= before["tokens"] or entry.seq_len <= before["seq_len"]:
            rule = f"needs more tokens and longer rows than before, {before}"
            yield keys, problem(key, given, rule, "Order the entries, and leave out those that change nothing")
            return
        before = given
        rows = task.global_batch_rows
        if entry.seq_len % task.seq_len or (rows or 0) % (entry.seq_len // task.seq_len):
            rule = (
                f"a step keeps its {(rows or 0) * task.seq_len:,} tokens, so seq_len must be n times task.seq_len = "
                f"{task.seq_len} for an n that divides task.global_batch_rows = {rows}"
            )
            remedy = "Choose such a length"
            yield keys | {"task.global_batch_rows"}, problem(key, given, rule, remedy)
            continue
        longer, where = task.with_length(entry.seq_len), f"in rows of {counted(entry.seq_len, 'token')} ({key}) "
        for found, text in divides_rows(config.parallel, longer, where):
            yield found | keys, text
        if entry.seq_len > positions:
            rule = f"is longer than model.text_config.max_position_embeddings = {positions}"
            yield keys, problem(key, given, rule, "Use shorter rows or raise max_position_embeddings")
        if windows and task.kind == "pretrain" and min(windows) < 4 * entry.seq_len:
            rule = f"needs data.window_tokens of at least 4 * {entry.seq_len} = {4 * entry.seq_len}"
            yield keys | {"data.window_tokens"}, problem(key, given, rule, "Raise data.window_tokens")


def _positions(model: Mapping[str, Any]) -> float:
    """Return the model's ``max_position_embeddings``, or infinity if the section ``model`` is not valid, which
    ``cross_problems`` reports.
    """
    try:
        return ModelConfig.from_dict(dict(model)).text.max_position_embeddings
    except ValueError:
        return math.inf
