"""The optimizer's share of a training step at the demo size. Run `python tests/bench/bench_step.py`.

Real text, the demo's configuration, both rule tables in turn; the share is a ratio of times of one run.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch
from bench_optim import optimizer_share
from hydra import compose, initialize_config_dir

from train.build import Run, build
from train.config.compose import CONF_DIR, open_overrides
from train.config.parse import parse
from train.loop import train_step


def demo_run(rules: str, folder: str) -> Run:
    overrides = ["experiment=demo", f"optim={rules}", f"output={folder}"]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return build(parse(compose("train", overrides=open_overrides(overrides))))


def time_steps(run: Run, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of the optimizer's call and of the whole step, for `steps` steps after two that warm up."""
    inner, whole = [], []
    update = run.optimizer.step

    def now() -> float:
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)  # its work is queued; without this, only the queueing would be timed
        return time.perf_counter()

    def timed() -> None:
        started = now()
        update()
        inner.append(now() - started)

    run.optimizer.step = timed
    batches = iter(run.train_batches)
    for step in range(steps + 2):
        started = now()
        train_step(run, [run.to_device(next(batches))], step, 0)
        whole.append(now() - started)
    return inner[2:], whole[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for rules in ("report", "adamw"):
            run = demo_run(rules, folder)
            inner, whole = time_steps(run, arguments.steps)
            tokens = run.config.task.seq_len * run.config.task.micro_batch
            print(
                f"demo step of {tokens} tokens, optim={rules}, {run.device.type}, {torch.get_num_threads()} threads: "
                f"{min(whole):.3f} s, optimizer {min(inner):.3f} s, share {optimizer_share(inner, whole):.1%}"
            )


if __name__ == "__main__":
    main()
