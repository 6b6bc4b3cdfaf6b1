"""Mixtures: shares of tokens, the order on any number of processes, exact resume, refusals."""

import json
from collections import Counter

import pytest
import torch

from data import DataConfig, DataError, build_loaders, load_tokenizer
from data.check import check_data
from tests.data.conftest import VISION


@pytest.fixture
def mixture(tmp_path):
    """Texts, conversations and a stream, all different."""

    def lines(name, records):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        return [str(tmp_path / name)]

    texts = lines("texts.jsonl", ({"text": f"a text of number {n} " + "word " * (n % 9)} for n in range(150)))
    chats = lines("chats.jsonl", ({"prompt": f"Ask {n}?", "completion": f"Answer {n}."} for n in range(60)))
    stream = lines("stream.jsonl", ({"text": f"streamed {n} again and again"} for n in range(90)))
    return DataConfig(
        cache_dir=str(tmp_path / "cache"),
        validation_share=0.2,
        window_tokens=600,
        mixture={
            "text": {"weight": 5, "source": "jsonl", "paths": texts},
            "chat": {"weight": 1.0, "source": "chat", "field": "messages", "paths": chats},
            "stream": {"weight": 2, "source": "jsonl", "paths": stream, "streaming": True, "validation_rows": 2},
        },
    )


def loaders(mixture, tokenizer, **options):
    return build_loaders(mixture, tokenizer, seq_len=64, **{"batch_rows": 2, "seed": 3, **options})


def test_tokens_follow_the_weights(mixture, tokenizer):
    train, valid = loaders(mixture, tokenizer)
    supervised = 0
    for _ in range(200):
        supervised += int((next(train)["labels"] >= 0).sum())
    progress = train.sources()
    total = sum(source["tokens"] for source in progress.values())
    for name, weight in {"text": 5, "chat": 1, "stream": 2}.items():
        assert abs(progress[name]["tokens"] - total * weight / 8) <= 64, "no source is further away than a row"
    assert supervised < total and progress["text"]["epochs"] > 1 and progress["stream"]["epochs"] >= 1
    assert "read as prompt_completion" in str(train.stats) and str(train.stats).startswith("text: documents")
    seen = Counter()
    for batch in valid:
        seen[valid.current] += len(batch["input_ids"])
    assert set(seen) == {"text", "chat", "stream"} and len(valid) == sum(map(len, valid.parts.values()))
    tokens, text = (sum(getattr(p, key) for p in valid.parts.values()) for key in ("target_tokens", "target_bytes"))
    assert valid.bytes_per_token == text / tokens


def test_a_mixture_continues_exactly_and_is_the_same_on_several_processes(mixture, tokenizer):
    first, _ = loaders(mixture, tokenizer)
    states, batches = [], []
    for _ in range(60):
        states.append(json.loads(json.dumps(first.state_dict())))
        batches.append(next(first))
    for start in (0, 1, 7, 30, 59):
        again, _ = loaders(mixture, tokenizer)
        again.load_state_dict(states[start])
        for batch in batches[start : start + 10]:
            found = next(again)
            assert all(torch.equal(batch[key], found[key]) for key in batch)
    ranks = [loaders(mixture, tokenizer, row_group=rank, row_groups=2)[0] for rank in (0, 1)]
    for batch in batches[:20]:
        parts = [next(rank)["input_ids"] for rank in ranks]
        assert torch.equal(torch.cat(parts), batch["input_ids"])
    alone, _ = loaders(mixture, tokenizer)
    alone.load_state_dict(states[20])
    assert ranks[0].sources(sum(rank.counts() for rank in ranks)) == alone.sources(alone.counts())
    assert ranks[0].sources() != alone.sources() == alone.sources(alone.counts())


def test_a_source_alone_gives_its_rows_in_the_same_order(mixture, tokenizer):
    alone = mixture.parts()["text"]
    single, _ = loaders(alone, tokenizer, batch_rows=1)
    mixture.mixture = {"text": mixture.mixture["text"]}
    mixed, _ = loaders(mixture, tokenizer, batch_rows=1)
    assert all(torch.equal(next(single)["input_ids"], next(mixed)["input_ids"]) for _ in range(30))


def test_the_weight_of_a_saved_mixture_must_stay(mixture, tokenizer):
    first, _ = loaders(mixture, tokenizer)
    mixture.mixture["chat"]["weight"] = 3
    second, _ = loaders(mixture, tokenizer)
    with pytest.raises(ValueError, match="data position: chat.weight was 1.0 when saved and is 3.0 now"):
        second.load_state_dict(first.state_dict())
    del mixture.mixture["stream"]
    third, _ = loaders(mixture, tokenizer)
    with pytest.raises(ValueError, match="stream.data was .* and is None now"):
        third.load_state_dict(first.state_dict())


@pytest.mark.slow
def test_images_and_text_seven_to_one(tokenizer, tmp_path):
    """The report's share, with the sources exchanged: the batch of a text has no image."""
    sources = {"text": {"weight": 7, "source": "stdlib"}, "images": {"weight": 1, "source": "digits"}}
    pytest.importorskip("sklearn")
    cfg = DataConfig(cache_dir=str(tmp_path / "cache"), mixture=sources)
    train, _ = build_loaders(cfg, tokenizer, seq_len=128, batch_rows=4, vision=VISION)
    images = sum(len(next(train)["image_grid_hws"]) for _ in range(20))
    progress = train.sources()
    assert images > 0 and 5.5 < progress["text"]["tokens"] / progress["images"]["tokens"] < 8.5


@pytest.mark.slow
def test_a_tokenizer_is_trained_on_all_sources(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "qxqx " * 500 + str(n)}) + "\n" for n in range(200)))
    ours = {"weight": 1, "source": "jsonl", "paths": [str(tmp_path / "a.jsonl")]}
    sources = {"library": {"weight": 1, "source": "stdlib"}, "ours": ours}
    cfg = DataConfig(cache_dir=str(tmp_path / "cache"), vocab_size=512, mixture=sources)
    vocabulary = load_tokenizer(cfg).get_vocab()
    assert "qx" in vocabulary and "self" in vocabulary


def test_a_mixture_is_checked_whole(mixture, tokenizer):
    reports = check_data(mixture, tokenizer, 64)
    assert list(reports) == ["text", "text, held out", "chat", "chat, held out", "stream", "stream, held out"]
    assert reports["chat"].records + reports["chat, held out"].records == 60


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"source": "stdlib"}, "data.mixture.bad.weight=None: must be a positive number"),
        ({"weight": True}, "data.mixture.bad.weight=True: must be a positive number"),
        ({"weight": 0}, "data.mixture.bad.weight=0: must be a positive number"),
        (
            {"weight": 1, "path": ["x"]},
            "data.mixture.bad.path=.*no such key of one source; known are weight, source, paths",
        ),
        ({"weight": 1, "tokenizer": "x"}, "data.mixture.bad.tokenizer='x': no such key of one source"),
        ({"weight": 1, "paths": "x"}, "data.mixture.bad.paths='x': must be a list"),
        ({"weight": 1, "source": "web"}, "data.mixture.bad.source='web': must be one of"),
        ({"weight": 1, "source": "jsonl"}, r"data.mixture.bad.paths=\[\]: must name at least one file"),
        ("jsonl", "data.mixture.bad='jsonl': must be a name"),
    ],
)
def test_what_is_wrong_with_a_source_is_named(entry, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        build_loaders(DataConfig(mixture={"bad": entry}), tokenizer, seq_len=64, batch_rows=1)


def test_a_source_without_documents_is_named(mixture, tokenizer, tmp_path):
    mixture.mixture["text"]["paths"] = [str(tmp_path / "absent.jsonl")]
    with pytest.raises(DataError, match="absent.jsonl: missing file"):
        loaders(mixture, tokenizer)
