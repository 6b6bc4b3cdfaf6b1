"""Whatever stops a run, the same command continues it to the same numbers, bit for bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model.build import allocate_model
from tests.python_server import Program
from train import loop
from train.build import Run, build
from train.checkpoint.run_state import latest
from train.config.parse import parse
from train.config.problems import ConfigError
from train.config.schema import Config
from train.errors import InputError, Interrupted
from train.evaluation.probe import Probe
from train.logging.log import evaluation_line, step_line
from train.session import begin, only_process_in
from train.tasks import pretrain

TIMING = {"tokens_per_second", "data_wait", "seconds", "memory_gib"}


def numbers(directory: Path) -> list[dict]:
    """Every recorded number but those that measure time or memory."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMING} for line in lines]


def assert_same_run(first: Path, second: Path) -> None:
    assert numbers(first) == numbers(second)
    a, b = (latest(directory / "checkpoints") for directory in (first, second))
    assert a is not None and b is not None and a.name == b.name
    tensors, again = (load_file(folder / "rank-00000.safetensors") for folder in (a, b))
    assert tensors.keys() == again.keys() and {"random.0", "model.embed.weight"} <= tensors.keys()
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    assert json.loads((a / "state.json").read_text())["data"] == json.loads((b / "state.json").read_text())["data"]


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    """An interrupted run leaves handlers, as its process is about to end; this one is not."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def stop_at(step: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process a signal in the middle of a step, once."""
    original = loop.train_step

    def step_and_signal(run, batches, done, tokens, **given):
        if done + 1 == step:
            os.kill(os.getpid(), number)
        return original(run, batches, done, tokens, **given)

    monkeypatch.setattr(loop, "train_step", step_and_signal)


@pytest.fixture(scope="module")
def whole(compose_raw, overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run that nothing stopped. Tests read it."""
    config = parse(compose_raw(*overrides, f"output={tmp_path_factory.mktemp('whole')}", "name=whole"))
    pretrain.run(config)
    return config


def test_weights_that_are_read_are_not_drawn(make_config, whole: Config, monkeypatch) -> None:
    """What no checkpoint had filled would be NaN. The log says how long each part of the start took."""
    drawn: list[str] = []
    monkeypatch.setattr("model.build.init_weights", lambda *given: drawn.append("drawn"))

    def allocate(*given, **named):
        model = allocate_model(*given, **named)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.data.fill_(torch.nan)
        return model

    monkeypatch.setattr("train.build.allocate_model", allocate)
    config = make_config("name=parts")
    run = build(config, draw=False)
    run.resume(latest(whole.run_dir / "checkpoints"))
    other = build(make_config("name=other", f"init_from={whole.run_dir}"), draw=False)
    begin(other)
    saved = other.model.state_dict()
    assert saved.keys() == run.model.state_dict().keys() and not drawn
    assert all(torch.equal(value, saved[name]) for name, value in run.model.state_dict().items())
    assert all(value.isfinite().all() for value in saved.values() if value.is_floating_point())
    told = next(line for line in (whole.run_dir / "train.log").read_text().splitlines() if "from launch to" in line)
    parts = re.findall(r"([a-z][a-z ]*) [0-9.]+(?= \+|$)", told.split(" = ")[1])
    assert parts == ["data", "model", "optimizer and groups", "weights", "evaluation", "first step"] or (
        parts[:2] == ["imports", "data"] and parts[-1] == "first step"
    )


@pytest.mark.slow
def test_longer_run_continues_a_shorter_one(make_config, whole: Config) -> None:
    config = make_config("name=parts", "task.tokens=700")
    pretrain.run(config)
    assert numbers(config.run_dir)[-1]["step"] == 3
    pretrain.run(make_config("name=parts"))
    kept = [record for record in numbers(config.run_dir) if not (record["kind"] == "valid" and record["step"] == 3)]
    assert kept == numbers(whole.run_dir)


def test_a_renamed_directory_continues_under_its_new_name(
    make_config, whole: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config("name=before", "task.tokens=700")
    pretrain.run(config)
    renamed = config.run_dir.rename(config.run_dir.with_name("after"))
    pretrain.run(make_config("name=after"))
    assert 'setting changed since that checkpoint: name: "before" -> "after"' in capsys.readouterr().out
    assert numbers(renamed)[-1] == numbers(whole.run_dir)[-1] and not config.run_dir.exists()


@pytest.mark.slow
def test_longer_rows_begin_and_resume_at_the_same_token(make_config, monkeypatch) -> None:
    longer = "task.length_schedule=[{tokens: 500, seq_len: 128}, {tokens: 1000, seq_len: 256}]"
    whole, parts = make_config("name=whole", longer), make_config("name=parts", longer)
    pretrain.run(whole)
    for step in (2, 5):  # right before the first change of length, and behind the second one
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            stop_at(step, signal.SIGTERM, patch)
            pretrain.run(parts)
    pretrain.run(parts)
    assert_same_run(whole.run_dir, parts.run_dir)
    steps = [record for record in numbers(parts.run_dir) if record["kind"] == "train"]
    assert [record["seq_len"] for record in steps] == [64, 64, 128, 128, 256, 256]
    told = (whole.run_dir / "train.log").read_text().splitlines()
    assert "a step: 4 rows = 1 process x 2 micro-batches x 2 rows" in told
    rows = [line for line in told if line.startswith("rows of ")]
    assert rows == [
        "rows of 128 tokens from step 3 on; a step: 2 rows = 1 process x 2 micro-batches x 1 row",
        "rows of 256 tokens from step 5 on; a step: 1 row = 1 process x 1 micro-batch x 1 row",
    ]


@pytest.mark.slow
def test_signals_save_first_and_the_run_continues(make_config, whole: Config, monkeypatch) -> None:
    config = make_config("name=parts")
    for step, number in ((1, signal.SIGUSR1), (3, signal.SIGTERM), (4, signal.SIGINT)):
        with monkeypatch.context() as patch:
            stop_at(step, number, patch)
            stopped = rf"Stopped by {signal.Signals(number).name} after step {step}, state saved in"
            with pytest.raises(Interrupted, match=stopped):
                pretrain.run(config)
        assert latest(config.run_dir / "checkpoints").name == f"step-0000000{step}"
    pretrain.run(config)
    assert_same_run(whole.run_dir, config.run_dir)


def test_a_signal_ends_an_evaluation_which_is_made_again(make_config, whole: Config, monkeypatch) -> None:
    """Behind the last step: the run is not complete without it."""
    config, original, evaluations = make_config("name=parts"), Probe.add, []

    def add_and_signal(probe, batch):
        if not probe.seen:  # the first batch of an evaluation
            evaluations.append(probe)
            if len(evaluations) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        original(probe, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Probe, "add", add_and_signal)
        with pytest.raises(Interrupted, match="Stopped by SIGTERM after step"):
            pretrain.run(config)
    assert [record["kind"] for record in numbers(config.run_dir)].count("valid") == 1
    pretrain.run(config)
    assert_same_run(whole.run_dir, config.run_dir)


def test_repeated_signals_do_not_end_the_save(make_config, monkeypatch) -> None:
    config, original = make_config("name=parts", "checkpoint.every=100"), Run.save

    def save_and_signal(*what):
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        return original(*what)

    stop_at(3, signal.SIGUSR1, monkeypatch)
    monkeypatch.setattr(Run, "save", save_and_signal)
    with pytest.raises(Interrupted, match="Stopped by SIGUSR1 after step 3"):
        pretrain.run(config)
    assert latest(config.run_dir / "checkpoints").name == "step-00000003"
    os.kill(os.getpid(), signal.SIGTERM)  # srun ends the tasks that are later than the first: they leave with 75 too


def test_crash_between_checkpoints_repeats_the_lost_steps(make_config, whole: Config, monkeypatch) -> None:
    config = make_config("name=parts")
    original = loop.train_step

    def crash(run, batches, done, tokens, **given):
        if done == 3:
            raise MemoryError
        return original(run, batches, done, tokens, **given)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", crash)
        with pytest.raises(MemoryError):
            pretrain.run(config)
    assert numbers(config.run_dir)[-1]["step"] == 3, "recorded, but not in a checkpoint"
    pretrain.run(config)
    assert_same_run(whole.run_dir, config.run_dir)


def test_complete_run_only_reports(make_config, whole: Config, capsys: pytest.CaptureFixture[str]) -> None:
    before = (whole.run_dir / "metrics.jsonl").read_text()
    capsys.readouterr()
    pretrain.run(whole)
    out = capsys.readouterr().out
    first, *_, last = numbers(whole.run_dir)
    assert "it is complete, raise task.tokens to train on" in out
    assert f"validation loss: first {first['loss']:.4f} final {last['loss']:.4f} nats per token" in out
    assert (whole.run_dir / "metrics.jsonl").read_text() == before


def test_other_settings_are_refused_by_key(make_config, whole: Config) -> None:
    with pytest.raises(
        ConfigError, match=r"task\.seq_len: 64 -> 32\n *The run in .*whole was trained with the values on the left"
    ):
        pretrain.run(make_config("name=whole", f"output={whole.run_dir.parent}", "task.seq_len=32"))


def swap(first: Path, second: Path) -> None:
    spare = first.with_suffix(".spare")
    first.rename(spare)
    second.rename(first)
    spare.rename(second)


@pytest.mark.slow
def test_moved_data_continues_and_other_data_is_refused(
    make_config, whole: Config, corpus: Path, tmp_path: Path
) -> None:
    first, moved = make_config("name=parts", "task.tokens=700"), tmp_path / "moved"
    shutil.copytree(corpus, moved)
    there = (f"data.paths=[{moved}]", f"data.validation_paths=[{moved}/token.txt]", f"data.cache_dir={tmp_path}/cache")
    pretrain.run(first)
    swap(moved / "abc.txt", moved / "copy.txt")  # other documents under these names, the tokenizer stays the same
    with pytest.raises(InputError, match="data position: data was .* when saved"):
        pretrain.run(make_config("name=parts", *there))
    swap(moved / "abc.txt", moved / "copy.txt")
    pretrain.run(make_config("name=parts", *there))
    assert numbers(first.run_dir)[-1] == numbers(whole.run_dir)[-1]


def test_directory_in_use_is_refused(make_config) -> None:
    config = make_config()
    with only_process_in(config.run_dir), pytest.raises(ConfigError, match="in use by another process"):
        pretrain.run(config)


def test_what_a_run_leaves(whole: Config, capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(p.name for p in whole.run_dir.iterdir() if not p.name.startswith(".")) == [
        "checkpoints",
        "config.yaml",
        "loss.png",
        "metrics.jsonl",
        "tokenizer.json",
        "train.log",
    ]
    assert (whole.run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    lines = (whole.run_dir / "train.log").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in (whole.run_dir / "metrics.jsonl").read_text().splitlines()]
    shown = {"train": step_line, "valid": evaluation_line}
    expected = [shown[record["kind"]](record) for record in records]
    assert len(expected) == 8, "six steps and two evaluations"
    assert [line for line in lines if line.startswith("step=")] == expected
    first, last = records[0]["loss"], records[-1]["loss"]
    end = f"validation loss: first {first:.4f} final {last:.4f} nats per token, ratio {last / first:.1%}"
    assert [line.partition(", final ")[0] for line in lines if line.startswith("validation loss")] == [end] * 2
    assert "sample: 'def main():\\n' continues" in lines
    for key, path in (("checkpoint", "checkpoints/step-00000006"), ("plot", "loss.png"), ("metrics", "metrics.jsonl")):
        assert {line.split()[1] for line in lines if line.startswith(f"{key}:")} == {str(whole.run_dir / path)}


def test_the_line_of_a_step() -> None:
    record = {"step": 6, "loss": 2.5, "grad_norm": 0.1234, "lr": 1e-3, "tokens": 1536, "tokens_per_second": 99.4}
    line = "step=6 loss=2.5000 grad_norm=0.123 lr=1.000e-03 tokens=1536 tok/s=99 data_wait=1.0% mem=0.50GiB"
    assert step_line({**record, "data_wait": 0.0101, "memory_gib": 0.499, "index_kl": [], "expert_load": {}}) == line


def launch(overrides: list[str], log: Path, program: tuple[str, ...] = ("-m", "train")) -> Program:
    return Program([*program, *overrides], log)


def test_kill_9_and_the_same_command_continue(make_config, whole: Config, overrides: list[str], tmp_path: Path) -> None:
    command, log = [*overrides, f"output={tmp_path}", "name=parts"], tmp_path / "log"
    with launch(command, log, ("tests/at_step.py", "6", "SIGKILL:0")) as killed:
        assert killed.wait() == -signal.SIGKILL and "\nstep=5 " in killed.output, killed.output
    with launch(command, log) as again:
        assert again.wait() == 0 and "continuing from" in again.output, again.output
    assert_same_run(whole.run_dir, tmp_path / "parts")


@pytest.mark.slow
def test_sigterm_exits_with_its_own_code(overrides: list[str], tmp_path: Path) -> None:
    with launch([*overrides, f"output={tmp_path}", "task.tokens=1000000"], tmp_path / "log") as process:
        process.until(lambda: "\nstep=2 " in process.output)
        process.send(signal.SIGTERM)
        assert process.wait() == 75, process.output
        assert "Run the same command to continue" in process.output and "Traceback" not in process.output


def test_unreadable_data_leaves_no_run_behind(make_config) -> None:
    config = make_config("data.paths=[/nowhere/at/all]")
    with pytest.raises(ValueError, match="/nowhere/at/all"):
        pretrain.run(config)
    assert [path.name for path in config.run_dir.iterdir()] == [".lock"]
