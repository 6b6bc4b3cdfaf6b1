"""docs/trainer-options.md lists every option of `TrainingArguments` and of TRL's `SFTConfig`, `DPOConfig` and
`GRPOConfig`: a new one must be judged first.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from transformers import Trainer, TrainingArguments

from model.huggingface import DeepseekV41Config, DeepseekV41ForCausalLM
from tests.model.tiny import tiny_model, tokens

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "trainer-options.md").read_text(encoding="utf-8")
KINDS = ("honoured", "irrelevant", "refused")


def listed(title: str) -> dict[str, str]:
    """field -> what it is, of the table under a title."""
    section = PAGE.partition(f"## {title}")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", section, re.MULTILINE))


def test_every_training_argument_is_listed() -> None:
    found = listed("TrainingArguments")
    assert set(found) == {field.name for field in dataclasses.fields(TrainingArguments)}
    assert set(found.values()) == set(KINDS)


@pytest.mark.parametrize("name", ["SFTConfig", "DPOConfig", "GRPOConfig"])
def test_every_option_of_trl_is_listed(name: str) -> None:
    trl = pytest.importorskip("trl")
    own = {field.name for field in dataclasses.fields(getattr(trl, name))}
    found = listed(f"{name}, beyond these")
    assert set(found) == own - {field.name for field in dataclasses.fields(TrainingArguments)}
    assert set(found.values()) <= set(KINDS)


class Rows:
    ids = tokens(4, 16)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict:
        return dict(input_ids=self.ids[row], labels=self.ids[row])


def train(folder: Path, **options) -> Trainer:
    core = tiny_model()
    model = DeepseekV41ForCausalLM(DeepseekV41Config(**core.config.to_dict()), core)
    fixed = dict(output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", max_steps=1)
    trainer = Trainer(model, TrainingArguments(**fixed, **options), train_dataset=Rows())
    trainer.train()
    return trainer


@pytest.mark.parametrize("options", [{"neftune_noise_alpha": 5.0}, {"use_liger_kernel": True}])
def test_what_is_refused_ends_with_an_error(options, tmp_path: Path) -> None:
    assert all(listed("TrainingArguments")[name] == "refused" for name in options)
    with pytest.raises((ValueError, ImportError)):
        train(tmp_path, **options)


def test_deepspeed_is_refused_by_the_first_step(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "model.huggingface.modeling.deepspeed.deepspeed_config", lambda: {"zero_optimization": {"stage": 1}}
    )
    with pytest.raises(ValueError, match="needs whole parameters and their own optimizer"):
        train(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        {"use_cache": True},
        {"bf16": True},
        {"remove_unused_columns": False},
        {"average_tokens_across_devices": False},
        {"include_num_input_tokens_seen": "all"},
        {"optim": "adafactor"},
        {"label_smoothing_factor": 0.1},
    ],
    ids=lambda options: "-".join(options),
)
def test_what_is_honoured_trains(options, tmp_path: Path) -> None:
    assert all(listed("TrainingArguments")[name] == "honoured" for name in options)
    trainer = train(tmp_path, **options)
    before = tiny_model().state_dict()
    moved = [name for name, tensor in trainer.model.model.state_dict().items() if not tensor.equal(before[name])]
    assert any(".indexer." in name for name in moved) and any(name.endswith("gate.bias") for name in moved)
