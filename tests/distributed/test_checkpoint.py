"""Folders written and read by several processes: every layout gives every other the same bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import folders  # noqa: E402
from ranks import Ended, Group  # noqa: E402

pytestmark = pytest.mark.distributed


def launch(size: int, folder: Path, corpus: Path, *jobs: str) -> list[Ended]:
    command = ["tests/distributed/folders.py", str(folder), str(corpus), *jobs]
    with Group(size, command, folder.parent / f"logs{size}") as group:
        return group.finish()


def succeed(size: int, folder: Path, corpus: Path, *jobs: str) -> None:
    ended = launch(size, folder, corpus, *jobs)
    assert [process.code for process in ended] == [0] * size, "\n".join(process.output for process in ended)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Written by one process: step 7, and exports of the model of step 5."""
    folder = tmp_path_factory.mktemp("spread") / "folders"
    exports = ("export:ep1t1:5:released:released-1", "export:ep1t1:5:plain:plain-1")
    folders.run(folder, corpus, ["save:ep1t1:7", *exports])
    return folder


@pytest.fixture(scope="module")
def two(one: Path, corpus: Path) -> Path:
    """By two: steps 1, 2, 3 and 8 (whose dense matrices are kept by rows). They also read back, refuse another model
    and fail together; and train four steps, at once and in two parts.
    """
    saves = ("save:ep2t2:1", "save:ep1t1:2", "save:ep2t2s:3:background")
    loads = ("load:ep2t2:1:2", "load:ep1t1:1:2", "load:ep2t2s:2:2", "load:ep1t2:3:2", "load:ep2t2:7:1")
    dense = ("save:ep2t2d2:8", "load:ep2t2d2:8:2", "load:ep2t2:8:2", "load:ep1t1d2:1:2", "load:ep2t2sd2:7:1")
    dense += ("export:ep2t2d2:5:released:released-dense", "export:ep1t1d2:5:plain:plain-dense",
              "import:ep2t2d2:5:plain-1", "through:ep2t2d2:released-1:released-through")  # fmt: skip
    exports = ("export:ep2t2:5:released:released-2", "export:ep2t2s:5:plain:plain-2", "import:ep2t2s:5:plain-1")
    trains = ("train:ep2:0:4::whole", "train:ep2:2:4:whole:same", "train:ep1:2:4:whole:copies")
    trains += ("train:ep2d2:2:4:whole:divided", "train:ep2d2:0:4::rows", "train:ep2d2:2:4:rows:again")
    trains += ("train:ep2c2o:2:4:whole:chunks", "train:ep1d2c2:2:4:whole:chunks-rows", "train:ep2c2o:0:4::cut")
    trains += ("train:ep2c2:2:4:cut:cut-again", "train:ep2o:2:4:cut:uncut")
    succeed(2, one, corpus, *saves, *loads, *dense, *exports, "refuse:ep2t2:1", "fail:ep2t2:4", *trains)
    return one


@pytest.fixture(scope="module")
def four(two: Path, corpus: Path) -> Path:
    """By four: step 6. They read what one and two wrote."""
    loads = ("load:ep4t4:1:2", "load:ep4t2s:2:2", "load:ep2t4:3:2", "load:ep4t4s:7:1")
    loads += ("load:ep4t4d4:8:2", "load:ep2t4d2:6:4", "save:ep2t2d4:9", "load:ep1t1d2:9:4")
    exports = ("export:ep4t4s:5:released:released-4", "export:ep2t4d2:5:plain:plain-4", "import:ep4t2:5:plain-2")
    trains = ("train:ep4:2:4:whole:four", "train:ep2d2:2:4:rows:four-rows")
    succeed(4, two, corpus, "save:ep2t4s:6", *loads, "load:ep2t4s:6:4", *exports, *trains)
    return two


def test_two_processes_and_one_read_what_two_wrote(tmp_path: Path, corpus: Path) -> None:
    """The quick one: experts and tables split, and dense matrices kept by rows besides."""
    folder = tmp_path / "folders"
    succeed(2, folder, corpus, "save:ep2t2:1", "save:ep2t2d2:8", "load:ep2t2d2:1:2", "load:ep1t2:8:2")
    folders.run(folder, corpus, ["load:ep1t1:1:2", "load:ep1t1:8:2"])


@pytest.mark.slow
def test_one_process_reads_what_several_wrote(two: Path, corpus: Path) -> None:
    folders.run(
        two, corpus, ["load:ep1t1:1:2", "load:ep1t1:2:2", "load:ep1t1:3:2", "load:ep1t1:8:2", "import:ep1t1:5:plain-2"]
    )


@pytest.mark.slow
def test_one_process_reads_what_four_wrote(four: Path, corpus: Path) -> None:
    folders.run(four, corpus, ["load:ep1t1:6:4", "load:ep1t1:7:1", "load:ep1t1:9:4", "import:ep1t1:5:plain-4"])


@pytest.mark.slow
def test_no_rank_writes_what_another_wrote(four: Path) -> None:
    """Replicated tensors are written once, and every rank has its share."""
    step = four / "step-00000006"
    files = sorted(path.name for path in step.iterdir() if path.suffix == ".safetensors")
    assert files == [f"rank-0000{rank}.safetensors" for rank in range(4)]
    sizes = [(step / file).stat().st_size for file in files]
    one = (four / "step-00000007" / "rank-00000.safetensors").stat().st_size
    assert one <= sum(sizes) < 1.1 * one and max(sizes) < 0.5 * one  # headers and random states are per rank


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["released", "plain"])
@pytest.mark.parametrize("several", ["two", "four"])
def test_several_export_the_folder_of_one(request: pytest.FixtureRequest, several: str, kind: str) -> None:
    folder, written = request.getfixturevalue(several), {"two": ("2", "dense"), "four": ("4",)}[several]
    wanted = {path.name: path.read_bytes() for path in (folder / f"{kind}-1").iterdir()}
    assert len(wanted) > 5
    if kind == "released":
        written += ("through",)
    for by in written:
        assert {path.name: path.read_bytes() for path in (folder / f"{kind}-{by}").iterdir()} == wanted, by


@pytest.mark.slow
def test_steps_after_resuming_are_those_without(two: Path, corpus: Path) -> None:
    """At the same layout to the bit, at others to rounding."""
    wanted = state_after(two / "whole", corpus)
    folders.run(two, corpus, ["train:ep1:2:4:whole:alone"])
    assert farthest(state_after(two / "same", corpus), wanted) == 0.0
    assert farthest(state_after(two / "again", corpus), state_after(two / "rows", corpus)) == 0.0
    for layout in ("copies", "alone", "divided", "chunks", "chunks-rows"):
        assert 0.0 < farthest(state_after(two / layout, corpus), wanted) < 1e-6, layout
    cut = state_after(two / "cut", corpus)  # with rows over two ranks, recomputed and offloaded, from the first step on
    assert farthest(state_after(two / "cut-again", corpus), cut) == 0.0
    assert 0.0 < farthest(state_after(two / "uncut", corpus), cut) < 1e-6


@pytest.mark.slow
def test_steps_after_resuming_on_four_are_those_without(four: Path, corpus: Path) -> None:
    for there, here in (("whole", "four"), ("rows", "four-rows")):
        assert farthest(state_after(four / here, corpus), state_after(four / there, corpus)) < 1e-6, here


def state_after(folder: Path, corpus: Path) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state after four steps."""
    run = folders.made("ep1", corpus)
    folders.resume(run, folder, 4)
    state = {f"{name} {key}": torch.as_tensor(value)
             for group in run.optimizer.param_groups
             for name, parameter in zip(group["names"], group["params"], strict=True)
             for key, value in run.optimizer.state[parameter].items()}  # fmt: skip
    assert len(state) > 150 and all(tensor.any() for tensor in state.values())
    return {**run.model.state_dict(), **state}


def farthest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max((found[name] - tensor).abs().max().item() for name, tensor in wanted.items())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", ":background"])
def test_a_rank_killed_in_its_write_leaves_the_checkpoint_before(tmp_path: Path, corpus: Path, how: str) -> None:
    folder = tmp_path / "folders"
    ended = launch(2, folder, corpus, "save:ep2t2:1", f"die:ep2t2:2{how}")
    assert ended[1].code == -9 and ended[0].code > 0, ended[0].output
    assert {path.name for path in folder.iterdir()} >= {"step-00000001"}
    assert not (folder / "step-00000002").exists()
    folders.run(folder, corpus, ["load:ep1t1:1:2", "save:ep1t1:2"])
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]
