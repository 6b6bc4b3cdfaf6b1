"""``python -m train.studies.drafter [RUN]``: what the drafter of a finished ``task=dspark`` run is worth.

Prints, and writes into the run's directory as ``drafter.md`` and ``drafter.json``:
  - accepted length in speculative decoding from held-out prompts, greedy and drawn, by slot, beside two baselines: the
    same drafter before training, and its Markov head alone, trained on as many tokens (the rest of the drafter then
    adds nothing to the logits);
  - tokens per second with and without the drafter, in alternating pieces of one run of the same requests.
Speeds are those of one core; they compare the two ways on one machine, no more.
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

NEW = 64  # tokens of a continuation
PROMPT = 256  # tokens of a prompt, at most
TEMPERATURE = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m train.studies.drafter", description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", default="runs/dspark-demo", help="directory of a finished run")
    parser.add_argument("--tokens", type=int, default=20_000, help="continued from held-out prompts, of each kind")
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 8192], help="of the speeds; none: no speeds")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--pieces", type=int, default=7, help="of each speed, paired")
    options = parser.parse_args(arguments)
    directory = Path(options.run)
    if not (directory / "export").is_dir():
        print(
            f"error: {directory}/export does not exist; train it first: python -m train task=dspark ...",
            file=sys.stderr,
        )
        return 2
    torch.set_num_threads(1)
    saved = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))
    saved["data"]["tokenizer"] = "train"  # that of init_from, as the run had it
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
    """A drafter whose logits are those of its Markov head, trained as the run says."""
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
    """Beginnings of held-out documents up to places drawn at random, up to ``PROMPT`` tokens of each."""
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
        raise ValueError(f"the held-out rows have places for {len(found)} prompts, {count} are needed")
    return [found[at] for at in order]


def held_out_text(run: Run, count: int) -> torch.Tensor:
    """int64 [count]: held-out tokens, again from the beginning when there are no more."""
    rows = [
        ids[: lengths.sum()]
        for b in run.valid_batches
        for ids, lengths in zip(b["input_ids"], b["seq_lens"], strict=True)
    ]
    text = torch.cat(rows)
    return text.repeat(-(-count // len(text)))[:count]


def quality(run: Run, drafter: Drafter, prompts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Accepted lengths from held-out prompts; and, along the held-out text itself, what is expected of them."""
    run.model = drafter
    measured = evaluate(run)
    assert measured is not None, "nothing stops it"
    found: dict[str, Any] = {"expected": {name: measured[name] for name in ("tau", "alpha", "ece")}}
    for kind, temperature in (("greedy", 0.0), ("drawn", TEMPERATURE)):
        requests = [Request(p, NEW, temperature=temperature, seed=n) for n, p in enumerate(prompts)]
        found[kind] = accepted_lengths(generate(drafter.backbone, requests, drafter=drafter), drafter.block_size)
    return found


def accepted_lengths(samples: Sequence[Sample], block_size: int) -> dict[str, Any]:
    """Drafts accepted in a pass over drafts, on average over all passes, with a bootstrap interval of 95 % over the
    prompts; and the share of drafts accepted by slot, of those whose predecessors were.
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
    """Tokens per second of greedy decoding behind prompts [batch, context], with and without the drafter, in pieces
    that take turns; the ratio is the median over the pairs.
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
    """Tokens per second of the next so many tokens of each sequence, or a few more."""
    started, before = time.perf_counter(), _written(generator)
    while _written(generator) - before < tokens * len(generator.running):
        generator.step()
    return (_written(generator) - before) / (time.perf_counter() - started)


def _written(generator: Generator) -> int:
    return sum(len(running.sample.tokens) for running in generator.running)


def report(found: dict[str, Any], speeds: Sequence[dict[str, Any]], tokens: int) -> str:
    """The numbers as Markdown."""
    lines = [
        f"Drafts accepted in a pass, beyond the backbone's own token; {tokens:,} tokens behind held-out prompts.",
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
            "Greedy decoding on one core, tokens per second (ratio: median of pairs, and their range).",
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
