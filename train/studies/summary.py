"""Means, differences and verdicts on claims, from the numbers of finished runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from statistics import fmean
from typing import Any

from train.config.schema import Config
from train.studies.settings import Claim, Study, StudyError


def value_of(record: Mapping[str, Any], path: str) -> float:
    """The number at a measure's path in an evaluation's record. Raises StudyError if the record has no such key."""
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
            "tuned": None if name not in chosen else {study.tune_of(name).key: chosen[name]},
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
    """A claim with its differences (``arm`` minus ``than``, for each seed) and whether it holds."""
    pairs = [(runs[claim.arm][seed][claim.measure], runs[claim.than][seed][claim.measure]) for seed in runs[claim.arm]]
    deltas = [a - b for a, b in pairs]
    sign = 1 if claim.should_be == "higher" else -1
    right = [sign * delta > claim.margin for delta in deltas]
    holds = all(right) if claim.seeds == "all" else sign * fmean(deltas) > claim.margin
    return {**asdict(claim), "differences": deltas, "mean": fmean(deltas), "right_in": sum(right), "holds": holds}


def edge_notes(study: Study, chosen: Mapping[str, float]) -> Iterator[str]:
    """A note for every tuned value at the edge of the values that were tried, since a value beyond could be better."""
    for name, value in chosen.items():
        values = sorted(study.tune_of(name).values)
        if value in (values[0], values[-1]):
            yield f"{name}: the best {study.tune_of(name).key} tried, {value:g}, lies at the edge of {values}"
