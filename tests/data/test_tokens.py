import unicodedata

from tokenizers import normalizers

from data.document import Document
from data.errors import BadRecordPolicy
from data.tokens import Encoder, bytes_per_token
from tests.data.conftest import foreign


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
    encoded = next(encoder.encode([Document((text + "  ",), "file", 0)], BadRecordPolicy("stop")))
    assert encoded.byte_counts.tolist() == [1, 4, 2, 2]  # what the normaliser dropped at the end counts to EOS
