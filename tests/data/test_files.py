import os

import pytest

from data import DataError
from data.files import content_hash, find_files


def test_a_folder_gives_its_files_once_in_order_without_hidden_ones(tmp_path):
    for name in ("b.txt", "a.txt", "c.bin", ".hidden.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "d.txt").write_text("x")
    found = find_files([str(tmp_path), str(tmp_path / "a.txt"), str(tmp_path / "*.txt")], (".txt",))
    assert [file.name for file in found] == ["a.txt", "b.txt"]


@pytest.mark.parametrize("name", ["absent.txt", "absent/*.txt", "empty"])
def test_a_path_that_gives_no_file_is_named(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=name.replace("*", r"\*")) as caught:
        find_files([str(tmp_path / name)], (".txt",))
    assert caught.value.reason == "missing file"


def test_the_content_of_a_file_that_stays_as_it_is_is_read_once(tmp_path, monkeypatch):
    reads = []

    def read(path, advance):
        reads.append(path.read_text())
        return path.read_bytes()

    monkeypatch.setattr("data.files._read_hash", read)
    path = tmp_path / "a.txt"
    path.write_text("one")
    for _ in range(2):
        assert content_hash(path) == b"one"
    assert reads == ["one", "one"], "it was written a moment ago: its time may not tell the next change"
    os.utime(path, ns=(10**18, 10**18))
    for _ in range(3):
        assert content_hash(path) == b"one"
    assert len(reads) == 3
    path.write_text("two")
    os.utime(path, ns=(10**18 + 1, 10**18 + 1))
    assert content_hash(path) == b"two" and len(reads) == 4
    path.write_text("three")
    os.utime(path, ns=(10**18 + 1, 10**18 + 1))
    assert content_hash(path) == b"three" and len(reads) == 5, "another size"
