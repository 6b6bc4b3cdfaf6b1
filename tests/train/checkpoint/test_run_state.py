"""The run state on disk: whole or not at all, exact, and safe to read."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import resource
import shutil
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data.cache import atomic_folder
from data.errors import naming
from model import ModelConfig
from optim import Optimizer, Rule, assign
from tests.python_server import Program
from train.checkpoint import run_state, storage
from train.checkpoint.background import Background
from train.checkpoint.run_state import TrainerState
from train.checkpoint.storage import CheckpointError

CONFIG = {"text_config": {"hidden_size": 3, "ids": [1, 2]}}


def objects(width: int = 3, method: str = "muon", steps: int = 1) -> dict:
    torch.manual_seed(0)
    model = torch.nn.Linear(width, 2)
    optimizer = Optimizer(assign(model.named_parameters(), [Rule("weight", method), Rule("bias", "adamw")]))
    optimizer.set_lr(0.1)
    for _ in range(steps):
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def assert_same_state(first: dict, second: dict) -> None:
    for ours, theirs in zip(first["optimizer"].state.values(), second["optimizer"].state.values(), strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert type(value) is type(theirs[key])
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, theirs[key]) and value.dtype == theirs[key].dtype
            else:
                assert value == theirs[key]


def save(directory: Path, step: int = 1, keep: int = 3, **changes) -> Path:
    return run_state.save(
        directory,
        TrainerState(step=step, tokens=7),
        **{"data": {"row": step}, "model_config": CONFIG, "keep": keep, **objects(), **changes},
    )


def load(
    folder: Path, parts: dict | None = None, model_config: dict = CONFIG, seen: list | None = None
) -> TrainerState:
    return run_state.load(
        folder, set_data=(seen if seen is not None else []).append, model_config=model_config, **(parts or objects())
    )


def test_everything_comes_back_exactly(tmp_path: Path) -> None:
    parts = objects()
    folder = save(tmp_path, **parts)
    drawn = (random.random(), np.random.rand(), torch.rand(()).item())
    fresh, seen = objects(steps=2), []
    with torch.no_grad():
        fresh["model"].weight.zero_()
    state = load(folder, fresh, seen=seen)
    assert state == TrainerState(step=1, tokens=7) and seen == [{"row": 1}]
    assert torch.equal(fresh["model"].weight, parts["model"].weight)
    assert_same_state(fresh, parts)
    assert fresh["optimizer"].state[fresh["model"].bias]["step"] == 1
    assert drawn == (random.random(), np.random.rand(), torch.rand(()).item())


def test_loading_counts_every_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []

    @contextmanager
    def counted(what: str, total: float, shared: bool):
        assert (total, shared) == (1.0, True)
        yield shares.append

    monkeypatch.setattr(storage, "progress", counted)
    folder = save(tmp_path, **objects(width=5))
    load(folder, objects(width=5))
    assert sum(shares) == pytest.approx(3.0)  # the model, the optimizer, and the states of the random generators
    assert len(shares) > 5


def test_state_from_before_the_first_step_replaces_a_later_one(tmp_path: Path) -> None:
    parts = objects()
    load(save(tmp_path, **objects(steps=0)), parts)
    assert not any(parts["optimizer"].state.values())


def test_newest_and_pruning(tmp_path: Path) -> None:
    assert run_state.latest(tmp_path) is None
    for step in (1, 2, 10, 100000000, 300000000):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-100000000", "step-300000000"]
    assert run_state.latest(tmp_path).name == "step-300000000"


def test_a_checkpoint_that_cannot_be_deleted_is_named_and_tried_again(tmp_path: Path, monkeypatch, caplog) -> None:
    """prime-rl 1763, fairchem 1242: an immutable file."""
    real = shutil.rmtree

    def refuse(folder, *arguments, **options):
        if Path(folder).name.endswith("step-00000001") and not options:
            raise PermissionError(1, "Operation not permitted", f"{folder}/state.json")
        real(folder, *arguments, **options)

    monkeypatch.setattr("train.checkpoint.run_state.shutil.rmtree", refuse)
    for step in (1, 2, 3):
        save(tmp_path, step, keep=1)
    assert run_state.latest(tmp_path).name == "step-00000003"
    told = [message for message in caplog.messages if "cannot be deleted" in message]
    assert len(told) == 1 and ".tmp-step-00000001/state.json cannot be deleted: Operation not permitted" in told[0]
    monkeypatch.undo()
    save(tmp_path, 4, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004"]


def test_of_a_checkpoint_that_was_moved_away_only_the_link_is_deleted(tmp_path: Path) -> None:
    """transformers 17265, 13035."""
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    save(runs, 1, keep=1).rename(elsewhere)
    (runs / "step-00000001").symlink_to(elsewhere)
    save(runs, 2, keep=1)
    assert sorted(path.name for path in runs.iterdir()) == ["step-00000002"]
    load(elsewhere)


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    """open_lm 154: between two checkpoints, in the log or the data's cache."""
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device: '.*full'"):
        with naming(str(tmp_path / "full")), open(tmp_path / "full", "w", buffering=1) as file:
            file.write("line\n")
    with pytest.raises(OSError, match="No space left on device: '.*tokens'"):
        with atomic_folder(tmp_path / "tokens") as work:
            (work / "t.bin").symlink_to("/dev/full")
            with (work / "t.bin").open("wb", buffering=0) as file:
                file.write(b"x" * 10)
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize("part", ["write_files", "os.rename", "fsync"])
def test_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    save(tmp_path, 1)

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(f"train.checkpoint.storage.{part}", fail)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("room", [4096, 100_000])  # stops in the tensors, in the small files
def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, room: int) -> None:
    data = {"rows": list(range(100_000))} if room > 4096 else {}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(OSError, match="step-00000001 cannot be written: .*disk full"):
            save(tmp_path, data=data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_process_that_dies_while_writing_leaves_the_one_before(tmp_path: Path) -> None:
    save(tmp_path, 1)
    script = (
        "import os, sys; from pathlib import Path; import train.checkpoint.storage as s;"
        " from tests.train.checkpoint import test_run_state as t;"
        " s.fsync = lambda path: os._exit(9); t.save(Path(sys.argv[1]), 2)"
    )
    with tempfile.TemporaryDirectory() as elsewhere:
        process = Program(["-c", script, str(tmp_path)], Path(elsewhere) / "log")
        assert process.wait() == 9, process.output
    assert (tmp_path / ".tmp-step-00000002" / "state.json").exists(), "died with everything written but the name"
    assert run_state.latest(tmp_path).name == "step-00000001"
    assert load(run_state.latest(tmp_path)).step == 1
    save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_other_model_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    folder = save(tmp_path)
    other = {"text_config": {"hidden_size": 4, "ids": [1]}}
    with pytest.raises(CheckpointError, match="model.text_config.hidden_size is 3, expected 4"):
        load(folder, model_config=other)
    with pytest.raises(CheckpointError, match=r"tensor weight is \[2, 3\] torch.float32, expected \[2, 5\]"):
        load(folder, objects(width=5))
    parts = objects()
    parts["model"].extra = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(CheckpointError, match="tensor extra is missing from the checkpoint"):
        load(folder, parts)


def test_a_key_of_the_model_that_came_later_counts_as_saved_with_its_default(tmp_path: Path) -> None:
    config = ModelConfig().to_dict()
    folder = save(tmp_path, model_config=config)
    manifest = json.loads((folder / "state.json").read_text())
    del manifest["model"]["text_config"]["hc_mult"]
    (folder / "state.json").write_text(json.dumps(manifest))
    assert load(folder, model_config=config).step == 1
    config["text_config"]["hc_mult"] = 2
    with pytest.raises(CheckpointError, match="model.text_config.hc_mult is 4, expected 2"):
        load(folder, model_config=config)


class Bomb:
    """Would run code when unpickled."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("exploded",)


def test_other_methods_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="other optimizer methods:\n  weight: saved with muon, expected sinkhorn"):
        load(save(tmp_path), objects(method="sinkhorn"))


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of a checkpoint is a pickle, and one in the place of any is refused as it is."""
    monkeypatch.chdir(tmp_path)
    folder = save(tmp_path / "checkpoints")
    assert sorted(path.name for path in folder.iterdir()) == ["rank-00000.safetensors", "state.json", "tensors.json"]
    for path in folder.iterdir():
        content = path.read_bytes()
        for bomb in (pickle.dumps(Bomb()), pickle.dumps(Bomb(), protocol=0)):
            path.write_bytes(bomb)
            with pytest.raises(CheckpointError, match=f"{path.name} cannot be read"):
                load(folder)
        path.write_bytes(content)
    assert not (tmp_path / "exploded").exists()
    load(folder)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "tensors.json", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "short", "gone"])
def test_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = save(tmp_path) / name
    content = path.read_bytes()
    path.unlink() if damage == "gone" else path.write_bytes(content[:20] if damage == "cut" else content[:-1])
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        load(path.parent)


def test_index_and_files_must_agree(tmp_path: Path) -> None:
    folder = save(tmp_path)
    index = json.loads((folder / "tensors.json").read_text())
    weight = index["model.weight"]
    for chunks, message in (
        ([[0, 1, "rank-00000.safetensors"]], r"tensors.json cannot be read: rows of weight are missing"),
        ([[0, 2, "rank-00007.safetensors"]], r"rank-00007.safetensors cannot be read: No such file"),
        ([[0, 1, "rank-00000.safetensors"], [1, 1, "rank-00000.safetensors"]], r"hold model.weight\[0:1\]"),
    ):
        (folder / "tensors.json").write_text(json.dumps({**index, "model.weight": [*weight[:2], chunks]}))
        with pytest.raises(CheckpointError, match=message):
            load(folder)


def test_another_format_is_refused_by_number(tmp_path: Path) -> None:
    folder = save(tmp_path)
    manifest = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**manifest, "format": 1}))
    with pytest.raises(CheckpointError, match="has checkpoint format 1; this version reads format 2"):
        load(folder)


def test_background_write_is_the_same_as_of_that_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on while the files are written; what is written is what was there."""
    parts, gates = objects(), [(threading.Event(), threading.Event()) for _ in range(2)]
    turns = iter(gates)

    def slow(files: dict) -> None:
        at_work, go_on = next(turns)
        at_work.set()
        assert go_on.wait(300)
        write(files)

    write = storage.write_files
    save(tmp_path / "plain", **parts)
    monkeypatch.setattr(storage, "write_files", slow)
    with Background() as background:
        for step, (at_work, go_on) in enumerate(gates, 1):
            final = save(tmp_path / "background", step, background=background, **parts)
            assert at_work.wait(300) and not final.exists()
            background.check()
            with torch.no_grad():
                parts["model"].weight.add_(step)
                parts["optimizer"].state[parts["model"].weight]["momentum"].add_(step)
            go_on.set()
        first = tmp_path / "background" / "step-00000001"
        assert first.exists(), "the second waits for the first"
    assert final.exists(), "the end waits"
    folders = (tmp_path / "plain" / first.name, first, final)
    plain, written, later = (load_file(folder / "rank-00000.safetensors") for folder in folders)
    assert plain.keys() == written.keys() and all(torch.equal(plain[k], written[k]) for k in plain if "random" not in k)
    assert torch.equal(later["model.weight"], plain["model.weight"] + 1)
    load(final)


def test_background_failure_is_raised_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError("disk full")

    save(tmp_path, 1)
    for meet in ("check", "save", "end"):
        background = Background()
        with monkeypatch.context() as patch:
            patch.setattr(storage, "fsync", fail)
            save(tmp_path, 2, background=background)
            background._thread.join()
        with pytest.raises(OSError, match="step-00000002 cannot be written: .*disk full"):
            if meet == "check":
                background.check()
            elif meet == "save":
                save(tmp_path, 3, background=background)
            else:
                background.__exit__(None)
        background.check()
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_counters_are_plain_data() -> None:
    assert TrainerState(**dataclasses.asdict(TrainerState(step=3, first_valid={"loss": 1.0}))) == TrainerState(
        step=3, first_valid={"loss": 1.0}
    )
