"""``python -m train.studies NAME``: train the arms of ``conf/study/NAME.yaml`` side by side and print what came out.

Every (arm, seed) is an ordinary run of ``python -m train`` in a process of its own with one thread. Runs are named by
the settings in which they differ from their experiment, so studies of one experiment share equal runs, and nothing that
is finished is trained again: after an interruption, the same command goes on. The table is printed, and written with
all its numbers to ``<output>/NAME.md`` and ``.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, NamedTuple

import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from rich.console import Console
from rich.table import Table

from train.build import build
from train.checkpoint import run_state
from train.checkpoint.run_state import write_text
from train.config.schema import CONF_DIR, Config, differences, open_overrides, parse, to_dict
from train.config.strict import STRICT
from train.errors import REFUSED, InputError, user_errors
from train.loop import evaluate, resume

IRRELEVANT = (  # move no weight
    "name",
    "output",
    "logger.",
    "checkpoint.",
    "task.sample_",
    "task.eval_every",
    "data.cache_dir",
)


class StudyError(InputError):
    """A study cannot be run, or some of its runs failed; the message names them."""


@dataclass(config=STRICT, frozen=True)
class Tune:
    """A setting that an arm may choose: every value runs on the first seed, the lowest validation loss wins."""

    key: str
    values: Annotated[list[float], Field(min_length=2)]


@dataclass(config=STRICT, frozen=True)
class Arm:
    """One side of a comparison: the experiment with these overrides."""

    overrides: list[str]
    tune: Tune | None = None


@dataclass(config=STRICT, frozen=True)
class Measure:
    """A number of a finished run: a dotted path into its last evaluation, or into one of the study's ``evaluations``;
    ``a - b`` is the difference of two. A list counts by its mean.
    """

    path: str
    digits: int = 4


@dataclass(config=STRICT, frozen=True)
class Claim:
    """What should come out: ``arm`` below or above ``than`` by more than ``margin`` in every seed, or on average."""

    text: str
    measure: str
    arm: str
    than: str
    should_be: Literal["lower", "higher"]
    margin: float = 0.0
    seeds: Literal["all", "mean"] = "all"


@dataclass(config=STRICT, frozen=True)
class Study:
    """A comparison, as its file in ``conf/study`` describes it."""

    title: str
    experiment: str
    seeds: Annotated[list[int], Field(min_length=1)]
    arms: Annotated[dict[str, Arm], Field(min_length=1)]
    measures: Annotated[dict[str, Measure], Field(min_length=1)]
    claims: list[Claim] = Field(default_factory=list)
    evaluations: dict[str, list[str]] = Field(default_factory=dict)  # the same weights under other settings
    notes: list[str] = Field(default_factory=list)  # printed below the table

    def __post_init__(self) -> None:
        bad = [
            f"claims.{i}.{key}: {value!r} is not among {', '.join(known)}"
            for i, claim in enumerate(self.claims)
            for key, value, known in (
                ("measure", claim.measure, self.measures),
                ("arm", claim.arm, self.arms),
                ("than", claim.than, self.arms),
            )
            if value not in known
        ]
        if bad:
            raise ValueError("; ".join(bad))


class Job(NamedTuple):
    """One run of a study."""

    arm: str
    value: float | None  # of the arm's tuned setting
    seed: int
    overrides: tuple[str, ...]
    config: Config

    def __str__(self) -> str:
        return f"{self.arm}{'' if self.value is None else f' at {self.value:g}'}, seed {self.seed}"


class Runner:
    """Composes, trains and reads the runs of one study below ``output``."""

    def __init__(self, study: Study, output: Path, extra: Sequence[str], jobs: int):
        self.study, self.extra, self.workers = study, tuple(extra), jobs
        self.directory = output / study.experiment
        self.base = self._compose(())
        self.running: set[int] = set()  # process ids

    def run(self) -> dict[str, Any]:
        """Train what is missing; tuned arms first choose on the first seed. Returns what ``summarise`` makes of it."""
        study = self.study
        first, rest = study.seeds[0], study.seeds[1:]
        trials = {
            name: [self.job(name, value, first) for value in arm.tune.values]
            for name, arm in study.arms.items()
            if arm.tune
        }
        plain = [self.job(name, None, seed) for name in study.arms if name not in trials for seed in study.seeds]
        self.train([*(job for tried in trials.values() for job in tried), *plain])
        tuning = {
            name: {job.value: self.state(job)["last_valid"]["loss"] for job in tried} for name, tried in trials.items()
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
        tuned = () if value is None else (f"{arm.tune.key}={value!r}",)
        overrides = (*arm.overrides, *tuned, f"seed={seed}")
        plain = self._compose(overrides)
        run = run_name(differences(to_dict(self.base), plain), seed)
        overrides = (*overrides, f"name={run}", f"output={self.directory}", "logger.progress=false")
        return Job(name, value, seed, self._arguments(overrides), self._compose(overrides))

    def train(self, jobs: list[Job]) -> None:
        """Train the jobs that are not finished, ``workers`` at a time.

        Raises:
            StudyError: after all of them ended, naming those that failed with the last lines each printed.
        """
        for job in jobs:
            check_same(job)
        waiting = {job.config.run_dir: job for job in jobs if not finished(job)}
        say(f"{len(jobs)} runs, {len(jobs) - len(waiting)} finished before")
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
            header = f"{len(failures)} of {len(waiting)} runs failed; the others are kept"
            raise StudyError("\n".join([header, *failures]))

    def _train_one(self, job: Job) -> str | None:
        """None, or why it failed."""
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
                start_new_session=True,  # Ctrl-C comes to this process, which passes it on as "save and stop"
            )
            self.running.add(process.pid)
            _, status, usage = os.wait4(process.pid, 0)  # like process.wait(), and says what the process used
            self.running.discard(process.pid)
            process.returncode = os.waitstatus_to_exitcode(status)
        add_cost(directory, time.perf_counter() - started, usage.ru_utime + usage.ru_stime)
        if process.returncode == 0:
            return None
        lines = (directory / "output.txt").read_text(encoding="utf-8").splitlines()
        return f"exit code {process.returncode}\n" + "\n".join(f"    {line}" for line in lines[-6:])

    def state(self, job: Job) -> dict[str, Any]:
        found = read_state(job.config.run_dir)
        assert found is not None, f"{job} has just been trained"
        return found

    def numbers(self, job: Job) -> dict[str, float]:
        """The study's measures of a finished run, its seconds of training and its process's CPU seconds."""
        state = self.state(job)
        records = {name: self._evaluation(job, changes) for name, changes in self.study.evaluations.items()}
        found = {name: value_of({**state["last_valid"], **records}, m.path) for name, m in self.study.measures.items()}
        cost = json.loads((job.config.run_dir / "cost.json").read_text(encoding="utf-8"))
        return {**found, "tokens": state["tokens"], "seconds": state["seconds"], "cpu_seconds": cost["cpu_seconds"]}

    def _evaluation(self, job: Job, changes: list[str]) -> dict[str, Any]:
        """The run's final weights, evaluated under the overrides ``changes``; kept beside the run."""
        path = job.config.run_dir / f"evaluation-{as_name(changes)}.json"
        if not path.exists():
            say(f"evaluating {job} with {' '.join(changes)}")
            with one_thread():
                with user_errors():
                    run = build(parse(self._raw((*job.overrides, *changes))))
                    resume(run, run_state.latest(job.config.run_dir / "checkpoints"))
                write_text(path, json.dumps(evaluate(run)))
        return json.loads(path.read_text(encoding="utf-8"))

    def _arguments(self, overrides: Sequence[str]) -> tuple[str, ...]:
        return (f"experiment={self.study.experiment}", *self.extra, *overrides)

    def _compose(self, overrides: Sequence[str]) -> Config:
        return parse(self._raw(self._arguments(overrides)))

    def _raw(self, arguments: Sequence[str]) -> Any:
        try:
            with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
                return compose("train", overrides=open_overrides(list(arguments)))
        except HydraException as error:  # an override that cannot be read, a choice that does not exist
            raise StudyError(f"{' '.join(arguments)}: {str(error).splitlines()[0]}") from None


def read_study(name: str) -> Study:
    """``conf/study/<name>.yaml``, checked.

    Raises:
        StudyError: there is no such study, or its file has a mistake.
    """
    path = CONF_DIR / "study" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml")))
        raise StudyError(f"there is no study {name!r}; known are {known}")
    try:
        return TypeAdapter(Study).validate_json(json.dumps(yaml.safe_load(path.read_text(encoding="utf-8"))))
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)]
        raise StudyError(f"{path} has these problems:\n  " + "\n  ".join(lines)) from None


def run_name(changed: list[tuple[str, Any, Any]], seed: int) -> str:
    """A run's directory name: how it differs from its experiment, and its seed."""
    parts = [f"{key.split('.')[-1]}-{new}" for key, _, new in changed if key != "seed"]
    return as_name([*(parts or ["base"]), f"seed{seed}"])


def as_name(parts: Sequence[str]) -> str:
    """A file name that says ``parts``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(parts))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute as the runs do, to the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def relevant(changed: list[tuple[str, Any, Any]]) -> list[tuple[str, Any, Any]]:
    return [item for item in changed if not item[0].startswith(IRRELEVANT)]


def check_same(job: Job) -> None:
    """Refuse to take a run that was made with other settings, finished or not, for the job's."""
    path = job.config.run_dir / "config.yaml"
    if path.exists():
        changed = relevant(differences(yaml.safe_load(path.read_text(encoding="utf-8")), job.config))
        if changed:
            shown = "; ".join(f"{key}: {old} there, {new} now" for key, old, new in changed)
            raise StudyError(
                f"{job.config.run_dir} was trained with other settings ({shown}). Remove it to train it again"
            )


def finished(job: Job) -> bool:
    state = read_state(job.config.run_dir)
    return state is not None and state["tokens"] >= job.config.task.tokens


def read_state(directory: Path) -> dict[str, Any] | None:
    """The counters of a run's newest checkpoint."""
    folder = run_state.latest(directory / "checkpoints")
    return None if folder is None else json.loads((folder / "state.json").read_text(encoding="utf-8"))["state"]


def add_cost(directory: Path, seconds: float, cpu_seconds: float) -> None:
    """Add a process's time to what a run has cost so far, start-up and evaluations included."""
    path = directory / "cost.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"seconds": 0.0, "cpu_seconds": 0.0}
    total = {"seconds": before["seconds"] + seconds, "cpu_seconds": before["cpu_seconds"] + cpu_seconds}
    write_text(path, json.dumps(total))


def value_of(record: Mapping[str, Any], path: str) -> float:
    """The number at a measure's path."""
    if " - " in path:
        left, right = path.split(" - ")
        return value_of(record, left) - value_of(record, right)
    value: Any = record
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise StudyError(f"measure {path!r}: the evaluation has no {key!r}, only {', '.join(value)}")
        value = value[key]
    return fmean(v for v in value if v is not None) if isinstance(value, list) else float(value)


def summarise(
    study: Study,
    base: Config,
    tuning: Mapping[str, Mapping[float, float]],
    chosen: Mapping[str, float],
    runs: Mapping[str, Mapping[int, Mapping[str, float]]],
) -> dict[str, Any]:
    """All numbers of a study, ready for JSON: per run, means, differences and verdicts."""
    columns = [*study.measures, "tokens", "seconds", "cpu_seconds"]
    arms = {
        name: {
            "overrides": study.arms[name].overrides,
            "tuned": None if name not in chosen else {study.arms[name].tune.key: chosen[name]},
            "mean": {column: fmean(numbers[column] for numbers in by_seed.values()) for column in columns},
            "seeds": {str(seed): dict(numbers) for seed, numbers in by_seed.items()},
        }
        for name, by_seed in runs.items()
    }
    return {
        "title": study.title,
        "experiment": study.experiment,
        "tokens": base.task.tokens,
        "seeds": study.seeds,
        "tuning": {name: {f"{value:g}": loss for value, loss in losses.items()} for name, losses in tuning.items()},
        "arms": arms,
        "claims": [judge(claim, runs) for claim in study.claims],
        "notes": study.notes + list(edge_notes(study, chosen)),
    }


def judge(claim: Claim, runs: Mapping[str, Mapping[int, Mapping[str, float]]]) -> dict[str, Any]:
    """A claim with its differences (arm minus the other, the same seed) and whether it holds."""
    pairs = [(runs[claim.arm][seed][claim.measure], runs[claim.than][seed][claim.measure]) for seed in runs[claim.arm]]
    deltas = [a - b for a, b in pairs]
    sign = 1 if claim.should_be == "higher" else -1
    right = [sign * delta > claim.margin for delta in deltas]
    holds = all(right) if claim.seeds == "all" else sign * fmean(deltas) > claim.margin
    return {**asdict(claim), "differences": deltas, "mean": fmean(deltas), "right_in": sum(right), "holds": holds}


def edge_notes(study: Study, chosen: Mapping[str, float]) -> Iterator[str]:
    """A choice at the edge of what was tried could be better still, so it is said."""
    for name, value in chosen.items():
        values = sorted(study.arms[name].tune.values)
        if value in (values[0], values[-1]):
            yield f"{name}: the best {study.arms[name].tune.key} tried, {value:g}, lies at the edge of {values}"


def tables(study: Study, result: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(caption, header, rows) of what is printed."""
    found = []
    if result["tuning"]:
        rows = [
            [name, study.arms[name].tune.key, *(f"{value}: {loss:.4f}" for value, loss in losses.items())]
            for name, losses in result["tuning"].items()
        ]
        width = max(map(len, rows))
        header = ["arm", "setting", *["value: loss"] * (width - 2)]
        rows = [row + [""] * (width - len(row)) for row in rows]
        found.append((f"Tuning: validation loss on seed {result['seeds'][0]}", header, rows))
    header = ["arm", *study.measures, "tokens", "seconds", "CPU seconds"]
    rows = []
    for name, arm in result["arms"].items():
        tuned = "".join(f" ({key.split('.')[-1]} {value:g})" for key, value in (arm["tuned"] or {}).items())
        row = [name + tuned]
        for measure, settings in study.measures.items():
            values = " ".join(f"{numbers[measure]:.{settings.digits}f}" for numbers in arm["seeds"].values())
            row.append(f"{arm['mean'][measure]:.{settings.digits}f} ({values})")
        mean = arm["mean"]
        rows.append([*row, f"{mean['tokens']:,.0f}", f"{mean['seconds']:.0f}", f"{mean['cpu_seconds']:.0f}"])
    seeds = ", ".join(map(str, result["seeds"]))
    found.append((f"Result: mean (seeds {seeds})", header, rows))
    rows = [claim_row(claim, study.measures[claim["measure"]].digits) for claim in result["claims"]]
    found.append(("Claims", ["claim", "measure", "difference", "mean (per seed)", "right in", "verdict"], rows))
    return found


def claim_row(claim: Mapping[str, Any], digits: int) -> list[str]:
    deltas = " ".join(f"{delta:+.{digits}f}" for delta in claim["differences"])
    return [
        claim["text"],
        claim["measure"],
        f"{claim['arm']} - {claim['than']}",
        f"{claim['mean']:+.{digits}f} ({deltas})",
        f"{claim['right_in']} of {len(claim['differences'])} seeds",
        "holds" if claim["holds"] else "does not hold at this scale",
    ]


def markdown(study: Study, result: Mapping[str, Any]) -> str:
    lines = [f"### {study.title}"]
    for caption, header, rows in tables(study, result):
        cells = [header, ["---"] * len(header), *rows]
        lines += ["", f"{caption}:", "", *("| " + " | ".join(row) + " |" for row in cells)]
    return "\n".join([*lines, "", *(f"- {note}" for note in result["notes"])]).rstrip() + "\n"


def show(study: Study, result: Mapping[str, Any], console: Console) -> None:
    """Print the tables."""
    console.print(study.title, style="bold")
    for caption, header, rows in tables(study, result):
        table = Table(title=caption, title_justify="left")
        for column in header:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in result["notes"]:
        console.print(f"- {note}", highlight=False)


def positive(text: str) -> int:
    """A number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one study; exit code 0, or 2 with a message."""
    parser = argparse.ArgumentParser(prog="python -m train.studies", description=__doc__.splitlines()[0])
    parser.add_argument("name", help="a file in conf/study, without .yaml")
    parser.add_argument("overrides", nargs="*", help="key=value for every run, for example task.tokens=20000")
    parser.add_argument("--jobs", type=positive, default=2, help="runs at a time, one thread each (default 2)")
    parser.add_argument("--output", type=Path, default=Path("runs/study"), help="where runs and tables go")
    options = parser.parse_args(arguments)
    path = options.output / options.name
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        study = read_study(options.name)
        result = Runner(study, options.output, options.overrides, options.jobs).run()
        write_text(path.with_suffix(".json"), json.dumps(result, indent=1))
        write_text(path.with_suffix(".md"), markdown(study, result))
    except REFUSED as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped. The same command goes on where it was.", file=sys.stderr)
        return 130
    show(study, result, Console())
    print(f"written: {path}.md and .json")
    return 0
