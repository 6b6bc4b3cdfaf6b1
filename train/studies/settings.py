"""The schema of a study's file in ``conf/study``."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import yaml
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from train.config.compose import CONF_DIR
from train.config.strict import STRICT
from train.errors import InputError


class StudyError(InputError):
    """A study cannot be run, or some of its runs failed. The message gives the reason, or names the failed runs."""


@dataclass(config=STRICT, frozen=True)
class Tune:
    """A setting that is tuned for an arm.

    Every value is trained with the first seed; the value with the lowest validation loss is used for all seeds.
    """

    key: str
    values: Annotated[list[float], Field(min_length=2)]


@dataclass(config=STRICT, frozen=True)
class Arm:
    """One of the variants that a study compares: the experiment of the study with some settings changed."""

    overrides: list[str]
    tune: Tune | None = None


@dataclass(config=STRICT, frozen=True)
class Measure:
    """A metric of a finished run that a study compares.

    path: dotted keys into the record of the last evaluation or of one of the study's ``evaluations``; or ``a - b`` for
    the difference of two such paths. If the value is a list, the metric is its mean.
    """

    path: str
    digits: int = 4


@dataclass(config=STRICT, frozen=True)
class Claim:
    """An expected result: the metric ``measure`` is lower (or higher) for ``arm`` than for ``than``.

    The difference must be more than ``margin``, for every seed or on average.
    """

    text: str
    measure: str
    arm: str
    than: str
    should_be: Literal["lower", "higher"]
    margin: float = 0.0
    seeds: Literal["all", "mean"] = "all"


@dataclass(config=STRICT, frozen=True)
class Recovery:
    """An expected result: the arm ``arm`` recovers at least the share ``share`` of what the arm ``best`` gains over the
    arm ``worst`` in every one of ``measures``, which are losses.

    A measure counts only if ``best`` is better than ``worst`` with every seed, and by at least ``least`` on average
    over the seeds. Otherwise there is no effect to recover.
    """

    text: str
    measures: Annotated[list[str], Field(min_length=1)]
    arm: str
    best: str
    worst: str
    share: float = 0.8
    least: float = 0.2


@dataclass(config=STRICT, frozen=True)
class Study:
    """A comparison of several arms (variants) over several seeds, described by a file ``conf/study/NAME.yaml``."""

    title: str
    experiment: str
    seeds: Annotated[list[int], Field(min_length=1)]
    arms: Annotated[dict[str, Arm], Field(min_length=1)]
    measures: Annotated[dict[str, Measure], Field(min_length=1)]
    claims: list[Claim] = Field(default_factory=list)
    recoveries: list[Recovery] = Field(default_factory=list)
    # Further evaluations of the final weights: name -> overrides
    evaluations: dict[str, list[str]] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)  # printed below the table

    def __post_init__(self) -> None:
        named = [
            (f"claims.{i}.{key}", value, known)
            for i, claim in enumerate(self.claims)
            for key, value, known in (
                ("measure", claim.measure, self.measures),
                ("arm", claim.arm, self.arms),
                ("than", claim.than, self.arms),
            )
        ]
        for i, recovery in enumerate(self.recoveries):
            arms = {"arm": recovery.arm, "best": recovery.best, "worst": recovery.worst}
            named += [(f"recoveries.{i}.{key}", value, self.arms) for key, value in arms.items()]
            named += [(f"recoveries.{i}.measures", value, self.measures) for value in recovery.measures]
        bad = [
            f"{key}: {value!r} is unknown; it must be one of {', '.join(known)}"
            for key, value, known in named
            if value not in known
        ]
        if bad:
            raise ValueError("; ".join(bad))

    def tune_of(self, arm: str) -> Tune:
        """Return the setting that the arm ``arm`` tunes, with the values to try. The arm must be one that tunes a
        setting.
        """
        tune = self.arms[arm].tune
        assert tune is not None, f"arm {arm} tunes no setting"
        return tune


def read_study(name: str) -> Study:
    """Read and check ``conf/study/<name>.yaml``.

    Raises:
        StudyError: there is no such study, or its file is invalid.
    """
    path = CONF_DIR / "study" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml")))
        raise StudyError(f"there is no study {name!r}; the studies are {known}")
    try:
        return TypeAdapter(Study).validate_json(json.dumps(yaml.safe_load(path.read_text(encoding="utf-8"))))
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)]
        raise StudyError(f"{path} has these problems:\n  " + "\n  ".join(lines)) from None
