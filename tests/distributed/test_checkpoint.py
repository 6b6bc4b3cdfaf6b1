"""Folders written and read by several processes: every layout gives every other the same bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import folders  # noqa: E402
from ranks import Ended, Group  # noqa: E402

pytestmark = pytest.mark.distributed


def launch(size: int, folder: Path, *jobs: str) -> list[Ended]:
    with Group(size, ["tests/distributed/folders.py", str(folder), *jobs], folder.parent / f"logs{size}") as group:
        return group.finish()


def succeed(size: int, folder: Path, *jobs: str) -> None:
    ended = launch(size, folder, *jobs)
    assert [process.code for process in ended] == [0] * size, "\n".join(process.output for process in ended)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by one process: step 7, and exports of the model of step 5."""
    folder = tmp_path_factory.mktemp("spread") / "folders"
    exports = ("export:ep1t1:5:released:released-1", "export:ep1t1:5:plain:plain-1")
    folders.run(folder, ["save:ep1t1:7", *exports])
    return folder


@pytest.fixture(scope="module")
def two(one: Path) -> Path:
    """By two: steps 1, 2 and 3. They also read back, refuse another model and fail together."""
    saves = ("save:ep2t2:1", "save:ep1t1:2", "save:ep2t2s:3:background")
    loads = ("load:ep2t2:1:2", "load:ep1t1:1:2", "load:ep2t2s:2:2", "load:ep1t2:3:2", "load:ep2t2:7:1")
    exports = ("export:ep2t2:5:released:released-2", "export:ep2t2s:5:plain:plain-2", "import:ep2t2s:5:plain-1")
    succeed(2, one, *saves, *loads, *exports, "refuse:ep2t2:1", "fail:ep2t2:4")
    return one


@pytest.fixture(scope="module")
def four(two: Path) -> Path:
    """By four: step 6. They read what one and two wrote."""
    loads = ("load:ep4t4:1:2", "load:ep4t2s:2:2", "load:ep2t4:3:2", "load:ep4t4s:7:1")
    exports = ("export:ep4t4s:5:released:released-4", "export:ep2t4:5:plain:plain-4", "import:ep4t2:5:plain-2")
    succeed(4, two, "save:ep2t4s:6", *loads, "load:ep2t4s:6:4", *exports)
    return two


def test_one_process_reads_what_several_wrote(four: Path) -> None:
    saved_by = {1: 2, 2: 2, 3: 2, 6: 4, 7: 1}
    folders.run(four, [f"load:ep1t1:{step}:{ranks}" for step, ranks in saved_by.items()])
    folders.run(four, ["import:ep1t1:5:plain-2", "import:ep1t1:5:plain-4"])


def test_no_rank_writes_what_another_wrote(four: Path) -> None:
    """Replicated tensors are written once, and every rank has its share."""
    step = four / "step-00000006"
    files = sorted(path.name for path in step.iterdir() if path.suffix == ".safetensors")
    assert files == [f"rank-0000{rank}.safetensors" for rank in range(4)]
    sizes = [(step / file).stat().st_size for file in files]
    one = (four / "step-00000007" / "rank-00000.safetensors").stat().st_size
    assert one <= sum(sizes) < 1.1 * one and max(sizes) < 0.5 * one  # headers and random states are per rank


@pytest.mark.parametrize("kind", ["released", "plain"])
def test_several_export_the_folder_of_one(four: Path, kind: str) -> None:
    wanted = {path.name: path.read_bytes() for path in (four / f"{kind}-1").iterdir()}
    assert len(wanted) > 5
    for ranks in (2, 4):
        assert {path.name: path.read_bytes() for path in (four / f"{kind}-{ranks}").iterdir()} == wanted


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", ":background"])
def test_a_rank_killed_in_its_write_leaves_the_checkpoint_before(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "folders"
    ended = launch(2, folder, "save:ep2t2:1", f"die:ep2t2:2{how}")
    assert ended[1].code == -9 and ended[0].code > 0, ended[0].output
    assert {path.name for path in folder.iterdir()} >= {"step-00000001"}
    assert not (folder / "step-00000002").exists()
    folders.run(folder, ["load:ep1t1:1:2", "save:ep1t1:2"])
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]
