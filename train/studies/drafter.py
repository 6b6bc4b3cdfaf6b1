"""``python -m train.studies.drafter [RUN]``: measures the drafter of a finished ``task=dspark`` run.

The command prints the following results, and writes them into the run's directory as ``drafter.md`` and
``drafter.json``:
  - the number of accepted draft tokens in speculative decoding from held-out prompts, for greedy and sampled
    continuations and for each slot of a block. The trained drafter is compared with two baselines: the same drafter
    before training, and a drafter that consists only of a Markov head, trained on the same number of tokens;
  - tokens per second with and without the drafter, measured by generating answers to the same requests, alternately
    with and without the drafter.
Speeds are measured on one CPU core, and only compare decoding with and without the drafter on this machine.
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

import numpy as np
import torch
import yaml

from model import DeepseekV41, Drafter, Generator, Request, Sample, load_drafter
from model.generation import generate
from train.build import Run, build
from train.checkpoint.run_state import TrainerState, write_text
from train.config.parse import parse_run
from train.dspark.anchors import HELD_OUT, with_anchors
from train.dspark.evaluate import evaluate
from train.tasks.dspark import step

NEW = 64  # tokens generated for each prompt
PROMPT = 256  # largest number of tokens in a prompt
TEMPERATURE = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the drafter of a run, and print and write the results. Returns the exit code: 0, or 2 if the run has no
    export.
    """
    parser = argparse.ArgumentParser(prog="python -m train.studies.drafter", description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", default="runs/dspark-demo", help="directory of a finished run")
    parser.add_argument(
        "--tokens",
        type=int,
        default=20_000,
        help="number of tokens to generate from held-out prompts, greedily and sampled",
    )
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="*",
        default=[1024, 8192],
        help="context lengths at which to measure speeds; none: no speeds",
    )
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument(
        "--pieces", type=int, default=7, help="number of timed pieces with, and as many without the drafter"
    )
    options = parser.parse_args(arguments)
    directory = Path(options.run)
    if not (directory / "export").is_dir():
        print(
            f"error: {directory}/export does not exist; train a drafter first: python -m train task=dspark ...",
            file=sys.stderr,
        )
        return 2
    torch.set_num_threads(1)
    saved = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))
    saved["data"]["tokenizer"] = "train"  # "train" means: use the tokenizer of init_from, as the run did
    config = parse_run(saved)
    run = build(config)
    backbone = run.backbone
    drafters = {
        "trained": load_drafter(directory / "export", backbone),
        "Markov head alone": markov_alone(build(config)),
        "without training": run.model,
    }
    prompts = held_out_prompts(run, -(-options.tokens // NEW))
    found = {name: quality(run, drafter, prompts) for name, drafter in drafters.items()}
    speeds = [
        speed(backbone, drafters["trained"], held_out_text(run, context * batch).view(batch, context), options.pieces)
        for context in options.contexts
        for batch in options.batches
    ]
    text = report(found, speeds, len(prompts) * NEW)
    print(text)
    write_text(directory / "drafter.md", text + "\n")
    write_text(directory / "drafter.json", json.dumps({"quality": found, "speed": speeds}, indent=1) + "\n")
    return 0


def markov_alone(run: Run) -> Drafter:
    """Train a drafter of which only the Markov head contributes to the logits, with the settings of the run.

    The weight of its final norm is zero, so all other parts of the drafter add nothing to the logits.
    """
    last = run.model.mtp[-1]
    with torch.no_grad():
        last.norm.weight.zero_()
    for name, parameter in run.model.named_parameters():
        parameter.requires_grad_("markov_head" in name or "confidence_head" in name)
    state, batches = TrainerState(), iter(run.train_batches)
    while state.tokens < run.config.task.tokens:
        now = time.perf_counter()
        step(run, state, [next(batches) for _ in range(run.micro_batches)], 0.0, now)
    return run.model


def held_out_prompts(run: Run, count: int) -> list[tuple[int, ...]]:
    """Return ``count`` prompts. Each prompt is up to ``PROMPT`` tokens that precede a random position in a held-out
    document.

    Raises:
        ValueError: the held-out rows have fewer than ``count`` such positions.
    """
    found: list[tuple[int, ...]] = []
    row = 0
    for batch in run.valid_batches:
        batch = with_anchors(batch, 1, row, 8, HELD_OUT)
        row += len(batch["input_ids"])
        for ids, anchors, lengths in zip(*(batch[n] for n in ("input_ids", "anchors", "seq_lens")), strict=True):
            ends = lengths.cumsum(0)
            for anchor in anchors[anchors >= 0].tolist():
                number = int((ends <= anchor).sum())
                begin = max(int(ends[number] - lengths[number]), anchor - PROMPT)
                found.append(tuple(ids[begin:anchor].tolist()))
    order = np.random.default_rng(0).permutation(len(found))[:count]
    if len(order) < count:
        raise ValueError(f"the held-out rows give only {len(found)} prompts, but {count} are needed")
    return [found[at] for at in order]


def held_out_text(run: Run, count: int) -> torch.Tensor:
    """Return the first ``count`` tokens (int64) of all held-out rows in order, repeated if there are too few."""
    rows = [
        ids[: lengths.sum()]
        for b in run.valid_batches
        for ids, lengths in zip(b["input_ids"], b["seq_lens"], strict=True)
    ]
    text = torch.cat(rows)
    return text.repeat(-(-count // len(text)))[:count]


def quality(run: Run, drafter: Drafter, prompts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Measure how many draft tokens are accepted.

    Returns the acceptance statistics for greedy ("greedy") and sampled ("drawn") continuations of the prompts, and the
    expected accepted length along the held-out text itself ("expected").
    """
    run.model = drafter
    measured = evaluate(run)
    assert measured is not None, "an evaluation without a stop function must return a record"
    found: dict[str, Any] = {"expected": {name: measured[name] for name in ("tau", "alpha", "ece")}}
    for kind, temperature in (("greedy", 0.0), ("drawn", TEMPERATURE)):
        requests = [Request(p, NEW, temperature=temperature, seed=n) for n, p in enumerate(prompts)]
        found[kind] = accepted_lengths(generate(drafter.backbone, requests, drafter=drafter), drafter.block_size)
    return found


def accepted_lengths(samples: Sequence[Sample], block_size: int) -> dict[str, Any]:
    """Compute the mean number of accepted draft tokens per forward pass, over all passes with drafts.

    The result also has a 95 % bootstrap confidence interval of this mean, resampled over prompts, and the share of
    accepted drafts for each slot of a block, over the passes in which all drafts of earlier slots were accepted.
    """
    passes = np.array([len(sample.accepted) for sample in samples])
    sums = np.array([sum(sample.accepted) for sample in samples])
    random = np.random.default_rng(0)
    draws = random.integers(0, len(samples), (2000, len(samples)))
    low, high = np.quantile(sums[draws].sum(1) / passes[draws].sum(1), [0.025, 0.975])
    every = np.concatenate([sample.accepted for sample in samples])
    reached = [(every >= slot).sum() for slot in range(block_size + 1)]
    return {
        "accepted": sums.sum() / passes.sum(),
        "interval": [low, high],
        "by_slot": [float(b / a) if a else None for a, b in zip(reached, reached[1:], strict=False)],
        "passes": int(passes.sum()),
    }


def speed(backbone: DeepseekV41, drafter: Drafter, prompts: torch.Tensor, pieces: int) -> dict[str, Any]:
    """Measure tokens per second of greedy decoding that continues ``prompts`` [batch, context], with and without
    drafter.

    Short timed intervals of generation with and without the drafter alternate; the reported speed ratio is the median
    over ``pieces`` pairs of intervals.
    """
    generators = {"without": Generator(backbone), "with": Generator(backbone, drafter=drafter)}
    rates: dict[str, list[float]] = {name: [] for name in generators}
    for generator in generators.values():
        for prompt in prompts.tolist():
            generator.submit(Request(tuple(prompt), 10_000, temperature=0))
        generator.step()
    for _ in range(pieces):
        for name, generator in generators.items():
            rates[name].append(_rate(generator))
    ratios = [a / b for a, b in zip(rates["with"], rates["without"], strict=True)]
    return {
        "context": prompts.shape[1],
        "batch": len(prompts),
        **{name: statistics.median(values) for name, values in rates.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def _rate(generator: Generator, tokens: int = 16) -> float:
    """Measure tokens per second until the sequences have grown by at least ``tokens`` tokens each, on average."""
    started, before = time.perf_counter(), _written(generator)
    while _written(generator) - before < tokens * len(generator.running):
        generator.step()
    return (_written(generator) - before) / (time.perf_counter() - started)


def _written(generator: Generator) -> int:
    return sum(len(running.sample.tokens) for running in generator.running)


def report(found: dict[str, Any], speeds: Sequence[dict[str, Any]], tokens: int) -> str:
    """Format the results as Markdown tables."""
    lines = [
        f"Mean number of accepted draft tokens per forward pass; {tokens:,} tokens generated after held-out prompts.",
        "",
        "| drafter | greedy | 95 % interval | by slot | drawn | 95 % interval | expected along the text | ECE |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in found.items():
        greedy, drawn, expected = result["greedy"], result["drawn"], result["expected"]
        by_slot = ", ".join("-" if share is None else f"{share:.2f}" for share in greedy["by_slot"])
        cells = [
            name,
            f"{greedy['accepted']:.2f}",
            _interval(greedy),
            by_slot,
            f"{drawn['accepted']:.2f}",
            _interval(drawn),
        ]
        lines.append("| " + " | ".join([*cells, f"{expected['tau'] - 1:.2f}", f"{expected['ece']:.3f}"]) + " |")
    if speeds:
        lines += [
            "",
            "Greedy decoding on one core in tokens per second (ratio: median and range over pairs of pieces).",
            "",
            "| context | sequences | without a drafter | with it | ratio |",
            "|---|---|---|---|---|",
        ]
    for row in speeds:
        span = f"{row['ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})"
        lines.append(f"| {row['context']} | {row['batch']} | {row['without']:.1f} | {row['with']:.1f} | {span} |")
    return "\n".join(lines)


def _interval(result: dict[str, Any]) -> str:
    low, high = result["interval"]
    return f"{low:.2f} to {high:.2f}"


if __name__ == "__main__":
    sys.exit(main())
