"""Under transformers' `Trainer`: the report's optimizer and the added losses are those of `python -m train`."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from model.huggingface import DeepseekV41Config, DeepseekV41ForCausalLM
from model.huggingface.counts import count_whole_steps
from optim import AdamWSettings, Settings
from tests.model.tiny import no_rounding  # noqa: F401
from train import loop
from train.build import Run, build
from train.report_optimizer import ReportOptimizer

STEPS, ROWS, LR = 4, 4, 1e-3
METHODS = (
    "optim=report",
    f"optim.schedule.peak={LR}",
    f"optim.schedule.floor={LR}",
    "optim.schedule.warmup_steps=0",
    "optim.clip=1.0",
    "optim.settings.adamw.eps=1.0e-8",  # else AdamW makes whole steps of gradients that are zero but for rounding
    "loss.indexer_kl=100.0",  # so that the added losses show
    "loss.router_balance=1.0",
    "task.micro_batch=1",
    f"task.global_batch_rows={ROWS}",
)
# The streams that enter the first block are equal, so mixing them has no gradient but rounding.
WITHOUT_GRADIENT = ("layers.0.hc_attn.base", "layers.0.hc_attn.scale")


class Rows(Dataset):
    def __init__(self, rows: list[dict[str, torch.Tensor]]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return self.rows[number]


def uneven(run: Run) -> list[dict[str, torch.Tensor]]:
    """Rows of the run's data with very unequal numbers of tokens and of targets."""
    rows = []
    for number, batch in enumerate(itertools.islice(iter(run.train_batches), STEPS * ROWS)):
        ids, labels = batch["input_ids"][0], batch["labels"][0].clone()
        length = (60, 9, 33, 17)[number % 4]
        mask = torch.arange(len(ids)) < length
        labels[~mask] = -100
        labels[: (number * 7) % length] = -100
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": mask.long()})
    return rows


def trainer_of(
    run: Run, rows: list[dict], folder: Path, kind=Trainer, arguments_kind=TrainingArguments, data=Rows, **options
) -> Trainer:
    core = run.model
    model = DeepseekV41ForCausalLM(DeepseekV41Config(**core.config.to_dict()), core)
    arguments = arguments_kind(
        output_dir=str(folder),
        max_grad_norm=1.0,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=ROWS,
        train_sampling_strategy="sequential",
        **{"max_steps": STEPS, "save_strategy": "no", "lr_scheduler_type": "constant", **options},
    )
    optimizer = (ReportOptimizer, {"lr": LR, "settings": Settings(adamw=AdamWSettings(eps=1e-8))})
    return kind(model, arguments, train_dataset=data(rows), optimizer_cls_and_kwargs=optimizer)


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def settings(make_config):
    return make_config(*METHODS)


def test_steps_are_those_of_the_command(settings, tmp_path: Path, no_rounding) -> None:  # noqa: F811
    """Losses with all that is added, weights and router biases after micro-batches of unequal counts."""
    ours, theirs = build(settings), build(settings)
    rows = uneven(ours)
    expected = []
    for step in range(STEPS):
        batches = [{k: v[None] for k, v in row.items()} for row in rows[step * ROWS : (step + 1) * ROWS]]
        expected.append(float(loop.train_step(ours, batches, step, 0)["total"]))
    trainer = trainer_of(theirs, rows, tmp_path)
    count_whole_steps(trainer)
    trainer.train()
    found = losses_of(trainer)
    assert len(found) == STEPS
    for one, two in zip(found, expected, strict=True):
        assert abs(one - two) < 1e-5, (found, expected)
    initial = build(settings).model.state_dict()
    other = theirs.model.state_dict()
    for name, tensor in ours.model.state_dict().items():
        moved = (tensor - initial[name]).abs().max()
        if name not in WITHOUT_GRADIENT:
            assert (other[name] - tensor).abs().max() <= max(0.05 * moved, 1e-6), name
    methods = {group["method"] for group in trainer.optimizer.optimizer.param_groups}
    assert methods == {"muon", "sinkhorn", "adamw"}


@pytest.mark.slow
def test_steps_of_sft_trainer_are_those_of_the_command(make_config, tmp_path: Path, no_rounding) -> None:  # noqa: F811
    """TRL reports the loss of the language model alone; what is added shows in the steps that follow. Under TRL,
    which does not show the labels to the model, indexers learn from all tokens, so they do not train here.
    """
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    settings = make_config(*METHODS, "loss.indexer_kl=0.0")
    ours, theirs = build(settings), build(settings)
    rows, expected = uneven(ours), []
    for step in range(STEPS):
        batches = [{k: v[None] for k, v in row.items()} for row in rows[step * ROWS : (step + 1) * ROWS]]
        numbers = loop.train_step(ours, batches, step, 0)
        expected.append(float(numbers["lm_sum"]) / int(numbers["supervised"]))
    records = [
        {"input_ids": row["input_ids"][real].tolist(), "completion_mask": (row["labels"][real] >= 0).long().tolist()}
        for row in rows
        for real in [row["attention_mask"].bool()]
    ]
    names = {"pad_token": "<｜▁pad▁｜>", "eos_token": "<｜end▁of▁sentence｜>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=theirs.tokenizer, **names)
    kinds = (partial(trl.SFTTrainer, processing_class=tokenizer), trl.SFTConfig, datasets.Dataset.from_list)
    trainer = trainer_of(theirs, records, tmp_path, *kinds, completion_only_loss=True, bf16=False)
    count_whole_steps(trainer)
    trainer.train()
    assert losses_of(trainer) == pytest.approx(expected, abs=1e-5)


def test_without_whole_counts_unequal_micro_batches_are_off(settings, tmp_path: Path, no_rounding) -> None:  # noqa: F811
    """What `count_whole_steps` is for: the first loss differs, by the added losses alone."""
    run = build(settings)
    rows = uneven(run)
    batches = [{k: v[None] for k, v in row.items()} for row in rows[:ROWS]]
    counts = sum(run.model.loss_denominators(**batch).to_tensor() for batch in batches)
    denominators = type(run.model.loss_denominators(**batches[0])).from_tensor(counts)
    with torch.no_grad():
        whole = sum(run.model.losses(**batch, denominators=denominators).total for batch in batches)
    found = []
    for exact in (True, False):
        trainer = trainer_of(build(settings), rows, tmp_path, max_steps=1)
        if exact:
            count_whole_steps(trainer)
        trainer.train()
        found.append(losses_of(trainer)[0])
    assert abs(found[0] - whole) < 1e-5
    assert abs(found[1] - whole) > 1e-4


@pytest.mark.slow
def test_a_run_continues_with_the_rates_of_its_schedule(settings, tmp_path: Path) -> None:
    rows = uneven(build(settings))
    options = dict(lr_scheduler_type="linear", save_strategy="steps", save_steps=2)
    whole = trainer_of(build(settings), rows, tmp_path / "whole", **options)
    whole.train()
    rest = trainer_of(build(settings), rows, tmp_path / "rest", **options)
    rest.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for one, two in zip(whole.optimizer.param_groups, rest.optimizer.param_groups, strict=True):
        assert one["lr"] == two["lr"] and one["initial_lr"] == two["initial_lr"]
    assert losses_of(rest)[-2:] == pytest.approx(losses_of(whole)[-2:], abs=1e-5)
    factors = {group["initial_lr"] / LR for group in whole.optimizer.param_groups}
    assert factors == {1.0, 5.0}, "the Engram tables have their own factor"


def test_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no DeepseekV41ForCausalLM"):
        ReportOptimizer()(torch.nn.Linear(2, 2), lr=1.0)
