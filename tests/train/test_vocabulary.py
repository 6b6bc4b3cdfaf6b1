"""A vocabulary that is larger than its tokenizer, as released models have it."""

from __future__ import annotations

import pytest

from model import load_pretrained
from train.tasks import pretrain


@pytest.mark.slow
def test_a_finished_run_with_a_padded_vocabulary_is_exported(make_config) -> None:
    config = make_config(
        "model.text_config.vocab_size=1024",
        "data.vocab_size=512",
        "task.tokens=300",
        "task.sample_tokens=200",  # hardly trained: it draws ids that the tokenizer does not have
        "task.sample_temperature=5.0",
        "checkpoint.export=plain",
    )
    pretrain.run(config)
    assert load_pretrained(config.run_dir / "export").config.text.vocab_size == 1024
