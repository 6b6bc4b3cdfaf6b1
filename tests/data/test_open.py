import pytest

from data import DataConfig, DataError
from data.errors import BadRecordPolicy
from data.open import open_sources


def texts(source):
    return [document.text for document, _ in source.read(BadRecordPolicy("stop"))]


def test_the_standard_library_is_split_by_file_without_tests_or_other_packages():
    train, validation = open_sources(DataConfig())
    names = {file.name for file in train.files}, {file.name for file in validation.files}
    assert len(names[0]) > 300 and len(names[1]) > 15
    assert not names[0] & names[1]
    assert {"argparse.py", "json/decoder.py"} <= names[0] | names[1]
    folders = {part for name in names[0] | names[1] for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "encodings", "__pycache__"}
    assert [f.name for f in open_sources(DataConfig())[0].files] == [f.name for f in train.files]


def test_a_file_keeps_its_side_whatever_its_neighbours(tmp_path):
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text("some text")
    cfg = DataConfig(source="text", paths=[str(tmp_path)], validation_share=0.3)
    before = {file.name for file in open_sources(cfg)[1].files}
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "more.txt").write_text("more text")
    after = {file.name for file in open_sources(cfg)[1].files} - {"deeper/more.txt"}
    assert after == before and 5 < len(before) < 35


def test_held_out_files_are_not_trained_on(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    paths, named = [str(tmp_path)], [str(tmp_path / "b.txt")]
    train, held_out = map(texts, open_sources(DataConfig(source="text", paths=paths, validation_paths=named)))
    assert (train, held_out) == (["a"], ["b"])
    with pytest.raises(DataError, match="includes every file of data.paths"):
        open_sources(DataConfig(source="text", paths=paths, validation_paths=paths))


def test_a_saved_dataset_is_opened(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"body": ["one", "two"]}).save_to_disk(str(tmp_path / "saved"))
    cfg = DataConfig(source="hub", paths=[str(tmp_path / "saved")], field="body", validation_share=1e-9)
    assert texts(open_sources(cfg)[0]) == ["one", "two"]
    cfg.field = "text"
    with pytest.raises(DataError, match="'body'"):
        open_sources(cfg)


def test_a_dataset_that_cannot_be_opened_is_one_line(tmp_path):
    with pytest.raises(DataError) as caught:
        open_sources(DataConfig(source="hub", paths=[str(tmp_path / "absent")]))
    assert caught.value.reason == "cannot open data set" and "\n" not in str(caught.value)
