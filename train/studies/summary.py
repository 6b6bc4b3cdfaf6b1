"""Computes means, differences and verdicts on claims from the metrics of finished runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from statistics import fmean
from typing import Any

from train.config.schema import Config
from train.studies.settings import Claim, Recovery, Study, StudyError


def value_of(record: Mapping[str, Any], path: str) -> float:
    """Return the number at a metric's path in the record of an evaluation. Raises StudyError if a key is missing."""
    if " - " in path:
        left, right = path.split(" - ")
        return value_of(record, left) - value_of(record, right)
    value: Any = record
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise StudyError(f"measure {path!r}: the evaluation has no key {key!r}, only {', '.join(value)}")
        value = value[key]
    return fmean(v for v in value if v is not None) if isinstance(value, list) else float(value)


def summarise(
    study: Study,
    base: Config,
    tuning: Mapping[str, Mapping[float, float]],
    chosen: Mapping[str, float],
    runs: Mapping[str, Mapping[int, Mapping[str, float]]],
) -> dict[str, Any]:
    """Collect all results of a study for JSON: the metrics of each run, their means, differences and verdicts.

    Args:
        base: the configuration of the study's experiment.
        tuning: validation loss for each value that an arm tried, by arm.
        chosen: the value with the lowest validation loss, by arm.
        runs: metrics of each run, by arm and seed.
    """
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
        "recoveries": [part for recovery in study.recoveries for part in judge_recovery(recovery, runs)],
        "notes": study.notes + list(edge_notes(study, chosen)),
    }


def judge(claim: Claim, runs: Mapping[str, Mapping[int, Mapping[str, float]]]) -> dict[str, Any]:
    """Decide whether a claim holds. Returns a dictionary with the fields of the claim, for each seed the measure of the
    arm ``arm`` minus the measure of the arm ``than``, and the verdict.
    """
    pairs = [(runs[claim.arm][seed][claim.measure], runs[claim.than][seed][claim.measure]) for seed in runs[claim.arm]]
    deltas = [a - b for a, b in pairs]
    sign = 1 if claim.should_be == "higher" else -1
    right = [sign * delta > claim.margin for delta in deltas]
    holds = all(right) if claim.seeds == "all" else sign * fmean(deltas) > claim.margin
    return {**asdict(claim), "differences": deltas, "mean": fmean(deltas), "right_in": sum(right), "holds": holds}


def judge_recovery(
    recovery: Recovery, runs: Mapping[str, Mapping[int, Mapping[str, float]]]
) -> Iterator[dict[str, Any]]:
    """For each measure of a ``Recovery``, yield three things: the gains of ``best`` and of ``arm`` over ``worst`` for
    each seed; the mean gain of ``arm`` divided by the mean gain of ``best``; and whether this ratio is high enough.
    Ratio and verdict are None if there is no effect to recover.
    """
    for measure in recovery.measures:
        worst, best, arm = (
            [numbers[measure] for numbers in runs[name].values()]
            for name in (recovery.worst, recovery.best, recovery.arm)
        )
        possible = [w - b for w, b in zip(worst, best, strict=True)]
        gained = [w - a for w, a in zip(worst, arm, strict=True)]
        effect = fmean(possible) >= recovery.least and min(possible) > 0
        share = fmean(gained) / fmean(possible) if effect else None
        yield {
            "text": recovery.text,
            "arm": recovery.arm,
            "measure": measure,
            "possible": possible,
            "gained": gained,
            "share": share,
            "holds": None if share is None else share >= recovery.share,
        }


def edge_notes(study: Study, chosen: Mapping[str, float]) -> Iterator[str]:
    """Yield a note for every tuned value that is the lowest or highest one tried, since values outside the tried range
    may be better.
    """
    for name, value in chosen.items():
        values = sorted(study.tune_of(name).values)
        if value in (values[0], values[-1]):
            key = study.tune_of(name).key
            yield f"{name}: the best value of {key}, {value:g}, is at the end of the tried values {values}"
