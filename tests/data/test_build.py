import json
import os

import pytest
from tokenizers import Tokenizer

from data import DataConfig, build_loaders, load_tokenizer
from data.files import _hashes, _read_hash
from data.open import open_sources
from data.tokenizer import train_tokenizer
from data.windows import whole_split


def text_folder(path, texts):
    path.mkdir()
    for number, text in enumerate(texts):
        (path / f"{number}.txt").write_text(text, encoding="utf-8")
    return DataConfig(
        source="text", paths=[str(path)], cache_dir=str(path / ".cache"), vocab_size=600, validation_share=0.2
    )


def test_a_tokenizer_is_trained_once_and_again_when_its_inputs_change(tmp_path, texts, monkeypatch):
    cfg = text_folder(tmp_path / "corpus", texts)
    first = load_tokenizer(cfg)
    with monkeypatch.context() as patch:
        patch.setattr("data.tokenizer.train_tokenizer", lambda *a: pytest.fail("trained again"))
        assert load_tokenizer(cfg).to_str() == first.to_str()
        cfg.vocab_size = 601
        with pytest.raises(pytest.fail.Exception, match="trained again"):
            load_tokenizer(cfg)
        cfg.vocab_size = 600
        (tmp_path / "corpus" / "0.txt").write_text("changed " * 100)
        (tmp_path / "corpus" / "1.txt").write_text("changed " * 100)
        with pytest.raises(pytest.fail.Exception, match="trained again"):
            load_tokenizer(cfg)
    leftover = [p.name for p in (tmp_path / "corpus" / ".cache").iterdir() if not p.name.endswith((".json", ".lock"))]
    assert leftover == []


def test_training_is_deterministic_and_sees_the_train_split_only(tmp_path, texts):
    one, two = (text_folder(tmp_path / name, texts) for name in "ab")
    assert load_tokenizer(one).to_str() == load_tokenizer(two).to_str()
    kept = [f.path.read_text(encoding="utf-8") for f in _train_files(one)]
    assert len(kept) < len(texts)
    assert Tokenizer.from_str(train_tokenizer(iter(kept), 600).to_str()).get_vocab() == load_tokenizer(one).get_vocab()


def _train_files(cfg):
    return open_sources(cfg)[0].files


def test_tokenizer_training_and_validation_read_a_file_for_its_hash_once(tmp_path, texts, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    os.utime(path, (10**9, 10**9))
    reads = []
    monkeypatch.setattr("data.files._read_hash", lambda path, advance: reads.append(path) or b"hash")
    cfg = DataConfig("jsonl", [str(path)], cache_dir=str(tmp_path / "cache"), vocab_size=512, validation_share=0.3)
    build_loaders(cfg, load_tokenizer(cfg), seq_len=64, batch_rows=2)
    assert reads == [path]


def test_every_problem_of_the_arguments_is_reported_at_once(tokenizer):
    cfg = DataConfig(source="digits", window_tokens=0)
    with pytest.raises(ValueError) as caught:
        build_loaders(cfg, tokenizer, seq_len=1, batch_rows=3, row_group=2, row_groups=2)
    for key in ("window_tokens=0", "seq_len=1", "batch_rows=3", "row_group=2", "vision_config"):
        assert key in str(caught.value)


def test_the_data_are_hashed_and_the_held_out_rows_packed_by_one_process(tmp_path, texts, monkeypatch):
    """Every file is read once for its hash, and not again at the next start while size and time stay the same."""
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(texts[number][:2000])
        os.utime(tmp_path / f"{number}.txt", (1e9, 1e9))
    cfg = DataConfig("text", [str(tmp_path)], cache_dir=str(tmp_path / ".cache"), validation_share=0.3, vocab_size=512)
    cfg.window_tokens, hashed, packed, results = 800, [], [], []

    def first(make):  # rank 0 calls the function, and the ranks after it get its results in the same order
        results.append(make())
        return results[-1]

    monkeypatch.setattr("data.files._read_hash", lambda path, advance: hashed.append(path) or _read_hash(path, advance))
    monkeypatch.setattr("data.build.whole_split", lambda *given: packed.append(given) or whole_split(*given))
    for start in (0, 1):
        for rank in range(3):
            _hashes.clear()  # another process
            answers = iter(list(results))
            once = first if rank == 0 else lambda make, answers=answers: next(answers)
            tokenizer = load_tokenizer(cfg, once)
            build_loaders(cfg, tokenizer, seq_len=64, batch_rows=3, row_group=rank, row_groups=3, once=once)
        assert sorted(hashed) == sorted(tmp_path.glob("*.txt")) and len(packed) == start + 1
        results.clear()
    os.utime(tmp_path / "3.txt", (1e9, 1e9 + 1))
    before = len(hashed)
    load_tokenizer(cfg)
    assert len(hashed) > before
