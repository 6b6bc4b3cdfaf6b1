"""Progress of long work: lines now and then, with the time left; what is counted adds up to the whole."""

from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

import data.progress
import data.tokens
from data.errors import BadRecordPolicy
from data.files import content_hash, find_files, total_bytes
from data.packing import pack_rows
from data.progress import duration, progress
from data.sources import HashSplit, HubDataset, JsonLines
from model import convert_checkpoint, load_weights, save_pretrained
from tests.model.tiny import tiny_model


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    time = [0.0]
    monkeypatch.setattr(data.progress.time, "monotonic", lambda: time[0])
    return time


def test_lines_come_now_and_then_with_the_time_left(clock) -> None:
    lines: list[str] = []
    with progress("reading", 200, lines.append) as advance:
        for _ in range(100):
            clock[0] += 1.0
            advance(1)
    assert lines[:2] == ["reading: 5%, 0:03:10 left", "reading: 20%, 0:02:40 left"] and len(lines) == 4
    assert duration(3661.4) == "1:01:01"


def test_short_work_shows_nothing(clock, capsys) -> None:
    with progress("reading", 3) as advance:
        for _ in range(3):
            clock[0] += 3.0
            advance(1)
    assert capsys.readouterr() == ("", "")


def test_tokenising_counts_the_bytes_of_its_files(tmp_path: Path, monkeypatch) -> None:
    for name, count in (("a", 30), ("b", 5)):
        lines = (f'{{"text": "number {n} of {count}"}}\n' for n in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    source = JsonLines(find_files([str(tmp_path)], (".jsonl",)), "text")
    sizes = data.tokens.file_sizes(source)
    assert sum(sizes.values()) == sum(path.stat().st_size for path in tmp_path.iterdir())
    amounts: list[float] = []
    policy = BadRecordPolicy("stop")
    shown = data.tokens._shown((document for document, _ in source.read(policy)), sizes, amounts.append)
    assert len(list(shown)) == 35
    first = sizes[str(tmp_path / "a.jsonl")]
    assert first < sum(amounts) < sum(sizes.values()) and len(amounts) > 35


def test_loading_and_converting_count_every_value(tmp_path: Path) -> None:
    model = tiny_model()
    save_pretrained(model, tmp_path / "plain")
    shares: list[float] = []
    convert_checkpoint(tmp_path / "plain", tmp_path / "released", "released", done=shares.append)
    assert sum(shares) == pytest.approx(1.0) and len(shares) > 50
    for format in ("plain", "released"):
        shares.clear()
        load_weights(model, tmp_path / format, done=shares.append)
        assert sum(shares) == pytest.approx(1.0) and len(shares) > 50
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_only_the_first_process_shows_work_that_all_do(clock, monkeypatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        for shared in (False, True):
            with progress(f"rank {rank} {shared}", 100, lines.append, shared=shared) as advance:
                clock[0] += 20.0
                advance(20)
    assert [line.partition(":")[0] for line in lines] == ["rank 0 False", "rank 0 True", "rank 1 False"]


def test_packing_counts_nearly_all_documents() -> None:
    amounts: list[float] = []
    pack_rows(np.full(5000, 7), 64, amounts.append)
    assert sum(amounts) == 4096 and len(amounts) == 4


def test_hashing_counts_every_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * (2**20 + 5))
    amounts: list[float] = []
    for file in find_files([str(tmp_path)], (".txt",)):
        content_hash(file.path, amounts.append)
        assert total_bytes([file]) == sum(amounts) == 2**20 + 5
    assert len(amounts) == 2


def test_a_data_set_counts_its_records() -> None:
    dataset = datasets.Dataset.from_list([{"text": f"{n}"} for n in range(5)])
    amounts: list[float] = []
    source = HashSplit(HubDataset(dataset, "toy", "text", streaming=False), 0.0, held_out=False)
    assert data.tokens._records(source) == 5
    read = (document for document, _ in source.read(BadRecordPolicy("stop")))
    assert [d.text for d in data.tokens._shown_by_record(read, amounts.append)] == ["0", "1", "2", "3", "4"]
    assert sum(amounts) == 5
