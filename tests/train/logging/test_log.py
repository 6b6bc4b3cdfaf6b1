"""Numbers for people and machines: the log line, the JSON lines, the plot, W&B without a network."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
import torch

from train import loop
from train.checkpoint.run_state import TrainerState
from train.errors import NonFiniteError
from train.logging import log, wandb
from train.logging.log import Reporter, evaluation_line, step_line
from train.logging.profile import StepTrace
from train.tasks import pretrain

RECORD = {
    "step": 12,
    "tokens": 49152,
    "loss": 5.25,
    "total_loss": 5.5,
    "grad_norm": 0.5,
    "lr": 1e-3,
    "tokens_per_second": 1234.5,
    "data_wait": 0.125,
    "seconds": 2.0,
    "memory_gib": 1.5,
    "index_kl": [0.25, 0.5],
    "expert_load": {"text": {"max_over_mean": [1.25, 2.0], "entropy": [2.0, 1.75]}},
}


def test_step_line_is_key_value_and_shows_the_worst_layer() -> None:
    line = step_line(RECORD)
    assert all(re.fullmatch(r"[\w/]+=[\w.,%/+-]+", part) for part in line.split()), line
    values = dict(part.split("=") for part in line.split())
    assert values == {
        "step": "12",
        "loss": "5.2500",
        "grad_norm": "0.500",
        "lr": "1.000e-03",
        "tokens": "49152",
        "tok/s": "1234" if "1234" in line else "1235",
        "data_wait": "12.5%",
        "mem": "1.50GiB",
        "index_kl": "2.5e-01,5.0e-01",
        "load_text": "2.00/1.750",
    }


def test_a_step_without_targets_has_no_loss(make_config) -> None:
    assert " loss=- " in step_line({**RECORD, "loss": None})
    config = make_config()
    config.run_dir.mkdir(parents=True)
    reporter = Reporter(config, TrainerState())
    reporter.step({**RECORD, "loss": None})
    reporter.step(RECORD)
    assert reporter.plot().is_file()
    reporter.close()


def test_the_evaluation_line_lists_the_recall_by_source() -> None:
    record = {"step": 3, "loss": 5.25, "bits_per_byte": 1.5, "targets": 70, "seconds": 0.25}
    line = evaluation_line({**record, "index_recall": [0.75, None, 1.0]})
    assert line.startswith("step=3 valid_loss=5.2500 bits_per_byte=1.5000 valid_tokens=70 seconds=")
    assert line.endswith(" index_recall=0.750,-,1.000")
    assert "index_recall" not in evaluation_line({**record, "index_recall": []})


def test_resumed_files_lose_what_will_be_repeated(make_config) -> None:
    config = make_config()
    config.run_dir.mkdir(parents=True)
    path = config.run_dir / "metrics.jsonl"
    lines = [json.dumps({**RECORD, "kind": "train", "step": step}) for step in (1, 2, 3, 4)]
    path.write_text("\n".join(lines) + "\n" + '{"kind": "tra', encoding="utf-8")
    reporter = Reporter(config, TrainerState(step=2))
    reporter.step({**RECORD, "step": 3, "loss": 9.0})
    reporter.close()
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(record["step"], record["loss"]) for record in records] == [(1, 5.25), (2, 5.25), (3, 9.0)]


def test_a_long_run_keeps_few_points_of_few_numbers(make_config, monkeypatch) -> None:
    monkeypatch.setattr(log, "MOST_POINTS", 50)
    config = make_config()
    config.run_dir.mkdir(parents=True)
    reporter = Reporter(config, TrainerState())
    for step in range(1, 201):
        reporter._record({**RECORD, "kind": "train", "step": step, "tokens": step})
        if step % 50 == 0:
            reporter._record({"kind": "valid", "step": step, "tokens": step, "loss": 1.0})
    reporter.close()
    train = [point["tokens"] for point in reporter.points if point["kind"] == "train"]
    assert 20 <= len(train) <= 50 and train == sorted(train) and train[0] == 1
    assert [point["tokens"] for point in reporter.points if point["kind"] == "valid"] == [50, 100, 150, 200]
    assert all(point.keys() == {"kind", "tokens", "loss"} for point in reporter.points)
    size = (config.run_dir / "metrics.jsonl").stat().st_size
    again = Reporter(config, TrainerState(step=200))
    again.close()
    assert again.points == reporter.points and (config.run_dir / "metrics.jsonl").stat().st_size == size


def test_no_bar_where_there_is_no_terminal(make_config, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config("logger.progress=true")
    config.run_dir.mkdir(parents=True)
    reporter = Reporter(config, TrainerState())
    reporter.step(RECORD)
    reporter.close()
    assert reporter.bar is None and capsys.readouterr().out == step_line(RECORD) + "\n"


def wandb_records(folder: Path) -> tuple[list[int], int | None]:
    """W&B's own step of each row of numbers in an offline folder, and the exit code (None: the process was killed).

    The file holds protocol buffers in LevelDB's log format: blocks of 32 KiB; each piece has a header of 7 bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("*.wandb")
    data, at, record, steps, code = path.read_bytes(), 7, b"", [], None
    while at + 7 <= len(data):
        length, kind = struct.unpack("<4xHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the piece is a whole record or its last piece
            read, record = Record.FromString(record), b""
            steps += [read.history.step.num] if read.HasField("history") else []
            code = read.exit.exit_code if read.HasField("exit") else code
        if 32768 - at % 32768 < 7:  # no room for another header: the rest of the block is empty
            at += 32768 - at % 32768
    return steps, code


@pytest.mark.slow
def test_wandb_records_offline_under_one_id_and_without_secrets(make_config, monkeypatch, tmp_path: Path) -> None:
    secret = "0123456789abcdef" * 3
    monkeypatch.setenv("WANDB_API_KEY", secret[:40])
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    config = make_config("logger=wandb", "logger.progress=false")
    original = loop.train_step

    def ends(at: int, error: type[Exception]):
        def step(run, batches, done, *rest, **given):
            if done == at:
                raise error
            return original(run, batches, done, *rest, **given)

        return step

    # The last checkpoint of the second run is that of step 2, so the third run repeats step 3.
    for at, error in ((0, MemoryError), (3, NonFiniteError)):
        with monkeypatch.context() as patch:
            patch.setattr(loop, "train_step", ends(at, error))
            with pytest.raises(error):
                pretrain.run(config)
    pretrain.run(config)
    identity = (config.run_dir / "wandb_id").read_text().strip()
    recorded = list((config.run_dir / "wandb").glob("offline-run-*"))
    import_module("wandb").teardown()  # ends W&B's own process, which writes the last bytes after `finish`
    found = sorted(map(wandb_records, recorded), key=lambda one: (one[0][-1], one[1]))
    assert found == [([0], 1), ([0, 1, 2, 3], 3), (list(range(3, 7)), 0)]
    assert len(recorded) == 3 and all(path.name.endswith(f"-{identity}") for path in recorded)
    log = (config.run_dir / "train.log").read_text()
    assert (
        log.count(f"W&B run {identity} is recorded offline; send it with: wandb sync {config.run_dir}/wandb/off") == 3
    )
    files = [path for path in config.run_dir.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files) and len(files) > 10
    assert not [path for path in files if secret[:40].encode() in path.read_bytes()]


@pytest.mark.slow
def test_wandb_without_key_or_network_is_offline(make_config, monkeypatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert wandb._mode() == "offline"


def test_tensorboard_has_the_numbers_of_every_step_once(make_config, monkeypatch) -> None:
    """A run that is continued writes on; TensorBoard hides what the first process wrote about repeated steps: it
    crashed after step 5, whose checkpoint is that of step 4.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = ("logger=tensorboard", "logger.progress=false")
    config, original = make_config(*settings), loop.train_step

    def crash(run, batches, done, *rest, **given):
        if done == 5:
            raise MemoryError
        return original(run, batches, done, *rest, **given)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", crash)
        with pytest.raises(MemoryError):
            pretrain.run(config)
    pretrain.run(config)
    records = list(map(json.loads, (config.run_dir / "metrics.jsonl").read_text().splitlines()))
    events = EventAccumulator(str(config.run_dir / "tensorboard"))
    events.Reload()
    written = [(event.step, event.value) for event in events.Scalars("train/loss")]
    losses = [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]
    assert len(losses) > 4 and [step for step, _ in written] == [step for step, _ in losses]
    assert [value for _, value in written] == pytest.approx([loss for _, loss in losses], rel=1e-6)
    assert {"valid/loss", "train/expert_load.text.entropy.0", "train/tokens_per_second"} <= set(
        events.Tags()["scalars"]
    )


@pytest.mark.slow
def test_the_trace_holds_the_chosen_steps(make_config) -> None:
    config = make_config("logger.profile=2:3", "task.tokens=1000")
    pretrain.run(config)
    (path,) = (config.run_dir / "profile").iterdir()
    assert path.name == "rank-00000-steps-2-3.json"
    names = Counter(event.get("name") for event in json.loads(path.read_text())["traceEvents"])
    assert names["aten::mm"] > 10
    assert {name for name in names if name and name.startswith("step ")} == {"step 2", "step 3"}


def test_a_run_that_ends_inside_the_chosen_steps_writes_its_trace(tmp_path: Path) -> None:
    trace = StepTrace((1, 5), tmp_path, 3)
    with pytest.raises(MemoryError), trace, trace.step(1):
        torch.ones(2) + 1
        raise MemoryError
    (path,) = tmp_path.iterdir()
    assert path.name == "rank-00003-steps-1-5.json" and "aten::add" in path.read_text()
