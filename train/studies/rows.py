"""``python -m train.studies.rows [STUDY]``: analyses finished runs that compare optimizers of embedding tables.

The command prints the following results for every arm and seed, and writes them to ``<output>/STUDY-rows.json``:
  - the loss on held-out tokens, grouped by how often training has read the Engram rows from which a token is predicted
    (the median over these rows), and also grouped by how often the token itself has occurred in training;
  - the share of Engram rows read at most three times in training, among the rows that were read at least once;
  - the bytes of optimizer state, and the CPU seconds of a whole training step and of the optimizer's part in it.
CPU seconds are the median over a few steps, and can only be compared between arms on the same machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model import token_log_probs
from model.engram import engram_rows
from train.build import Run, build
from train.checkpoint import run_state
from train.checkpoint.run_state import write_text
from train.errors import REFUSED
from train.loop import train_step
from train.studies.runner import Job, Runner, one_thread, say
from train.studies.settings import StudyError, read_study

EDGES = (1, 4, 16, 64)  # smallest number of reads in every group but the first, which has no read
GROUPS = ("0", "1 to 3", "4 to 15", "16 to 63", "64 or more")
STEPS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the runs of a finished study, and print and write the results. Returns the exit code: 0, or 2 after
    printing an error message.
    """
    parser = argparse.ArgumentParser(prog="python -m train.studies.rows", description=__doc__.splitlines()[0])
    parser.add_argument("study", nargs="?", default="rare_rows", help="name of a file in conf/study, without .yaml")
    parser.add_argument("overrides", nargs="*", help="the settings key=value that the study was run with")
    parser.add_argument("--output", type=Path, default=Path("runs/study"), help="folder of the study's results")
    options = parser.parse_args(arguments)
    path = options.output / f"{options.study}.json"
    try:
        found = {
            arm: {str(job.seed): measured(job) for job in jobs}
            for arm, jobs in finished_jobs(options.study, path, options.overrides).items()
        }
    except REFUSED as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(found))
    target = path.with_name(f"{options.study}-rows.json")
    write_text(target, json.dumps({"groups": GROUPS, "arms": found}, indent=1) + "\n")
    print(f"results written to {target}")
    return 0


def finished_jobs(name: str, path: Path, overrides: Sequence[str]) -> dict[str, list[Job]]:
    """Return, by arm, the runs that the study's summary file ``path`` compares. Raises StudyError if the file is
    missing.
    """
    if not path.is_file():
        raise StudyError(f"{path} does not exist; run the study first: python -m train.studies {name}")
    study, summary = read_study(name), json.loads(path.read_text(encoding="utf-8"))
    runner = Runner(study, path.parent, overrides, 1)
    tuned = {arm: next(iter((result["tuned"] or {}).values()), None) for arm, result in summary["arms"].items()}
    return {arm: [runner.job(arm, tuned[arm], seed) for seed in study.seeds] for arm in study.arms}


def measured(job: Job) -> dict[str, Any]:
    """Return all results of one run: losses, counts of rows read, and costs."""
    say(f"measuring {job}")
    folder = run_state.latest(job.config.run_dir / "checkpoints")
    if folder is None:
        raise StudyError(f"{job} has no checkpoint in {job.config.run_dir}; run the study first")
    with one_thread():
        run = build(job.config)
        trained = json.loads((folder / "state.json").read_text(encoding="utf-8"))["state"]["tokens"]
        reads = count_reads(run, trained)
        state = run.resume(folder)
        losses = losses_by_reads(run, *reads)
        used = reads[0][reads[0] > 0]
        return {
            **losses,
            "rows read at most three times": float((used <= 3).double().mean()),
            "rows read": len(used),
            **cost(run, state.step, state.tokens),
        }


def count_reads(run: Run, tokens: int) -> tuple[Tensor, Tensor]:
    """Read the first ``tokens`` tokens of a run's training text again. Returns how often each row of the Engram tables
    was read (int64 [rows], the tables of all layers concatenated), and how often each token of the vocabulary occurred
    (int64 [V]).
    """
    text = run.model_config.text
    sizes = [run.model.layers[layer].engram.embed.num_embeddings for layer in text.engram_layer_ids]
    rows, words = torch.zeros(sum(sizes), dtype=torch.int64), torch.zeros(text.vocab_size, dtype=torch.int64)
    for batch in run.train_batches:
        if words.sum() >= tokens:
            break
        layout = run.model.lay_out(**batch)
        rows += torch.bincount(read_rows(run, batch, layout).flatten(), minlength=len(rows))
        words += torch.bincount(layout.flatten(batch["input_ids"]), minlength=len(words))
    return rows, words


def read_rows(run: Run, batch: dict[str, Tensor], layout: Any) -> Tensor:
    """Return the indices of the Engram rows that each token of a batch reads, int64 [T, rows]. Indices are consecutive
    over the tables of all layers.
    """
    text, found, first = run.model_config.text, [], 0
    for layer in text.engram_layer_ids:
        tokens = layout.flatten_with_lookback(batch["input_ids"])
        found.append(engram_rows(text, layer, run.model.token_map, tokens, layout) + first)
        first += run.model.layers[layer].engram.embed.num_embeddings
    return torch.cat(found, dim=1)


@torch.no_grad()
def losses_by_reads(run: Run, rows: Tensor, words: Tensor) -> dict[str, Any]:
    """Return, for each group of `GROUPS`, the mean loss in nats of its held-out tokens and the number of these tokens.
    The result has two keys: ``by Engram rows`` groups tokens by how often their Engram rows were read in training, and
    ``by token`` groups them by how often the token itself occurred in training. The arguments are the results of
    ``count_reads``.
    """
    kinds = ("by Engram rows", "by token")
    sums = {kind: torch.zeros(2, len(GROUPS), dtype=torch.float64) for kind in kinds}
    edges = torch.tensor(EDGES)
    for batch in run.valid_batches:
        layout = run.model.lay_out(**batch)
        typical = layout.unflatten(rows[read_rows(run, batch, layout)].median(-1).values).flatten()

        def objective(hidden: Tensor, weight: Tensor, targets: Tensor, places: Tensor, typical=typical) -> Tensor:
            losses = -token_log_probs(hidden, weight, targets)[0].double()
            for kind, reads in zip(kinds, (typical[places - 1], words[targets]), strict=True):
                group = torch.bucketize(reads, edges, right=True)
                sums[kind][0].index_add_(0, group, losses)
                sums[kind][1].index_add_(0, group, torch.ones_like(losses))
            return losses.sum()

        run.model.losses(**batch, denominators=run.model.loss_denominators(**batch), objective=objective)
    return {
        kind: {
            "loss": [float(loss / count) if count else None for loss, count in zip(*found, strict=True)],
            "tokens": found[1].long().tolist(),
        }
        for kind, found in sums.items()
    }


def cost(run: Run, step: int, tokens: int) -> dict[str, Any]:
    """Measure the bytes of optimizer state, and the CPU seconds of a training step and of its optimizer update."""
    whole, part = [], []
    update = run.engine.step

    def timed() -> None:
        began = time.process_time()
        update()
        part.append(time.process_time() - began)

    run.engine.step = timed  # type: ignore[method-assign]
    batches = iter(run.train_batches)
    for _ in range(STEPS):
        read = [run.prepare(next(batches)) for _ in range(run.micro_batches)]
        began = time.process_time()
        train_step(run, read, step, tokens)
        whole.append(time.process_time() - began)
    return {
        "optimizer state": run.memory()["optimizer state"],
        "step CPU seconds": statistics.median(whole),
        "optimizer CPU seconds": statistics.median(part),
    }


def report(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Format the means over the seeds of every arm as Markdown tables."""
    lines = []
    for kind in ("by Engram rows", "by token"):
        lines += ["", f"Loss in nats per token {kind}, by the number of reads in training:", ""]
        lines += [_row(["arm", *GROUPS]), _row(["---"] * (len(GROUPS) + 1))]
        for arm, seeds in found.items():
            each = [[run[kind]["loss"][group] for run in seeds.values()] for group in range(len(GROUPS))]
            lines.append(
                _row([arm, *("-" if None in losses else f"{statistics.fmean(losses):.4f}" for losses in each)])
            )
        first = next(iter(next(iter(found.values())).values()))
        lines.append(_row(["tokens, first seed", *(f"{count:,}" for count in first[kind]["tokens"])]))
    keys = ("rows read at most three times", "optimizer state", "step CPU seconds", "optimizer CPU seconds")
    lines += ["", _row(["arm", *keys]), _row(["---"] * 5)]
    for arm, seeds in found.items():
        share, size, step, part = (statistics.fmean(run[key] for run in seeds.values()) for key in keys)
        lines.append(_row([arm, f"{share:.1%}", f"{size / 2**20:.1f} MiB", f"{step:.3f}", f"{part:.3f}"]))
    return "\n".join(lines[1:])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
