"""TRL's trainers with the class, by object and by path: they train, indexers learn, and router biases follow the load.

Needs `trl` (the extra `trl`; a folder with it in PYTHONPATH will do).
"""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import model.huggingface  # noqa: F401  registers the class
from data import DataConfig
from data.tokenizer import train_tokenizer
from data.tokenizer_files import tokenizer_files
from model import ModelConfig, build_model, load_pretrained, save_pretrained
from model.huggingface import DeepseekV41ForCausalLM
from train.config.dpo import DpoConfig
from train.dpo.objective import PreferenceObjective
from train.rl.reference import log_probs_under

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 600,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "compress_ratios": [0, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "index_n_heads": 16,
    "index_head_dim": 12,
    "index_topk": 5,
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "engram_layer_ids": [],
    "engram_num_embeddings": [],
    "num_nextn_predict_layers": 0,
    "dspark_target_layer_ids": [],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint folder with its tokenizer and chat template."""
    path = tmp_path_factory.mktemp("base") / "model"
    config = ModelConfig.from_dict({"text_config": TEXT, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})
    save_pretrained(build_model(config, seed=0), path)
    text = Path(inspect.getfile(json)).read_text() * 2 + Path(inspect.getfile(inspect)).read_text()
    tokenizer = train_tokenizer(iter([text]), 600)
    for name, content in tokenizer_files(DataConfig(), tokenizer).items():
        (path / name).write_text(content, encoding="utf-8")
    return path


def arguments(kind: type, folder: Path, **options):
    return kind(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        max_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=False,
        **{"per_device_train_batch_size": 2, **options},
    )


def turns(count: int) -> list[dict]:
    return [
        [{"role": "user", "content": f"What is {n} plus 1?"}, {"role": "assistant", "content": f"It is {n + 1}."}]
        for n in range(count)
    ]


def check_trained(trainer, folder: Path) -> None:
    """Every part has moved: indexers too, and the router biases."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and all(map(torch.isfinite, torch.tensor(losses)))
    before = load_pretrained(folder).state_dict()
    core = trainer.accelerator.unwrap_model(trainer.model).model
    assert isinstance(trainer.accelerator.unwrap_model(trainer.model), DeepseekV41ForCausalLM)
    moved = {name for name, tensor in core.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {name for name in before if name.endswith("gate.bias")} <= moved
    for part in (".indexer.", "experts", "wq_b", "head", "embed"):
        assert any(part in name for name in moved), part


@pytest.mark.parametrize("options", [{}, {"packing": True, "max_length": 64}, {"assistant_only_loss": True}])
def test_sft(folder, tmp_path, options) -> None:
    data = datasets.Dataset.from_list([{"messages": messages} for messages in turns(16)])
    trainer = trl.SFTTrainer(str(folder), args=arguments(trl.SFTConfig, tmp_path, **options), train_dataset=data)
    check_trained(trainer, folder)


def test_sft_has_the_losses_of_python_m_train(folder, tmp_path) -> None:
    """The same batch: TRL reports the language-model loss that `model.losses` gives, within 1e-5."""
    data = datasets.Dataset.from_list([{"messages": messages} for messages in turns(2)])
    args = arguments(trl.SFTConfig, tmp_path, assistant_only_loss=True, shuffle_dataset=False)
    trainer = trl.SFTTrainer(str(folder), args=args, train_dataset=data)
    batch = next(iter(trainer.get_train_dataloader()))
    core = load_pretrained(folder)
    labels, inputs = batch["labels"], {key: batch[key] for key in ("input_ids", "attention_mask")}
    losses = core.losses(**inputs, labels=labels, denominators=core.loss_denominators(**inputs, labels=labels))
    trainer.train()
    assert abs(trainer.state.log_history[0]["loss"] - float(losses.lm_sum / losses.supervised)) < 1e-5


def test_dpo(folder, tmp_path) -> None:
    rows = [
        {"prompt": [question], "chosen": [answer], "rejected": [{"role": "assistant", "content": "No."}]}
        for question, answer in turns(8)
    ]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    trainer = trl.DPOTrainer(
        model,
        args=arguments(trl.DPOConfig, tmp_path),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )
    check_trained(trainer, folder)


def test_dpo_has_the_loss_of_task_dpo(folder, tmp_path) -> None:
    """The same pairs under the same policy and reference: TRL's loss, rewards, margins and accuracy, within 1e-5."""
    rows = [
        {"prompt": [question], "chosen": [answer], "rejected": [{"role": "assistant", "content": f"No, {n}."}]}
        for n, (question, answer) in enumerate(turns(2))
    ]
    policy, reference = transformers.AutoModelForCausalLM.from_pretrained(folder), load_pretrained(folder)
    with torch.no_grad():
        for number, parameter in enumerate(policy.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(0.02 * noise)
    own = copy.deepcopy(policy.model)
    trainer = trl.DPOTrainer(
        policy,
        ref_model=transformers.AutoModelForCausalLM.from_pretrained(folder),
        args=arguments(trl.DPOConfig, tmp_path, beta=0.1),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.train()
    log = trainer.state.log_history[0]
    mask = batch["attention_mask"].bool()
    labels = batch["input_ids"].masked_fill(~batch["completion_mask"].bool(), -100)
    inputs = {"input_ids": batch["input_ids"], "labels": labels, "attention_mask": mask}
    rows, length = labels.shape  # TRL's batch: all chosen answers, then all rejected ones
    answer = (2 * torch.arange(rows // 2).repeat(2) + torch.arange(rows) // (rows // 2))[:, None].expand(rows, length)
    objective = PreferenceObjective(DpoConfig(0.1, 0.0), answer, log_probs_under(reference, inputs), rows // 2)
    own.losses(**inputs, denominators=own.loss_denominators(**inputs), objective=objective)
    found = {name: float(value) / (rows // 2) for name, value in objective.sums.items()}
    assert abs(found["margin"]) > 1e-3
    for ours, theirs in (("margin", "margins"), ("reward_chosen", "chosen"), ("reward_rejected", "rejected")):
        assert log[f"rewards/{theirs}"] == pytest.approx(found[ours], abs=1e-5), ours
    assert log["loss"] == pytest.approx(found["loss"], abs=1e-5)
    assert log["rewards/accuracies"] == found["accuracy"]


def test_grpo(folder, tmp_path) -> None:
    rows = [{"prompt": [question]} for question, _ in turns(8)]
    args = arguments(
        trl.GRPOConfig, tmp_path, per_device_train_batch_size=4, num_generations=4, max_completion_length=8, beta=0.0
    )
    trainer = trl.GRPOTrainer(
        str(folder),
        reward_funcs=lambda completions, **_: [float(hash(str(c)) % 7) for c in completions],
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
    )
    check_trained(trainer, folder)


def test_a_trained_model_is_exported_in_the_released_layout(folder, tmp_path) -> None:
    data = datasets.Dataset.from_list([{"messages": messages} for messages in turns(4)])
    trainer = trl.SFTTrainer(str(folder), args=arguments(trl.SFTConfig, tmp_path / "run"), train_dataset=data)
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    trained = trainer.accelerator.unwrap_model(trainer.model).model.state_dict()
    again = load_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in trained.items())
    assert "layers.1.attn.indexer.wq_b.weight" in load_file(tmp_path / "out" / "model.safetensors")
    assert (tmp_path / "out" / "chat_template.jinja").is_file()
