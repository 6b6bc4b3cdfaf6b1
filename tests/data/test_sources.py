import codecs
import json
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest

from data import DataConfig, DataError, build_loaders
from data.errors import BadRecordPolicy
from data.files import find_files
from data.open import open_sources
from data.sources import HashSplit, JsonLines, Parquet, TextFiles


def jsonl(path, *lines):
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return JsonLines(find_files([str(path)], (".jsonl",)), "text")


def texts(source, policy=None, position=None):
    return [document.text for document, _ in source.read(policy or BadRecordPolicy("stop"), position)]


def refused(source):
    with pytest.raises(DataError) as caught:
        texts(source)
    return caught.value


def test_bad_text_files_are_refused_with_file_line_and_reason(tmp_path):
    cases = {
        "utf8.txt": (b"fine\nbad \xff byte\n", 2, "invalid UTF-8"),
        "cut.txt": ("a\nb\né".encode()[:-1], 3, "invalid UTF-8"),
        "empty.txt": (b"", 0, "empty file"),
        "blank.txt": (b" \n\t\n", 0, "empty file"),
        "utf16.txt": ("text".encode("utf-16"), 1, "UTF-16 byte order mark"),
        "utf32.txt": ("text".encode("utf-32"), 1, "UTF-32 byte order mark"),
    }
    for name, (data, line, reason) in cases.items():
        (tmp_path / name).write_bytes(data)
        error = refused(TextFiles(find_files([str(tmp_path / name)], (".txt",))))
        assert (error.file, error.line, error.reason) == (str(tmp_path / name), line, reason)
        assert "\n" not in str(error) and name in str(error)


def test_skip_counts_by_reason_and_goes_on(tmp_path, caplog):
    for name, data in {"1.txt": b"", "2.txt": b"\xff", "3.txt": b"kept", "4.txt": b"", "5.txt": b"kept too"}.items():
        (tmp_path / name).write_bytes(data)
    policy = BadRecordPolicy("skip")
    assert texts(TextFiles(find_files([str(tmp_path)], (".txt",))), policy) == ["kept", "kept too"]
    assert policy.skipped == {"empty file": 2, "invalid UTF-8": 1}
    assert sum("1.txt" in message or "4.txt" in message for message in caplog.messages) == 1


def test_a_utf8_byte_order_mark_is_repaired_and_named(tmp_path, caplog):
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + "text\ufeff".encode())
    policy = BadRecordPolicy("stop")
    assert texts(TextFiles(find_files([str(tmp_path)], (".txt",))), policy) == ["text\ufeff"]
    assert policy.repaired == {"UTF-8 byte order mark": 1} and "a.txt:1: UTF-8 byte order mark" in caplog.text


def test_a_file_that_vanishes_is_an_unreadable_file(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    source = TextFiles(find_files([str(tmp_path)], (".txt",)))
    (tmp_path / "a.txt").unlink()
    assert refused(source).reason == "unreadable file"


def test_identity_follows_the_content(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    source = TextFiles(find_files([str(tmp_path)], (".txt",)))
    before = source.identity()
    path.write_text("two")
    assert source.identity() != before and source.identity(content=False) == source.identity(content=False)
    path.write_text("one")
    assert source.identity() == before


def test_unicode_line_separators_do_not_end_a_json_line(tmp_path):
    odd = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"
    raw = json.dumps({"text": "raw \u2028 \u2029 \x85"}, ensure_ascii=False).encode()
    source = jsonl(tmp_path / "a.jsonl", {"text": odd}, raw, b'{"text": "windows"}\r')
    assert texts(source) == [odd, "raw \u2028 \u2029 \x85", "windows"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"[1]", "record is not an object"),
        (b'"text"', "record is not an object"),
        (b"null", "record is not an object"),
        (b'{"body": "x"}', "wrong field"),
        (b'{"text": 3}', "field is not a string"),
        (b'{"text": null}', "field is not a string"),
        (b'{"text": ["x"]}', "field is not a string"),
        (b'{"text": " "}', "empty text"),
        (b'{"text": "x"', "invalid JSON"),
        (b"[" * 100_000, "invalid JSON"),
        (b'{"text": "x", "id": ' + b"9" * 5000 + b"}", "invalid JSON"),
        (b'{"text": "\xff"}', "invalid UTF-8"),
        (b'{"text": "\\ud800"}', "invalid Unicode"),
        (b"", "blank line"),
    ],
)
def test_bad_json_records_are_refused_or_skipped(tmp_path, record, reason):
    source = jsonl(tmp_path / "a.jsonl", {"text": "one"}, record, {"text": "three"})
    error = refused(source)
    assert (error.file, error.line, error.reason) == (str(tmp_path / "a.jsonl"), 2, reason)
    policy = BadRecordPolicy("skip")
    assert texts(source, policy) == ["one", "three"] and policy.skipped == {reason: 1}


def test_a_wrong_field_lists_the_fields_there_are(tmp_path):
    assert "'body', 'id'" in str(refused(jsonl(tmp_path / "a.jsonl", {"body": "x", "id": 1})))


def test_reading_continues_at_a_position_without_reading_what_came_before(tmp_path):
    jsonl(tmp_path / "a.jsonl", *({"text": f"a{n}"} for n in range(5)))
    jsonl(tmp_path / "b.jsonl", *({"text": f"b{n}"} for n in range(5)))
    source = JsonLines(find_files([str(tmp_path)], (".jsonl",)), "text")
    reading = source.read(BadRecordPolicy("stop"))
    positions = [json.loads(json.dumps(after())) for _, after in reading]
    expected = texts(source)
    (tmp_path / "a.jsonl").write_bytes(b"\xff" * (tmp_path / "a.jsonl").stat().st_size)  # must not be looked at again
    for done, position in list(enumerate(positions, 1))[4:]:
        assert texts(source, position=position) == expected[done:]
    error_line = next(iter(source.read(BadRecordPolicy("stop"), positions[6])))[0].line
    assert error_line == 3


def write_parquet(path, values, kind=None, **options):
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(values, kind)}), path, **options)
    return Parquet(find_files([str(path)], (".parquet",)), "text")


def test_parquet_rows_become_documents_from_any_position(tmp_path):
    source = write_parquet(tmp_path / "a.parquet", [f"row {n}" for n in range(10)], row_group_size=3)
    pairs = [(document, after()) for document, after in source.read(BadRecordPolicy("stop"))]
    assert [(d.text, d.line) for d, _ in pairs] == [(f"row {n}", n + 1) for n in range(10)]
    for done, (_, position) in enumerate(pairs, 1):
        assert texts(source, position=position) == [f"row {n}" for n in range(done, 10)]


def test_bad_parquet_is_refused_with_file_row_and_reason(tmp_path):
    bad = write_parquet(tmp_path / "null.parquet", ["a", None])
    assert (refused(bad).line, refused(bad).reason) == (2, "field is not a string")
    invalid = pyarrow.array([b"ok", b"bad \xff"], pyarrow.binary()).view(pyarrow.string())
    bad = write_parquet(tmp_path / "utf8.parquet", invalid)
    assert (refused(bad).line, refused(bad).reason) == (2, "invalid UTF-8")
    assert refused(write_parquet(tmp_path / "number.parquet", [1, 2])).reason == "field is not a string"
    bad.field = "body"
    assert refused(bad).reason == "wrong field" and "'text'" in str(refused(bad))
    (tmp_path / "junk.parquet").write_bytes(b"PAR1 no parquet at all")
    junk = Parquet(find_files([str(tmp_path / "junk.parquet")], (".parquet",)), "text")
    assert refused(junk).reason == "invalid Parquet"


@pytest.fixture
def dataset_folder(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for part in "ab":
        jsonl(folder / f"{part}.jsonl", *({"text": f"{part}{n}", "n": n} for n in range(25)))
    return str(folder)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_local_dataset_folder_reads_and_resumes_exactly(dataset_folder, streaming, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    cfg = DataConfig(source="hub", paths=[dataset_folder], streaming=streaming, validation_rows=1, validation_share=0.2)
    train, validation = open_sources(cfg)
    expected = texts(train)
    assert Counter(expected + texts(validation)) == Counter(f"{part}{n}" for part in "ab" for n in range(25))
    assert texts(train) == expected  # a second pass starts at the beginning
    positions = [json.loads(json.dumps(after())) for _, after in train.read(BadRecordPolicy("stop"))]
    for done in (1, 17, 30, len(expected)):
        assert texts(train, position=positions[done - 1]) == expected[done:]
    assert texts(train) == expected
    # Two passes that run at the same time must not move each other.
    later = [
        json.loads(json.dumps(a[1]()))
        for a, _ in zip(
            train.read(BadRecordPolicy("stop")), train.read(BadRecordPolicy("stop"), positions[2]), strict=False
        )
    ]
    assert texts(train, position=later[9]) == expected[10:]


@pytest.mark.parametrize("kind", ["one shard", "three shards", "saved"])
@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_and_saved_data_sets_train_and_resume_exactly(kind, streaming, tokenizer, tmp_path, monkeypatch):
    """datasets 8308, 8145: the stream is copied in the loader's thread while the library's registry grows."""
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    records, folder = [{"text": f"text number {n}"} for n in range(120)], tmp_path / "set"
    if kind == "saved":
        datasets.Dataset.from_list(records).save_to_disk(folder, num_shards=3)
    else:
        folder.mkdir()
        for shard in range(count := 3 if kind == "three shards" else 1):
            rows = pyarrow.Table.from_pylist(records[shard::count])
            pyarrow.parquet.write_table(rows, folder / f"{shard}.parquet", row_group_size=11)
    cfg = DataConfig(source="hub", paths=[str(folder)], streaming=streaming, validation_rows=1, validation_share=0.2)
    cfg.window_tokens, cfg.cache_dir = 150, str(tmp_path / "cache")

    def loader():
        return build_loaders(cfg, tokenizer, seq_len=16, batch_rows=2)[0]

    states, batches, first = [], [], loader()
    while first.epoch < 2:
        states.append(json.loads(json.dumps(first.state_dict())))
        batches.append(next(first)["input_ids"])
    for number in range(0, len(states), 5):
        again = loader()
        again.load_state_dict(states[number])
        assert all((next(again)["input_ids"] == batch).all() for batch in batches[number : number + 3])


def test_a_streamed_dataset_trains_for_several_epochs(dataset_folder, tokenizer, tmp_path, monkeypatch):
    # The loader reads a stream in a thread of its own, where the library opens its file systems anew.
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    cfg = DataConfig(source="hub", paths=[dataset_folder], streaming=True, validation_rows=1, validation_share=0.2)
    cfg.window_tokens = 100
    loader, _ = build_loaders(cfg, tokenizer, seq_len=16, batch_rows=2)
    while loader.epoch < 3:
        batch = next(loader)
    state, following = loader.state_dict(), next(loader)
    loader.load_state_dict(state)
    assert (batch["labels"] >= 0).any() and (next(loader)["input_ids"] == following["input_ids"]).all()


def test_equal_records_fall_on_one_side_and_none_is_lost(tmp_path):
    records = [{"text": f"text {n % 100}"} for n in range(300)]
    source = jsonl(tmp_path / "a.jsonl", *records)
    train, held_out = texts(HashSplit(source, 0.2, False)), texts(HashSplit(source, 0.2, True))
    assert not set(train) & set(held_out)
    assert Counter(train + held_out) == Counter(record["text"] for record in records)
    assert 10 <= len(set(held_out)) <= 32
