import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that reaches for the network is a broken test
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import itertools  # noqa: E402
import json  # noqa: E402

import pytest  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from data import DataConfig, build_loaders, load_tokenizer  # noqa: E402
from data.errors import BadRecordPolicy  # noqa: E402
from data.files import stdlib_files  # noqa: E402
from data.sources import TextFiles  # noqa: E402
from data.tokenizer import guard, train_tokenizer  # noqa: E402

VISION = {"patch_size": 4, "downsample_ratio": 2, "min_pixels": 256, "max_image_tokens": 40, "max_wh_ratio": None}


def foreign(added, vocab=("a", "b", "<", ">", "think")):
    """A tokenizer of somebody else's: whole words of `vocab`, and tokens added to it."""
    model = models.WordLevel({token: i for i, token in enumerate(["[UNK]", *vocab])}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens(added)
    return tokenizer


@pytest.fixture(scope="session")
def texts():
    """Forty real documents of 1 to 20 kB."""
    files = [f for f in stdlib_files() if 1_000 < f.path.stat().st_size < 20_000]
    return [document.text for document, _ in itertools.islice(TextFiles(files).read(BadRecordPolicy("stop")), 40)]


@pytest.fixture(scope="session")
def tokenizer(texts):
    """A trained tokenizer of 600 entries: small, but with every property of the default one."""
    return guard(train_tokenizer(iter(texts), 600), "test")


@pytest.fixture(scope="session")
def default(tmp_path_factory):
    """Configuration, tokenizer and loaders of the default source at a row length of 1,024."""
    cfg = DataConfig(cache_dir=str(tmp_path_factory.mktemp("cache")))
    tokenizer = load_tokenizer(cfg)
    return cfg, tokenizer, *build_loaders(cfg, tokenizer, seq_len=1024, batch_rows=4)


@pytest.fixture
def policy():
    return BadRecordPolicy("stop")


@pytest.fixture
def folder(tmp_path, texts):
    """A configuration of small text files, cached in its own folder."""
    for number, text in enumerate(texts[:20]):
        (tmp_path / f"{number}.txt").write_text(text[: 300 + 100 * number], encoding="utf-8")
    return DataConfig(
        source="text",
        paths=[str(tmp_path)],
        cache_dir=str(tmp_path / ".cache"),
        validation_share=0.2,
        window_tokens=1500,
    )


@pytest.fixture
def stream(tmp_path, texts):
    """The same texts as records of two JSONL files, tokenised while they are read."""
    for part in (0, 1):
        lines = [json.dumps({"text": text[:400]}) + "\n" for text in texts[part::2]]
        (tmp_path / f"{part}.jsonl").write_text("".join(lines))
    return DataConfig(
        source="jsonl",
        paths=[str(tmp_path)],
        cache_dir=str(tmp_path / ".cache"),
        validation_share=0.2,
        window_tokens=1500,
        streaming=True,
        validation_rows=4,
    )
