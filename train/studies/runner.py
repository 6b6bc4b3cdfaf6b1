"""Trains the runs of a study, each in a separate process, and reads their results."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from train.build import build
from train.checkpoint import run_state
from train.checkpoint.run_state import write_text
from train.config.compose import CONF_DIR, open_overrides
from train.config.parse import parse_run
from train.config.resume import differences
from train.config.schema import Config, to_dict
from train.errors import user_errors
from train.evaluation.evaluate import evaluate
from train.studies.settings import Study, StudyError
from train.studies.summary import summarise, value_of

IRRELEVANT = (  # settings that do not change the trained weights
    "name",
    "output",
    "logger.",
    "checkpoint.",
    "task.sample_",
    "task.eval_every",
    "data.cache_dir",
    "parallel.heartbeat_timeout",
    "parallel.start_timeout",
    "parallel.hang_timeout",
    "parallel.collective_timeout",
)


class Job(NamedTuple):
    """One training run of a study: an arm, a seed, and a value of the tuned setting if the arm tunes one."""

    arm: str
    value: float | None  # the value of the arm's tuned setting
    seed: int
    overrides: tuple[str, ...]
    config: Config

    def __str__(self) -> str:
        return f"{self.arm}{'' if self.value is None else f' at {self.value:g}'}, seed {self.seed}"


class Runner:
    """Composes the runs of one study, trains them in folders below ``output``, and reads their results."""

    def __init__(self, study: Study, output: Path, extra: Sequence[str], jobs: int):
        self.study, self.extra, self.workers = study, tuple(extra), jobs
        self.directory = output / study.experiment
        self.base = self._compose(())
        self.running: set[int] = set()  # ids of the processes that are training

    def run(self) -> dict[str, Any]:
        """Train the runs that do not exist yet, and return the summary of all runs (see ``summarise``).

        If an arm tunes a setting, each of its values is first trained with the first seed.
        """
        study = self.study
        first, rest = study.seeds[0], study.seeds[1:]
        trials = {
            name: [self.job(name, value, first) for value in self.study.tune_of(name).values]
            for name, arm in study.arms.items()
            if arm.tune
        }
        plain = [self.job(name, None, seed) for name in study.arms if name not in trials for seed in study.seeds]
        self.train([*(job for tried in trials.values() for job in tried), *plain])
        tuning = {
            name: {job.value: self.state(job)["last_valid"]["loss"] for job in tried if job.value is not None}
            for name, tried in trials.items()
        }
        chosen = {name: min(losses, key=losses.__getitem__) for name, losses in tuning.items()}
        if chosen:
            self.train([self.job(name, value, seed) for name, value in chosen.items() for seed in rest])
        runs = {
            name: {seed: self.numbers(self.job(name, chosen.get(name), seed)) for seed in study.seeds}
            for name in study.arms
        }
        return summarise(study, self.base, tuning, chosen, runs)

    def job(self, name: str, value: float | None, seed: int) -> Job:
        arm = self.study.arms[name]
        tuned = () if value is None else (f"{self.study.tune_of(name).key}={value!r}",)
        overrides = (*arm.overrides, *tuned, f"seed={seed}")
        plain = self._compose(overrides)
        run = run_name(differences(to_dict(self.base), plain), seed)
        overrides = (*overrides, f"name={run}", f"output={self.directory}", "logger.progress=false")
        return Job(name, value, seed, self._arguments(overrides), self._compose(overrides))

    def train(self, jobs: list[Job]) -> None:
        """Train the jobs that are not finished, ``workers`` at a time.

        Raises:
            StudyError: some jobs failed. The error is raised after all jobs have ended, and shows the last lines that
                each failed job printed.
        """
        for job in jobs:
            check_same(job)
        waiting = {job.config.run_dir: job for job in jobs if not finished(job)}
        say(f"{len(jobs)} runs, {len(jobs) - len(waiting)} of them already finished")
        failures = []
        with ThreadPoolExecutor(self.workers) as pool:
            futures = {pool.submit(self._train_one, job): job for job in waiting.values()}
            try:
                for number, future in enumerate(as_completed(futures), 1):
                    job, error = futures[future], future.result()
                    if error is None:
                        valid = self.state(job)["last_valid"]
                        say(f"[{number}/{len(futures)}] {job}: validation loss {valid['loss']:.4f}")
                    else:
                        failures.append(f"{job} ({job.config.run_dir}): {error}")
                        say(f"[{number}/{len(futures)}] {job}: FAILED")
            except BaseException:
                for future in futures:
                    future.cancel()
                for pid in tuple(self.running):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)  # the run saves its state
                raise
        if failures:
            header = f"{len(failures)} of {len(waiting)} runs failed; the results of the others are kept"
            raise StudyError("\n".join([header, *failures]))

    def _train_one(self, job: Job) -> str | None:
        """Train one job in a subprocess. Returns None, or a text that says why it failed."""
        directory = job.config.run_dir
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "train", *job.overrides]
        started = time.perf_counter()
        with open(directory / "output.txt", "w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                start_new_session=True,  # only this process gets Ctrl-C; it sends SIGTERM, so that the run saves
            )
            self.running.add(process.pid)
            _, status, usage = os.wait4(process.pid, 0)  # like process.wait(), but also returns the CPU time
            self.running.discard(process.pid)
            process.returncode = os.waitstatus_to_exitcode(status)
        add_cost(directory, time.perf_counter() - started, usage.ru_utime + usage.ru_stime)
        if process.returncode == 0:
            return None
        lines = (directory / "output.txt").read_text(encoding="utf-8").splitlines()
        return f"exit code {process.returncode}\n" + "\n".join(f"    {line}" for line in lines[-6:])

    def state(self, job: Job) -> dict[str, Any]:
        found = read_state(job.config.run_dir)
        assert found is not None, f"{job} must have a checkpoint, since it has been trained"
        return found

    def numbers(self, job: Job) -> dict[str, float]:
        """Return the metrics of a finished run, its number of training tokens, its training seconds and its CPU
        seconds.
        """
        state = self.state(job)
        records = {name: self._evaluation(job, changes) for name, changes in self.study.evaluations.items()}
        found = {name: value_of({**state["last_valid"], **records}, m.path) for name, m in self.study.measures.items()}
        cost = json.loads((job.config.run_dir / "cost.json").read_text(encoding="utf-8"))
        return {**found, "tokens": state["tokens"], "seconds": state["seconds"], "cpu_seconds": cost["cpu_seconds"]}

    def _evaluation(self, job: Job, changes: list[str]) -> dict[str, Any]:
        """Evaluate the final weights of a run with the settings ``changes``, or read the result of an earlier call.

        The result is stored in the directory of the run.
        """
        path = job.config.run_dir / f"evaluation-{as_name(changes)}.json"
        if not path.exists():
            say(f"evaluating {job} with {' '.join(changes)}")
            with one_thread():
                with user_errors():
                    run = build(parse_run(self._raw((*job.overrides, *changes))))
                    newest = run_state.latest(job.config.run_dir / "checkpoints")
                    assert newest is not None, f"{job} must have a checkpoint, since it has been trained"
                    run.resume(newest)
                write_text(path, json.dumps(evaluate(run)))
        return json.loads(path.read_text(encoding="utf-8"))

    def _arguments(self, overrides: Sequence[str]) -> tuple[str, ...]:
        return (f"experiment={self.study.experiment}", *self.extra, *overrides)

    def _compose(self, overrides: Sequence[str]) -> Config:
        return parse_run(self._raw(self._arguments(overrides)))

    def _raw(self, arguments: Sequence[str]) -> Any:
        try:
            with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
                return compose("train", overrides=open_overrides(list(arguments)))
        except HydraException as error:  # an override is malformed, or names an unknown option
            raise StudyError(f"{' '.join(arguments)}: {str(error).splitlines()[0]}") from None


def run_name(changed: list[tuple[str, Any, Any]], seed: int) -> str:
    """Make the directory name of a run from every setting that differs from the experiment, and the seed."""
    parts = [f"{key.split('.')[-1]}-{new}" for key, _, new in changed if key != "seed"]
    return as_name([*(parts or ["base"]), f"seed{seed}"])


def as_name(parts: Sequence[str]) -> str:
    """Join some texts to a valid file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(parts))


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which torch uses one thread, as in the runs of a study, so that evaluations agree bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def relevant(changed: list[tuple[str, Any, Any]]) -> list[tuple[str, Any, Any]]:
    return [item for item in changed if not item[0].startswith(IRRELEVANT)]


def check_same(job: Job) -> None:
    """Raise StudyError if the job's folder holds a run, finished or not, that was trained with other settings."""
    path = job.config.run_dir / "config.yaml"
    if path.exists():
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
        trained_in = saved["parallel"]["precision"]  # what "auto" was when the run was trained
        changed = relevant(differences(saved, job.config.with_precision(trained_in)))
        if changed:
            shown = "; ".join(f"{key}: trained with {old}, now {new}" for key, old, new in changed)
            raise StudyError(
                f"{job.config.run_dir} was trained with other settings ({shown}). Delete it to train it again"
            )


def finished(job: Job) -> bool:
    state = read_state(job.config.run_dir)
    return state is not None and state["tokens"] >= job.config.task.tokens


def read_state(directory: Path) -> dict[str, Any] | None:
    """Read the trainer state from a run's newest checkpoint. Returns None if there is no checkpoint."""
    folder = run_state.latest(directory / "checkpoints")
    return None if folder is None else json.loads((folder / "state.json").read_text(encoding="utf-8"))["state"]


def add_cost(directory: Path, seconds: float, cpu_seconds: float) -> None:
    """Add the time of a process, including start-up and evaluations, to the total time of the run in ``cost.json``."""
    path = directory / "cost.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"seconds": 0.0, "cpu_seconds": 0.0}
    total = {"seconds": before["seconds"] + seconds, "cpu_seconds": before["cpu_seconds"] + cpu_seconds}
    write_text(path, json.dumps(total))


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
