"""Files of records: every kind of file, packed or not, from any place."""

import bz2
import gzip
import json
import logging
import lzma

import pyarrow
import pyarrow.parquet
import pytest

from data import DataConfig, DataError, build_loaders
from data.errors import BadRecordPolicy
from data.files import find_files
from data.open import open_sources
from data.sources import JsonLines, TextFiles

RECORDS = [{"text": f"record {n}"} for n in range(9)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def packed(data, how):
    if how == "zst":
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as file:
            file.write(data)
        return sink.getvalue().to_pybytes()
    return {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[how](data)


def arrow(path, stream):
    table = pyarrow.Table.from_pylist(RECORDS)
    with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


FILES = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "a.JSONL": lambda path: path.write_bytes(LINES),
    "a.jsonl.gz": lambda path: path.write_bytes(packed(LINES, "gz")),
    "a.jsonl.zst": lambda path: path.write_bytes(packed(LINES, "zst")),
    "a.jsonl.bz2": lambda path: path.write_bytes(packed(LINES, "bz2")),
    "a.jsonl.xz": lambda path: path.write_bytes(packed(LINES, "xz")),
    "packed.jsonl": lambda path: path.write_bytes(packed(LINES, "gz")),  # what it is counts, not how it is called
    "plain.jsonl.gz": lambda path: path.write_bytes(LINES),
    "a.json": lambda path: path.write_text(json.dumps(RECORDS, indent=1)),
    "lines.json": lambda path: path.write_bytes(LINES),
    "a.json.gz": lambda path: path.write_bytes(packed(json.dumps(RECORDS).encode(), "gz")),
    "a.parquet": lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path, row_group_size=4),
    "stream.arrow": lambda path: arrow(path, stream=True),
    "file.arrow": lambda path: arrow(path, stream=False),
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_is_read_from_any_place(name, tmp_path):
    FILES[name](tmp_path / name)
    source, _ = open_sources(DataConfig("jsonl", [str(tmp_path / name)]))  # a file is taken whatever it is called
    source = source.source
    pairs = [(d.text, json.loads(json.dumps(after()))) for d, after in source.read(BadRecordPolicy("stop"))]
    assert [text for text, _ in pairs] == [record["text"] for record in RECORDS]
    for done, (_, position) in enumerate(pairs, 1):
        rest = [d.text for d, _ in source.read(BadRecordPolicy("stop"), position)]
        assert rest == [record["text"] for record in RECORDS[done:]]


def test_a_folder_takes_packed_files_and_counts_the_others_once(tmp_path, caplog):
    for name in ("a.jsonl", "b.JSONL", "c.jsonl.gz", "d.json", "e.ndjson.zst"):
        (tmp_path / name).write_bytes(packed(LINES, name.rsplit(".")[-1]) if name[-3:] in (".gz", "zst") else LINES)
    for name in ("x.csv", "y.png", "z.png", "README"):
        (tmp_path / name).write_text("x")
    with caplog.at_level(logging.INFO, "data.files"):
        for _ in range(2):
            source, _ = open_sources(DataConfig("jsonl", [str(tmp_path)]))
    assert sorted(file.name for file in source.source.files) == [
        "a.jsonl",
        "b.JSONL",
        "c.jsonl.gz",
        "d.json",
        "e.ndjson.zst",
    ]
    told = [message for message in caplog.messages if "other files are not read" in message]
    assert len(told) == 1 and "4 other files are not read (2 x .png, 1 x " in told[0] and str(tmp_path) in told[0]


def test_texts_are_read_packed_too(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(packed(b"one", "gz"))
    (tmp_path / "b.TXT").write_bytes(b"two")
    source = TextFiles(find_files([str(tmp_path)], (".txt",)))
    assert [d.text for d, _ in source.read(BadRecordPolicy("stop"))] == ["one", "two"]


@pytest.mark.parametrize("how", ["gz", "zst", "bz2", "xz"])
def test_a_damaged_packed_file_is_named(how, tmp_path):
    whole = packed(LINES * 50, how)
    (tmp_path / "a.jsonl").write_bytes(whole[: len(whole) // 2])
    source = JsonLines(find_files([str(tmp_path)], (".jsonl",)), "text")
    with pytest.raises(DataError, match="a.jsonl: unreadable file"):
        list(source.read(BadRecordPolicy("stop")))


def test_links_to_folders_are_followed_once(tmp_path):
    inside, outside = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (inside / "sub", outside / "deep"):
        folder.mkdir(parents=True)
    (inside / "a.txt").write_text("a")
    (inside / "sub" / "b.txt").write_text("b")
    (outside / "deep" / "c.txt").write_text("c")
    (inside / "link").symlink_to(outside)
    (inside / "again").symlink_to(inside / "sub")
    (inside / "sub" / "loop").symlink_to(inside)
    (outside / "back").symlink_to(inside)
    (inside / "broken").symlink_to(tmp_path / "absent")
    assert [file.name for file in find_files([str(inside)], (".txt",))] == ["a.txt", "link/deep/c.txt", "sub/b.txt"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "empty file"),
        ("[]", "empty file"),
        ("3", "no records"),
        ("[", "invalid JSON"),
        ("[1]", "record is not an object"),
    ],
)
def test_a_json_file_without_records_is_refused(content, reason, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError) as caught:
        list(JsonLines(find_files([str(tmp_path)], (".json",)), "text").read(BadRecordPolicy("stop")))
    assert caught.value.reason == reason


def test_pretokenised_texts(tokenizer, tmp_path):
    ids = [tokenizer.encode(text).ids for text in ("one two", "three é four")]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"input_ids": row, "attention_mask": [1] * len(row)}) + "\n" for row in ids)
    )
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("one two", "three é four"))
    )
    made = []
    for name in ("a.jsonl", "texts.jsonl"):
        path = str(tmp_path / name)
        (tmp_path / f"held-{name}").write_text((tmp_path / name).read_text())
        cfg = DataConfig(
            "jsonl", [path], [str(tmp_path / f"held-{name}")], cache_dir=str(tmp_path / "cache"), window_tokens=999
        )
        train, valid = build_loaders(cfg, tokenizer, seq_len=16, batch_rows=2, seed=1)
        made.append((next(train), valid.target_tokens, valid.target_bytes, train.stats.bytes))
    for key in ("input_ids", "labels"):
        assert (made[0][0][key] == made[1][0][key]).all()
    assert made[0][1:] == made[1][1:], "as many bytes are behind the ids as behind the texts"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"input_ids": []}, "wrong input_ids"),
        ({"input_ids": ["a"]}, "wrong input_ids"),
        ({"input_ids": [5, 10**6]}, "id outside the vocabulary"),
        ({"input_ids": [-1]}, "id outside the vocabulary"),
        ({"input_ids": [5, 3]}, "image token without an image"),
        ({"input_ids": [5, 6], "labels": [5]}, "wrong labels"),
        ({"input_ids": [5, 6], "labels": [6, 5]}, "wrong labels"),
        ({"input_ids": [5, 6], "labels": [-100, 6]}, "masked tokens"),
        ({"input_ids": [5, 6], "attention_mask": [1, 0]}, "padded tokens"),
    ],
)
def test_bad_token_records_are_refused(record, reason, tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "held.jsonl").write_text(json.dumps({"text": "x"}) + "\n")
    cfg = DataConfig("jsonl", [str(tmp_path / "a.jsonl")], [str(tmp_path / "held.jsonl")], window_tokens=99)
    cfg.cache_dir = str(tmp_path / "cache")
    with pytest.raises(DataError, match=f"a.jsonl:1: {reason}"):
        build_loaders(cfg, tokenizer, seq_len=16, batch_rows=2)
