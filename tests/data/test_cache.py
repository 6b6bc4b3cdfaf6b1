"""Cache entries are made by one process while the others wait."""

from contextlib import contextmanager

import pytest

from data import cache


def test_an_entry_that_another_process_made_meanwhile_is_not_made_again(tmp_path, monkeypatch):
    @contextmanager
    def waited(path):
        path.write_text("of another")
        yield

    monkeypatch.setattr(cache, "locked", waited)
    cache.make_once(tmp_path / "entry", lambda: pytest.fail("it was made twice"))
    assert cache.cached_text(tmp_path / "text", lambda: pytest.fail("it was made twice")) == "of another"
