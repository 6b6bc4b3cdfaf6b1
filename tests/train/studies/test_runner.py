"""A study of two arms and two seeds, run for real; what is asked again, what fails, and how a table is judged."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from model import save_pretrained
from tests.python_server import Program, executable
from train.build import build
from train.config.compose import CONF_DIR, open_overrides
from train.config.parse import parse
from train.config.problems import ConfigError
from train.studies.__main__ import main
from train.studies.runner import Runner, read_state
from train.studies.settings import Arm, Claim, Measure, Recovery, Study, StudyError, Tune, read_study
from train.studies.summary import judge, judge_recovery, value_of
from train.studies.tables import markdown

SHIPPED = sorted(path.stem for path in (CONF_DIR / "study").glob("*.yaml"))


def small(arms: dict[str, Arm], **changes) -> Study:
    settings = {
        "title": "A small study",
        "experiment": "study",
        "seeds": [0, 1],
        "arms": arms,
        "measures": {
            "loss": Measure("loss"),
            "cost": Measure("plain.loss - loss"),
            "recall": Measure("index_recall", 2),
        },
        "evaluations": {"plain": ["runtime.kv_quant=false"], "same": ["runtime.kv_quant=true"]},
        "claims": [Claim("fast learns more", "loss", "fast", "slow", "lower")],
    }
    return Study(**{**settings, **changes})


SLOW = Arm(["optim.schedule.peak=1.0e-6"])
FAST = Arm([], Tune("optim.schedule.peak", [1.0e-5, 1.0e-2]))


@pytest.fixture(scope="module")
def tiny(overrides: list[str]) -> list[str]:
    return [*overrides, "task.tokens=900", "data.validation_rows=2", "optim.schedule.floor=0.0"]


@pytest.fixture(scope="module", autouse=True)
def quick_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A study starts its runs by ``sys.executable``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", executable(tmp_path_factory.mktemp("python") / "python"))
        yield


@pytest.fixture(scope="module")
def done(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """Where the study ran, and its result."""
    output = tmp_path_factory.mktemp("study")
    return output, Runner(small({"slow": SLOW, "fast": FAST}), output, tiny, 2).run()


@pytest.mark.slow
def test_every_arm_and_seed_is_an_ordinary_run(done) -> None:
    output, result = done
    names = {path.name for path in (output / "study").iterdir()}
    assert names == {"peak-1e-06-seed0", "peak-1e-06-seed1", "peak-1e-05-seed0", "base-seed0", "base-seed1"}
    for name in names:
        record = json.loads((output / "study" / name / "metrics.jsonl").read_text().splitlines()[-1])
        assert record["kind"] == "valid" and record["tokens"] >= 900
    for arm in result["arms"].values():
        assert set(arm["seeds"]) == {"0", "1"}
        for numbers in arm["seeds"].values():
            assert numbers["tokens"] >= 900 and numbers["cpu_seconds"] > 0 and numbers["seconds"] > 0


@pytest.mark.slow
def test_a_tuned_arm_takes_the_best_value_of_the_first_seed(done) -> None:
    output, result = done
    losses = result["tuning"]["fast"]
    assert losses["0.01"] < losses["1e-05"]
    assert result["arms"]["fast"]["tuned"] == {"optim.schedule.peak": 0.01}
    assert result["arms"]["fast"]["seeds"]["0"]["loss"] == losses["0.01"]
    assert any("at the end of the tried values" in note for note in result["notes"])


@pytest.mark.slow
def test_the_table_says_what_the_runs_say(done) -> None:
    output, result = done
    records = [
        json.loads((output / "study" / f"base-seed{seed}" / "metrics.jsonl").read_text().splitlines()[-1])
        for seed in (0, 1)
    ]
    mean = (records[0]["loss"] + records[1]["loss"]) / 2
    assert result["arms"]["fast"]["mean"]["loss"] == pytest.approx(mean)
    text = markdown(small({"slow": SLOW, "fast": FAST}), result)
    assert f"{mean:.4f} ({records[0]['loss']:.4f} {records[1]['loss']:.4f})" in text
    assert "| fast learns more | loss | fast - slow |" in text and "2 of 2 seeds | holds |" in text


@pytest.mark.slow
def test_evaluations_use_the_final_weights(done) -> None:
    output, result = done
    run = output / "study" / "base-seed0"
    same, plain = (json.loads((run / f"evaluation-runtime.kv_quant_{on}.json").read_text()) for on in ("true", "false"))
    assert same["loss"] == result["arms"]["fast"]["seeds"]["0"]["loss"] != plain["loss"]
    assert result["arms"]["fast"]["seeds"]["0"]["cost"] == plain["loss"] - same["loss"]


@pytest.mark.slow
def test_finished_runs_are_not_repeated(done, tiny: list[str], monkeypatch) -> None:
    output, result = done

    def forbidden(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", forbidden)
    assert Runner(small({"slow": SLOW, "fast": FAST}), output, tiny, 2).run() == result


@pytest.mark.slow
def test_runs_of_other_settings_are_refused(done, tiny: list[str]) -> None:
    output, _ = done
    with pytest.raises(StudyError, match=r"peak-1e-06-seed0.*task.tokens: trained with 900, now 800.*Delete it"):
        Runner(small({"slow": SLOW}, claims=[]), output, [*tiny, "task.tokens=800"], 2).run()


@pytest.mark.slow
def test_a_failing_arm_is_named_and_the_others_are_kept(done, tiny: list[str], tmp_path: Path) -> None:
    output, _ = done
    output = shutil.copytree(output, tmp_path / "output")
    arms = {"slow": SLOW, "broken": Arm([f"data.paths=[{tmp_path}/missing]"])}
    with pytest.raises(StudyError) as caught:
        Runner(small(arms, claims=[], seeds=[0]), output, tiny, 2).run()
    text = str(caught.value)
    assert "1 of 1 runs failed" in text and "broken, seed 0" in text and "missing" in text and "slow" not in text
    assert (output / "study" / "peak-1e-06-seed0" / "checkpoints").is_dir()


def test_a_wrong_setting_is_found_before_anything_runs(tiny: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="optim.clip"):
        Runner(small({"slow": Arm(["optim.clip=-1"]), "fast": SLOW}), tmp_path, tiny, 2).run()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "lines", "expected"),
    [
        ("task.tokens=[1", 2, "task.tokens=[1: cannot be read"),
        ("model=nowhere", 1, "nowhere"),
        ("task.tokens=0", 2, "task.tokens = 0"),
        ("--output={file}", 1, "{file}"),
    ],
)
def test_what_cannot_be_run_ends_in_a_message(
    change: str, lines: int, expected: str, tiny: list[str], tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the process is the tests', not the study's
    file = tmp_path / "file"
    file.touch()
    assert main(["indexer", *tiny, change.format(file=file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and expected.format(file=file) in error
    assert len(error.splitlines()) == lines, error


@pytest.mark.parametrize("jobs", ["0", "-1", "two"])
def test_a_number_of_jobs_that_is_none_is_refused(jobs: str, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["indexer", f"--jobs={jobs}"])
    assert caught.value.code == 2 and "--jobs" in capsys.readouterr().err


def one_run(output: Path, extra: list[str]) -> Runner:
    arms = {"base": Arm([])}
    return Runner(
        small(arms, claims=[], seeds=[0], evaluations={}, measures={"loss": Measure("loss")}), output, extra, 1
    )


@pytest.mark.slow
def test_an_interrupted_study_goes_on(tiny: list[str], tmp_path: Path) -> None:
    """Ctrl-C stops the runs after their step with their state saved; the same study continues them."""
    extra = [*tiny, "task.tokens=1500", "checkpoint.every=1000"]
    python = tmp_path / "python"  # whose runs wait in their third step
    python.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" tests/at_step.py 3 wait "$@"\n')
    python.chmod(0o755)
    code = "import sys; from tests.train.studies.test_runner import Path, one_run; sys.executable = sys.argv[1]; "
    code += "one_run(Path(sys.argv[2]), sys.argv[3:]).run()"
    with Program(["-c", code, str(python), str(tmp_path), *extra], tmp_path / "log") as process:
        metrics = tmp_path / "study" / "base-seed0" / "metrics.jsonl"
        process.until(lambda: metrics.exists() and '"step": 2' in metrics.read_text())
        process.send(signal.SIGINT)
        assert process.wait() != 0
    run = metrics.parent
    state = read_state(run)
    assert state["step"] == 3 and state["tokens"] < 1500
    result = one_run(tmp_path, extra).run()
    assert result["arms"]["base"]["mean"]["tokens"] >= 1500
    assert "continuing from" in (run / "train.log").read_text()


def test_a_claim_holds_only_beyond_its_margin_and_in_every_seed() -> None:
    def runs(a: list[float], b: list[float]) -> dict:
        return {"a": dict(enumerate({"m": v} for v in a)), "b": dict(enumerate({"m": v} for v in b))}

    lower, higher = (Claim("", "m", "a", "b", side) for side in ("lower", "higher"))
    assert judge(lower, runs([1.0, 2.0], [1.5, 2.5]))["holds"]
    assert not judge(higher, runs([1.0, 2.0], [1.5, 2.5]))["holds"]
    mixed = judge(lower, runs([1.0, 3.0], [2.0, 2.5]))
    assert not mixed["holds"] and mixed["right_in"] == 1 and mixed["mean"] == pytest.approx(-0.25)
    assert judge(Claim("", "m", "a", "b", "lower", seeds="mean"), runs([1.0, 3.0], [2.0, 2.5]))["holds"]
    assert not judge(lower, runs([1.0], [1.0]))["holds"]
    by_20 = Claim("", "m", "a", "b", "higher", margin=0.2)
    assert judge(by_20, runs([0.9], [0.6]))["holds"] and not judge(by_20, runs([0.9], [0.75]))["holds"]


def test_a_recovery_is_judged_only_where_there_is_an_effect() -> None:
    def verdicts(best: list[float], arm: list[float]) -> list[tuple[float | None, bool | None]]:
        losses = {"best": best, "arm": arm, "worst": [2.0, 3.0]}
        runs = {name: dict(enumerate({"m": v} for v in values)) for name, values in losses.items()}
        (part,) = judge_recovery(Recovery("", ["m"], "arm", "best", "worst"), runs)
        return part["share"], part["holds"]

    assert verdicts([1.0, 2.0], [1.2, 2.1]) == (pytest.approx(0.85), True)
    assert verdicts([1.0, 2.0], [1.0, 2.5]) == (pytest.approx(0.75), False)
    assert verdicts([1.85, 2.85], [1.0, 2.0]) == (None, None)  # gains 0.15
    assert verdicts([1.0, 3.01], [1.0, 3.0]) == (None, None)  # gains 0.495, but not with the second seed


def test_the_table_of_gains(tmp_path: Path) -> None:
    parts = [
        {"text": "It recovers", "arm": "a", "measure": "loss", "possible": [1.0, 2.0], "gained": [1.0, 1.7],
         "share": 0.9, "holds": True},
        {"text": "It recovers", "arm": "a", "measure": "loss", "possible": [0.1, 0.1], "gained": [0.0, 0.0],
         "share": None, "holds": None},
    ]  # fmt: skip
    study = small({"a": SLOW}, claims=[])
    text = markdown(study, {"tuning": {}, "arms": {}, "claims": [], "recoveries": parts, "seeds": [0], "notes": []})
    assert "| It recovers | loss | +1.5000 (+1.0000 +2.0000) | a | +1.3500 (+1.0000 +1.7000) | 90% | holds |" in text
    assert "| - | no effect to recover |" in text and "Claims" not in text


def test_a_measure_reads_means_and_differences() -> None:
    record = {"loss": 2.0, "load": {"text": [1.0, None, 3.0]}, "other": {"loss": 2.5}}
    assert value_of(record, "load.text") == 2.0
    assert value_of(record, "other.loss - loss") == 0.5
    with pytest.raises(StudyError, match="no key 'image', only text"):
        value_of(record, "load.image")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_study_composes(name: str, tiny: list[str], tmp_path: Path) -> None:
    shipped = read_study(name)
    assert len(shipped.seeds) == 3 and (shipped.claims or shipped.recoveries)
    extra: list[str] = []
    if shipped.experiment == "study_drafter":  # begins with a checkpoint
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            run = build(parse(compose("train", overrides=open_overrides([*tiny, "model=study"]))))
        save_pretrained(run.model, tmp_path / "backbone", run.tokenizer)
        extra = [f"init_from={tmp_path}/backbone"]
    if shipped.experiment == "distill_demo":  # needs a teacher
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            run = build(parse(compose("train", overrides=open_overrides([*tiny, "model=study"]))))
        save_pretrained(run.model, tmp_path / "teacher", run.tokenizer)
        extra = [f"distill_data.teacher={tmp_path}/teacher"]
    runner = Runner(shipped, tmp_path, extra, 2)
    jobs = [runner.job(arm, (s.tune.values[-1] if s.tune else None), 0) for arm, s in shipped.arms.items()]
    assert len({job.config.run_dir for job in jobs}) == len(jobs)  # arms really differ


def test_mistakes_in_a_study_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"recoveries.0.best: 'all' is unknown.*recoveries.0.measures: 'los' is unknown"
    ):
        small({"a": SLOW}, claims=[], recoveries=[Recovery("", ["los"], "a", "all", "a")])
    with pytest.raises(StudyError, match="the studies are .*indexer"):
        read_study("missing")
    with pytest.raises(ValueError, match=r"claims.0.than: 'slwo' is unknown; it must be one of fast"):
        small({"fast": SLOW}, claims=[Claim("", "loss", "fast", "slwo", "lower")])
