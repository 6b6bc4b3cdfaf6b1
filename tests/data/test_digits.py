import sys

import pytest
import torch

from data import DataConfig, DataError, build_loaders, special_ids
from data.digits import NAMES, DigitSource
from data.errors import BadRecordPolicy
from data.images import load_picture

from .conftest import VISION


def digits(split):
    return [document for document, _ in DigitSource(split, 0.1).read(BadRecordPolicy("stop"))]


def test_digits_are_split_without_overlap_and_keep_their_names():
    train, held_out = digits("train"), digits("validation")
    assert len(train) + len(held_out) == 1797 and 120 < len(held_out) < 240
    assert not {d.parts[0].key for d in train} & {d.parts[0].key for d in held_out}
    assert {d.text for d in held_out} == set(NAMES)
    from sklearn.datasets import load_digits

    data = load_digits()
    for document in held_out[:20]:
        assert document.text == NAMES[data.target[document.line - 1]]
        image = load_picture(document.parts[0])
        assert (
            image.size == (8, 8) and image.getextrema()[0][1] == 255 * int(data.images[document.line - 1].max()) // 16
        )


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="scikit-learn is not installed: install scikit-learn"):
        digits("train")


@pytest.fixture(scope="module")
def loaders(tokenizer):
    cfg = DataConfig(source="digits", validation_share=0.1)
    return build_loaders(cfg, tokenizer, seq_len=64, batch_rows=4, seed=3, vision=VISION)


def test_batches_supervise_the_names_and_see_the_images(loaders, tokenizer):
    train, valid = loaders
    special = special_ids(tokenizer)
    for batch in (next(train), next(iter(valid))):
        documents = int((batch["seq_lens"] > 0).sum())
        assert batch["image_grid_hws"].tolist() == [[4, 4]] * documents
        assert batch["pixel_values"].shape == (16 * documents, 3, 4, 4)
        assert torch.equal(batch["vision_token_types"] >= 0, batch["input_ids"] == special.image)
        targets = batch["labels"][batch["labels"] != -100].tolist()
        words = tokenizer.decode(targets, skip_special_tokens=False).split(tokenizer.id_to_token(special.eos))
        assert len(words) == documents + 1 and set(words[:-1]) <= set(NAMES)


def test_the_position_resumes_exactly(loaders):
    train, _ = loaders
    state = train.state_dict()
    expected = [next(train) for _ in range(3)]
    train.load_state_dict(state)
    for batch in expected:
        again = next(train)
        assert all(torch.equal(again[name], batch[name]) for name in batch)
