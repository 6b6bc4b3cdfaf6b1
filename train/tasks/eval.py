"""``task=eval``: measures a model on benchmark tasks, prints the results and writes them to a JSON file.

Several processes share the questions; each process has the whole model in memory, or a part of it (``parallel``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from data.errors import naming
from train.checkpoint.run_state import write_text
from train.config.schema import Evaluation
from train.distributed.launch import launch
from train.distributed.world import World, computes_in_bf16
from train.errors import user_errors
from train.evaluation.scorer import Scorer
from train.evaluation.tasks import Result, prepare, run_all, table
from train.logging.log import task_line
from train.tasks.asked import open_checkpoint


def run(config: Evaluation) -> None:
    """Evaluate the model on all tasks, print the results and write them to ``config.dst``. All ranks call this function
    together; only rank 0 prints and writes.

    Raises:
        InputError, DataError, OSError: the model, a task or the output file cannot be used.
        ConfigError: the number of started processes differs from ``parallel.world_size``.
        RankLost: another process ended or no longer answers.
    """
    started = time.perf_counter()
    world = launch(config.parallel)
    with world.collective_guard():
        results = _results(config, world)
        if world.first:
            _show(results)
            _write(config, results, time.perf_counter() - started)


def _results(config: Evaluation, world: World) -> dict[str, Result]:
    """Load the model and run all tasks. Every rank gets all results."""
    with user_errors():
        asked = open_checkpoint(config.init_from, world)
        positions = asked.model.config.text.max_position_embeddings
        prepared = prepare(config.tasks, asked.tokenizer, positions, config.seed)
    with naming(config.dst):
        Path(config.dst).parent.mkdir(parents=True, exist_ok=True)
    bf16 = computes_in_bf16(config.parallel.precision, world.device)
    precision = partial(torch.autocast, world.device.type, torch.bfloat16, enabled=bf16)
    return run_all(prepared, Scorer(asked.model, asked.tokenizer, world, config.batch, precision))


def _show(results: Mapping[str, Result]) -> None:
    for name, result in results.items():
        print(task_line(name, result))
    for name, result in results.items():
        for number, line in enumerate(table(result)):
            print(line if number else f"{name}, accuracy\n{line}")


def _write(config: Evaluation, results: Mapping[str, Result], seconds: float) -> None:
    written = {
        "init_from": config.init_from,
        "seed": config.seed,
        "tasks": [asdict(task) for task in config.tasks],
        "results": results,
        "seconds": seconds,
    }
    with naming(config.dst):
        write_text(Path(config.dst), json.dumps(written, indent=2, ensure_ascii=False) + "\n")
    print(f"wrote {config.dst}")
