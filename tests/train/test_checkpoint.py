"""The run state on disk: whole or not at all, exact, and safe to read."""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from train import checkpoint
from train.checkpoint import CheckpointError, State

CONFIG = {"text_config": {"hidden_size": 3, "ids": [1, 2]}}


def objects(width: int = 3) -> dict:
    torch.manual_seed(0)
    model = torch.nn.Linear(width, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def save(directory: Path, step: int = 1, keep: int = 3, **parts) -> Path:
    return checkpoint.save(
        directory,
        State(step=step, tokens=7),
        data={"row": step},
        model_config=CONFIG,
        keep=keep,
        **(parts or objects()),
    )


def load(folder: Path, parts: dict | None = None, model_config: dict = CONFIG, seen: list | None = None) -> State:
    return checkpoint.load(
        folder, set_data=(seen if seen is not None else []).append, model_config=model_config, **(parts or objects())
    )


def test_everything_comes_back_exactly(tmp_path: Path) -> None:
    parts = objects()
    folder = save(tmp_path, **parts)
    drawn = (random.random(), np.random.rand(), torch.rand(()).item())
    fresh, seen = objects(), []
    with torch.no_grad():
        fresh["model"].weight.zero_()
    state = load(folder, fresh, seen=seen)
    assert state == State(step=1, tokens=7) and seen == [{"row": 1}]
    assert torch.equal(fresh["model"].weight, parts["model"].weight)
    for ours, theirs in zip(fresh["optimizer"].state.values(), parts["optimizer"].state.values(), strict=True):
        assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in theirs)
    assert drawn == (random.random(), np.random.rand(), torch.rand(()).item())


def test_newest_and_pruning(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    for step in (1, 2, 10, 100000000, 300000000):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-100000000", "step-300000000"]
    assert checkpoint.latest(tmp_path).name == "step-300000000"


@pytest.mark.parametrize("part", ["save_file", "torch.save", "_fsync"])
def test_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    save(tmp_path, 1)

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(f"train.checkpoint.{part}", fail)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("room", [4096, 60_000])  # stops in the weights, in the optimizer's state
def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, room: int) -> None:
    parts = objects(width=8000)
    if room > 4096:
        parts["model"] = torch.nn.Linear(1, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(OSError, match="step-00000001 cannot be written: .*disk full"):
            save(tmp_path, **parts)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any(tmp_path.iterdir())


def test_process_that_dies_while_writing_leaves_the_one_before(tmp_path: Path) -> None:
    save(tmp_path, 1)
    script = (
        "import os, sys; from pathlib import Path; import train.checkpoint as c; sys.path.insert(0, 'tests/train');"
        "import test_checkpoint as t; c._fsync = lambda path: os._exit(9); t.save(Path(sys.argv[1]), 2)"
    )
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=root, env=environment).returncode == 9
    assert (tmp_path / ".tmp-step-00000002" / "state.json").exists(), "died with everything written but the name"
    assert checkpoint.latest(tmp_path).name == "step-00000001"
    assert load(checkpoint.latest(tmp_path)).step == 1
    save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_other_model_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    folder = save(tmp_path)
    other = {"text_config": {"hidden_size": 4, "ids": [1]}}
    with pytest.raises(CheckpointError, match="model.text_config.hidden_size is 3 there and 4 here"):
        load(folder, model_config=other)
    with pytest.raises(CheckpointError, match=r"tensor weight is \[2, 3\] torch.float32 there and \[2, 5\]"):
        load(folder, objects(width=5))
    parts = objects()
    parts["model"].extra = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(CheckpointError, match="tensor extra is only here"):
        load(folder, parts)


class Bomb:
    """Would run code when unpickled."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("exploded",)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save(tmp_path)
    (folder / "training.pt").write_bytes(pickle.dumps({"optimizer": Bomb()}, protocol=2))
    with pytest.raises(CheckpointError, match="training.pt cannot be read"):
        load(folder)
    torch.save({"optimizer": Bomb(), "random": {}}, folder / "training.pt")
    with pytest.raises(CheckpointError, match="training.pt cannot be read"):
        load(folder)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "training.pt", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = save(tmp_path) / name
    path.write_bytes(path.read_bytes()[:20]) if damage == "cut" else path.unlink()
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        load(path.parent)


def test_counters_are_plain_data() -> None:
    assert State(**dataclasses.asdict(State(step=3, first_valid={"loss": 1.0}))) == State(
        step=3, first_valid={"loss": 1.0}
    )
