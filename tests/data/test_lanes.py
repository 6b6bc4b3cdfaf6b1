"""A stream is dealt out to lanes: each rank reads its own part, and no document is lost or repeated."""

import gzip
import itertools
import json
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest

from data import DataConfig, build_loaders, merge_positions
from data.document import WHOLE
from data.errors import BadRecordPolicy
from data.files import deal_files
from data.lanes import deal_anew
from data.sources import JsonLines
from data.tokens import Encoder

COUNT = 150


def records(first=0, count=COUNT, step=1):
    return [{"text": f"document {number} " + "more " * (number % 7)} for number in range(first, count, step)]


def lines(chosen):
    return "".join(json.dumps(record) + "\n" for record in chosen)


def one_file(folder):
    (folder / "a.jsonl").write_text(lines(records()))


def five_files(folder):
    for part in range(5):
        (folder / f"{part}.jsonl").write_text(lines(records(part, step=5)))


def compressed(folder):
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.write(lines(records()))


def a_list(folder):
    (folder / "a.json").write_text(json.dumps(records()))


def texts(folder):
    for number, record in enumerate(records()):
        (folder / f"{number}.txt").write_text(record["text"])


def parquet(folder, shards=1):
    for part in range(shards):
        table = pyarrow.Table.from_pylist(records(part, step=shards))
        pyarrow.parquet.write_table(table, folder / f"{part}.parquet", row_group_size=11)


def config(folder, source="jsonl", **options):
    settings = {"validation_share": 0.1, "validation_rows": 1, "window_tokens": 400} | options
    return DataConfig(source, [str(folder)], streaming=True, cache_dir=str(folder / ".cache"), **settings)


def ranks_of(cfg, tokenizer, count, rows=1, length=32):
    """The loaders of `count` ranks, each with `rows` rows of a batch."""
    sizes = {"seq_len": 32, "train_seq_len": length, "batch_rows": count * rows, "row_groups": count}
    return [build_loaders(cfg, tokenizer, **sizes, seed=1, row_group=rank)[0] for rank in range(count)]


KINDS = {
    "one file": ("jsonl", one_file),
    "five files": ("jsonl", five_files),
    "compressed": ("jsonl", compressed),
    "a list": ("jsonl", a_list),
    "text": ("text", texts),
    "parquet": ("parquet", parquet),
    "hub": ("hub", parquet),
    "hub of three files": ("hub", lambda folder: parquet(folder, 3)),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * kind.startswith("hub")) for kind in KINDS]
)
def test_every_document_is_read_once_an_epoch_by_4_then_2_then_3_ranks(kind, tokenizer, tmp_path, monkeypatch):
    """The first kind in rows that become longer."""
    if kind.startswith("hub"):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    source, write = KINDS[kind]
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")
    cfg = config(tmp_path / "data", source)
    found, position = {epoch: Counter() for epoch in range(9)}, None
    for count, steps in ((4, 7), (2, 9), (3, None)):
        length = {4: 32, 2: 64, 3: 96}[count] if kind == "one file" else 32
        ranks = ranks_of(cfg, tokenizer, count, length=length)
        for rank in ranks:
            if position is not None:
                rank.load_state_dict(json.loads(json.dumps(position)))
        for _ in range(steps) if steps else itertools.count():
            if steps is None and min(rank.epoch for rank in ranks) == 2:
                break
            for rank in ranks:
                words = tokenizer.decode(next(rank)["input_ids"][0].tolist()).split()
                found[rank.epoch].update(
                    int(number) for word, number in itertools.pairwise(words) if word == "document"
                )
        position = merge_positions([rank.state_dict() for rank in ranks])
    for epoch in (0, 1):
        assert set(found[epoch].values()) == {1} and 100 < len(found[epoch]) < COUNT, epoch
    assert found[0] == found[1]


def test_a_rank_tokenises_what_it_trains_on_however_many_ranks_there_are(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(lines(records(count=4000)))
    cfg = config(tmp_path, window_tokens=128 * 4)
    seen, encode = [], Encoder.encode

    def counted(self, documents, policy):
        seen.extend(documents)
        return encode(self, documents, policy)

    monkeypatch.setattr(Encoder, "encode", counted)
    found = {}
    for world in (1, 4, 16):
        loader, _ = build_loaders(cfg, tokenizer, seq_len=128, batch_rows=world, seed=1, row_group=0, row_groups=world)
        seen.clear()
        for _ in range(40):
            next(loader)
        loader.rows.lanes[0].readers[""].own._prefetched[1].result()  # the thread reads one window ahead
        found[world] = len(seen)
    assert max(found.values()) <= 1.2 * min(found.values()), found


def test_a_rank_reads_only_its_part_of_a_file(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(records()))
    source = JsonLines([_file(tmp_path / "a.jsonl")], "text")
    whole = [document for document, _ in source.read(BadRecordPolicy("stop"))]
    parts = [[d for d, _ in source.share((i, 7)).read(BadRecordPolicy("stop"))] for i in range(7)]
    assert [d for part in parts for d in part] == whole  # lines are numbered in the whole file
    assert all(10 < len(part) < 35 for part in parts)
    assert source.share((3, 7)).identity() == source.identity()


def _file(path):
    from data.files import File

    return File(path, path.name)


def test_lines_far_into_a_file_are_numbered_from_a_byte(tmp_path, monkeypatch):
    monkeypatch.setattr("data.records.COUNTED_BYTES", 100)
    (tmp_path / "a.jsonl").write_text(lines(records()) + "[]\n")
    source = JsonLines([_file(tmp_path / "a.jsonl")], "text").share((6, 7))
    with pytest.raises(ValueError, match=r"a.jsonl from byte \d+:\d+: record is not an object") as error:
        list(source.read(BadRecordPolicy("stop")))
    begin, line = map(int, str(error.value).split("from byte ")[1].split(":")[:2])
    assert (tmp_path / "a.jsonl").read_bytes()[begin:].splitlines()[line - 1] == b"[]"


def test_files_are_dealt_whole_and_the_rest_is_divided():
    sizes = [50, 70, 10, 20, 60, 40, 30]
    dealt = [deal_files(sizes, (index, 3), divisible=True) for index in range(3)]
    assert [part.pop(2) for part in dealt] == [(0, 3), (1, 3), (2, 3)]
    assert all(share == WHOLE for part in dealt for share in part.values())
    assert sorted(number for part in dealt for number in part) == [0, 1, 3, 4, 5, 6]
    assert [sum(sizes[number] for number in part) for part in dealt] == [90, 90, 90]
    assert [2 in deal_files(sizes, (index, 3), divisible=False) for index in range(3)] == [True, False, False]


def test_old_lanes_are_finished_once_and_counts_are_kept():
    old = [
        {"sources": {"": {"epoch": epoch, "window": window, "start": None, "row": 0, "inherited": []}},
         "tokens": {"": 100}, "rows": {"": 5}}
        for epoch, window in ((1, 0), (0, 2), (2, 1))
    ]  # fmt: skip
    new = deal_anew(old, 2, 32)
    assert [lane["sources"][""]["epoch"] for lane in new] == [3, 3]
    handed = sorted((e["share"], e["epoch"], e["until"]) for lane in new for e in lane["sources"][""]["inherited"])
    assert handed == [([0, 3], 1, 2), ([1, 3], 0, 2), ([2, 3], 2, 2)]
    assert sum(lane["tokens"][""] for lane in new) == 300 and sum(lane["rows"][""] for lane in new) == 15


def test_the_position_of_a_run_without_lanes_is_read(tokenizer, tmp_path):
    one_file(tmp_path)
    (loader,) = ranks_of(config(tmp_path), tokenizer, 1)
    for _ in range(5):
        next(loader)
    state = loader.state_dict()
    lane = state["positions"]["0"]["sources"][""]
    old = {key: lane[key] for key in ("epoch", "window", "start", "row")} | {"fingerprint": state["fingerprint"]}
    (again,) = ranks_of(config(tmp_path), tokenizer, 1)
    again.load_state_dict(old)
    assert (next(again)["input_ids"] == next(loader)["input_ids"]).all()
