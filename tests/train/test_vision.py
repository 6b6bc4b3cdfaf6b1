"""The vision tower is frozen until the decay begins; its last norm and what carries images into the text is not."""

from __future__ import annotations

import pytest
import torch

from train import loop
from train.build import Run, build

DIGITS = (
    "experiment=study_digits",
    "model=study_vision",
    "data.source=digits",
    "data.paths=[]",
    "data.validation_paths=[]",
    "model.text_config.vocab_size=512",
    "model.text_config.n_routed_experts=4",
    "task.global_batch_rows=2",
    "optim.schedule.warmup_steps=0",
    "optim.schedule.constant_until_tokens=1000",
    "optim.schedule.decay_until_tokens=2000",
)
EARLY = ("vision.norm.", "aligner.", "image_")  # the image token vectors too


def frozen(name: str) -> bool:
    return name.startswith("vision.") and not name.startswith(EARLY)


def moved_by_a_step(run: Run, tokens: int) -> set[str]:
    """Names of what an optimizer step after so many tokens moves, of the vision part."""
    before = {name: tensor.detach().clone() for name, tensor in run.model.named_parameters()}
    loop.train_step(run, [next(iter(run.train_batches))], 0, tokens)
    return {
        name
        for name, tensor in run.model.named_parameters()
        if name.startswith(("vision.", *EARLY)) and not torch.equal(tensor, before[name])
    }


@pytest.mark.slow
@pytest.mark.parametrize("rules", ["report", "adamw"])
def test_the_tower_waits_for_the_decay(make_config, rules: str) -> None:
    run = build(make_config(*DIGITS, f"optim={rules}"))
    names = {name for name, _ in run.model.named_parameters() if name.startswith(("vision.", *EARLY))}
    tower = {name for name in names if frozen(name)}
    assert {
        "vision.patch_embed.proj.weight",
        "vision.blocks.1.attn.wqkv.weight",
        "vision.blocks.0.norm1.weight",
    } < tower
    assert {"vision.norm.weight", "aligner.w1.weight", "aligner.w2.bias"} < names - tower
    assert moved_by_a_step(run, 0) == names - tower
    assert moved_by_a_step(run, 999) == names - tower
    assert moved_by_a_step(run, 1000) == names
