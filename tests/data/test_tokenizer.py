import json

import pytest
from tokenizers import AddedToken, Tokenizer

from data import DataConfig, DataError, load_tokenizer, special_ids
from data.tokenizer import CONTROL_TOKENS, NOISE, guard, train_tokenizer
from tests.data.conftest import foreign


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


def test_too_little_text_is_said_so():
    with pytest.raises(ValueError, match="vocab_size=600"):
        train_tokenizer(iter(["abc"]), 600)


def test_a_foreign_tokenizer_loads_from_file_and_folder_and_its_added_tokens_areguard(tmp_path):
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
        guard(Tokenizer.from_str(json.dumps(state)), "merged.json")


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "missing file"), ("{}", "not a tokenizer"), ("no json", "not a tokenizer")]
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
