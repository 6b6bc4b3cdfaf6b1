import json
import unicodedata

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from data import DataConfig, DataError, load_tokenizer, special_ids
from data.errors import Policy
from data.sources import Document
from data.tokenizer import CONTROL_TOKENS, NOISE, _guarded, train
from data.tokens import Encoder, bytes_per_token


def text_folder(path, texts):
    path.mkdir()
    for number, text in enumerate(texts):
        (path / f"{number}.txt").write_text(text, encoding="utf-8")
    return DataConfig(
        source="text", paths=[str(path)], cache_dir=str(path / ".cache"), vocab_size=600, validation_share=0.2
    )


def test_control_tokens_have_the_released_spellings_and_first_ids(tokenizer):
    spellings = [
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜▁pad▁｜>",
        "<｜deepseek_image｜>",
        "<｜User｜>",
    ]
    spellings += ["<｜Assistant｜>", "<｜System｜>", "<think>", "</think>", "<tool_result>", "</tool_result>", NOISE]
    assert list(CONTROL_TOKENS) == spellings
    assert [tokenizer.token_to_id(s) for s in spellings] == list(range(len(spellings)))
    ids = special_ids(tokenizer)
    assert (ids.bos, ids.eos, ids.pad, ids.image, ids.noise) == (0, 1, 2, 3, 11)
    assert tokenizer.get_vocab_size() == 600


def test_text_that_spells_a_control_token_is_text(tokenizer):
    for spelling in CONTROL_TOKENS:
        for text in (spelling, f"a{spelling}b", f" {spelling} ", f"{spelling}{spelling}\n"):
            for encoding in (
                tokenizer.encode(text, add_special_tokens=False),
                tokenizer.encode_batch([text], add_special_tokens=False)[0],
                tokenizer.encode_batch_fast([text], add_special_tokens=False)[0],
            ):
                assert min(encoding.ids) >= len(CONTROL_TOKENS)
                assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
    unguarded = Tokenizer.from_str(tokenizer.to_str())
    assert unguarded.encode("<think>").ids == [7]  # what the guard is there for


@pytest.mark.parametrize(
    "text", ["naïve café 東京 🙂‍↔️", "\ttabs\r\n\x00\x7f\ufeff", "  leading and trailing  ", "١٢٣٤٥"]
)
def test_any_text_comes_back_from_its_tokens(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_tokenizer_is_trained_once_and_again_when_its_inputs_change(tmp_path, texts, monkeypatch):
    cfg = text_folder(tmp_path / "corpus", texts)
    first = load_tokenizer(cfg)
    with monkeypatch.context() as patch:
        patch.setattr("data.tokenizer.train", lambda *a: pytest.fail("trained again"))
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
    assert Tokenizer.from_str(train(iter(kept), 600).to_str()).get_vocab() == load_tokenizer(one).get_vocab()


def _train_files(cfg):
    from data.sources import open_sources

    return open_sources(cfg)[0].files


def test_too_little_text_is_said_so():
    with pytest.raises(ValueError, match="vocab_size=600"):
        train(iter(["abc"]), 600)


def foreign(added, vocab=("a", "b", "<", ">", "think")):
    model = models.WordLevel({token: i for i, token in enumerate(["[UNK]", *vocab])}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens(added)
    return tokenizer


def test_a_foreign_tokenizer_loads_from_file_and_folder_and_its_added_tokens_are_guarded(tmp_path):
    # `<think>` is an ordinary added token here, as in released tokenizers: the library's own switch does not cover it.
    added = [AddedToken("</s>", special=True), AddedToken("<think>", special=False), AddedToken("   ", special=False)]
    foreign(added).save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = load_tokenizer(DataConfig(tokenizer=str(path)))
        ids = special_ids(tokenizer)
        assert (ids.bos, ids.eos, ids.pad, ids.image) == (None, 6, 6, None)
        assert tokenizer.encode("a <think> b").tokens == ["a", "<", "think", ">", "b"]
        assert 6 not in tokenizer.encode("</s>").ids
        assert tokenizer.encode("a   b").tokens == ["a", "   ", "b"]  # white space is text and stays a token


def test_padding_and_truncation_of_a_foreign_tokenizer_are_off(tmp_path):
    tokenizer = foreign([AddedToken("</s>", special=True)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(DataConfig(tokenizer=str(tmp_path))).encode("a b a b").ids) == 4


def test_a_tokenizer_whose_merges_spell_a_control_token_is_refused(tokenizer):
    state = json.loads(tokenizer.to_str())
    for left, right in (("<", "t"), ("<t", "h"), ("<th", "i"), ("<thi", "n"), ("<thin", "k"), ("<think", ">")):
        state["model"]["merges"].insert(0, [left, right])
        state["model"]["vocab"].setdefault(
            left + right, 7 if left + right == "<think>" else len(state["model"]["vocab"])
        )
    state["model"]["merges"].sort(key=lambda merge: not merge[0].startswith("<t") and merge != ["<", "t"])
    state["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    with pytest.raises(DataError, match="spells <think>"):
        _guarded(Tokenizer.from_str(json.dumps(state)), "merged.json")


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "missing file"), ("{}", "no tokenizer"), ("no json", "no tokenizer")]
)
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match="tokenizer.json") as caught:
        load_tokenizer(DataConfig(tokenizer=str(tmp_path)))
    assert caught.value.reason == reason and "\n" not in str(caught.value)


def test_a_tokenizer_without_an_end_of_text_token_is_refused():
    with pytest.raises(ValueError, match="no end-of-text token"):
        special_ids(foreign([]))


def test_bytes_per_token_add_up_to_the_text(tokenizer):
    for text in ("plain", "é東🙂" * 3, "mixed é and 🙂\n\n end  ", ""):
        encoding = tokenizer.encode(text, add_special_tokens=False)
        counts = bytes_per_token(text, encoding.offsets)
        assert sum(counts) == len(text.encode()) and len(counts) == len(encoding.ids)
    ascii_text = "def f(x):\n    return x"
    encoding = tokenizer.encode(ascii_text, add_special_tokens=False)
    assert bytes_per_token(ascii_text, encoding.offsets) == [len(token) for token in encoding.tokens]


def test_bytes_are_those_of_the_source_when_a_normalizer_changes_the_text():
    tokenizer = foreign([])
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    text = "a ｂ a"  # a full-width b: three bytes in the source, one after normalisation
    assert unicodedata.normalize("NFKC", text) == "a b a"
    assert bytes_per_token(text, tokenizer.encode(text).offsets) == [1, 4, 2]
    tokenizer.add_special_tokens(["</s>"])
    encoder = Encoder(tokenizer, 8, None, count_bytes=True)
    encoded = next(encoder.encode([Document((text + "  ",), "file", 0)], Policy("stop")))
    assert encoded.byte_counts.tolist() == [1, 4, 2, 2]  # what the normaliser dropped at the end counts to EOS
