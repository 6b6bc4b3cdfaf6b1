"""``task=eval``: measures a model on benchmark tasks, prints the results and writes them to a JSON file."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from data.errors import naming
from train.checkpoint.run_state import write_text
from train.config.schema import Evaluation
from train.distributed.world import World
from train.errors import user_errors
from train.evaluation.scorer import Scorer
from train.evaluation.tasks import prepare, run_all, table
from train.logging.log import task_line
from train.tasks.asked import open_checkpoint


def run(config: Evaluation) -> None:
    """Evaluate the model on all tasks, print the results and write them to ``config.dst``.

    Raises:
        InputError, DataError, OSError: the model, a task or the output file cannot be used.
    """
    started = time.perf_counter()
    with user_errors():
        asked = open_checkpoint(config.init_from, config.device)
        positions = asked.model.config.text.max_position_embeddings
        prepared = prepare(config.tasks, asked.tokenizer, positions, config.seed)
    with naming(config.dst):
        Path(config.dst).parent.mkdir(parents=True, exist_ok=True)
    scorer = Scorer(asked.model, asked.tokenizer, World(asked.model.embed.weight.device), config.batch)
    results = run_all(prepared, scorer)
    for name, result in results.items():
        print(task_line(name, result))
    for name, result in results.items():
        for number, line in enumerate(table(result)):
            print(line if number else f"{name}, accuracy\n{line}")
    written = {
        "init_from": config.init_from,
        "seed": config.seed,
        "tasks": [asdict(task) for task in config.tasks],
        "results": results,
        "seconds": time.perf_counter() - started,
    }
    with naming(config.dst):
        write_text(Path(config.dst), json.dumps(written, indent=2, ensure_ascii=False) + "\n")
    print(f"wrote {config.dst}")
