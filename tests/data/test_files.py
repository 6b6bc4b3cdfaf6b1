import pytest

from data import DataError
from data.files import find_files


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
