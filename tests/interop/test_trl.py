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
from model.huggingface.counts import count_whole_steps
from train.config.dpo import DpoConfig
from train.config.rl import PolicyLoss
from train.dpo.objective import PreferenceObjective
from train.rl.loss import PolicyObjective
from train.rl.reference import log_probs_under

pytestmark = pytest.mark.slow
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
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=False,
        **{"per_device_train_batch_size": 2, "max_steps": 2, "learning_rate": 1e-2, **options},
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
        reward_funcs=lambda completions, **_: [float(len(str(c)) % 7) for c in completions],
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
    )
    check_trained(trainer, folder)


def watched(trainer, formula) -> list[tuple[float, float]]:
    """Train; returns for every forward pass what the trainer reports and what the formula gives for the same batch and
    weights. The formula is computed from plain passes, row by row.
    """
    found = []
    reported = trainer.compute_loss

    def compared(model, inputs, *args, **options):
        core = trainer.accelerator.unwrap_model(model).model
        given = {key: value.clone() if torch.is_tensor(value) else value for key, value in inputs.items()}
        with torch.no_grad():
            expected = float(formula(core, given))
        loss = reported(model, inputs, *args, **options)
        found.append((float(loss.detach()), expected))
        return loss

    trainer.compute_loss = compared
    trainer.train()
    return found


def log_probs(core, ids, mask) -> torch.Tensor:
    """Of each token but the first, [B, S - 1]; 0 where the token is padding (which may stand on either side)."""
    found = torch.zeros(ids.shape[0], ids.shape[1] - 1)
    for row, (tokens, real) in enumerate(zip(ids, mask.bool(), strict=True)):
        logits = core(input_ids=tokens[real][None]).logits[0, :-1].log_softmax(-1)
        at = real.nonzero().flatten()[1:] - 1
        found[row, at] = logits.gather(-1, tokens[real][1:, None])[:, 0]
    return found


def test_dpo_has_the_loss_of_its_formula(folder, tmp_path) -> None:
    """-log sigmoid(beta (log-ratio of the chosen answer - that of the rejected one)), the ratios to the first model."""
    rows = [
        {"prompt": [question], "chosen": [answer], "rejected": [{"role": "assistant", "content": "No, never at all."}]}
        for question, answer in turns(8)
    ]
    reference = load_pretrained(folder)
    trainer = trl.DPOTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(folder),
        args=arguments(trl.DPOConfig, tmp_path, beta=0.5, max_steps=3),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )

    def formula(core, batch) -> torch.Tensor:
        ids, mask, answer = batch["input_ids"], batch["attention_mask"], batch["completion_mask"][:, 1:]
        sums = [(log_probs(m, ids, mask) * answer).sum(1) for m in (core, reference)]
        chosen, rejected = (sums[0] - sums[1]).chunk(2)
        return -torch.nn.functional.logsigmoid(0.5 * (chosen - rejected)).mean()

    found = watched(trainer, formula)
    assert len(found) == 3 and abs(found[0][0] - 0.6931) < 1e-4
    assert abs(found[-1][0] - 0.6931) > 1e-3, "the model has moved"
    for ours, direct in found:
        assert abs(ours - direct) < 1e-3, found  # sums of dozens of log-probabilities; the KV is rounded


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_grpo_has_the_loss_of_its_formula(folder, tmp_path, loss: str) -> None:
    """The clipped ratio to the policy that wrote the answers, times the advantage: per answer, then over answers; or
    over all tokens, which is the objective of task=rl. The second of two steps on the same answers is off the policy.
    """
    rows = [{"prompt": [question]} for question, _ in turns(8)]
    options = dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=8, beta=0.0)
    args = arguments(trl.GRPOConfig, tmp_path, **options, num_iterations=2, loss_type=loss, max_steps=4)
    trainer = trl.GRPOTrainer(
        str(folder),
        reward_funcs=lambda completions, **_: [float(len(str(c)) % 5) for c in completions],
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
    )

    def formula(core, batch) -> torch.Tensor:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        answer, width = batch["completion_mask"], batch["completion_ids"].shape[1]
        now = log_probs(core, ids, mask)[:, -width:]
        ratio = (now - batch["old_per_token_logps"]).exp()
        advantage = batch["advantages"][:, None]
        each = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * answer
        return (each.sum(1) / answer.sum(1)).mean()

    def objective_of_task_rl(core, batch) -> torch.Tensor:
        """Which is the sum over all tokens of a step, divided by their number, as "dapo" has it."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        answer = torch.nn.functional.pad(batch["completion_mask"], (batch["prompt_ids"].shape[1], 0)).bool()
        old = torch.nn.functional.pad(batch["old_per_token_logps"], (batch["prompt_ids"].shape[1], 0))
        advantage, response = batch["advantages"][:, None].expand(ids.shape), torch.arange(len(ids))[:, None]
        objective = PolicyObjective(
            PolicyLoss(0.2, 0.2, None, 0.0), 1.0, old, advantage.float(), response.expand(ids.shape)
        )
        inputs = dict(input_ids=ids, labels=ids.masked_fill(~answer, -100), attention_mask=mask.bool())
        losses = core.losses(**inputs, denominators=core.loss_denominators(**inputs), objective=objective)
        return losses.lm_sum / losses.supervised

    found = watched(trainer, formula if loss == "grpo" else objective_of_task_rl)
    assert len(found) == 4 and any(abs(ours) > 1e-3 for ours, _ in found)
    for ours, direct in found:
        assert abs(ours - direct) < (1e-3 if loss == "grpo" else 1e-5), found


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_whole_counts_under_trl(folder, tmp_path, kind: str) -> None:
    """The gradient of the added losses over accumulated, unequal micro-batches is that of one batch of all of them."""
    found = {}
    data = [
        {"prompt": [question], "chosen": [answer], "rejected": [{"role": "assistant", "content": "No. " * (1 + 9 * n)}]}
        for n, (question, answer) in enumerate(turns(4))
    ]
    texts = [{"messages": messages} for messages in turns(3)] + [
        {"messages": [turns(1)[0][0], {"role": "assistant", "content": "It is. " * 30}]}
    ]
    questions = [{"prompt": [{"role": "user", "content": "Why? " * (1 + 9 * n)}]} for n in range(4)]
    for name, size in (("whole", 4), ("parts", 1)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        for part, parameter in model.named_parameters():  # what the losses that are added alone train
            parameter.requires_grad_(".indexer." in part)
        options = dict(
            max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=4 // size, optim="sgd"
        )
        more = dict(max_grad_norm=0.0, learning_rate=1.0, seed=0, lr_scheduler_type="constant", **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        if kind == "grpo":
            args = arguments(trl.GRPOConfig, tmp_path, **more, num_generations=2, max_completion_length=8, beta=0.0)
            trainer = trl.GRPOTrainer(
                model,
                reward_funcs=lambda completions, **_: [1.0] * len(completions),
                args=args,
                train_dataset=datasets.Dataset.from_list(questions),
                processing_class=tokenizer,
            )
        elif kind == "dpo":
            args = arguments(trl.DPOConfig, tmp_path, **more)
            trainer = trl.DPOTrainer(
                model, args=args, train_dataset=datasets.Dataset.from_list(data), processing_class=tokenizer
            )
        else:
            args = arguments(trl.SFTConfig, tmp_path, **more)
            trainer = trl.SFTTrainer(
                model, args=args, train_dataset=datasets.Dataset.from_list(texts), processing_class=tokenizer
            )
        count_whole_steps(trainer)
        trainer.train()
        before = load_pretrained(folder).state_dict()
        found[name] = {n: t - before[n] for n, t in model.model.state_dict().items() if ".indexer." in n}
    for part, change in found["whole"].items():
        scale = change.abs().max()
        assert (found["parts"][part] - change).abs().max() <= 0.02 * scale + 1e-7, part
    assert max(float(change.abs().max()) for change in found["whole"].values()) > 1e-6


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


REFUSED = {
    "DPOConfig": [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha is not supported"),
        ({"router_aux_loss_coef": 0.1}, "`router_aux_loss_coef` is set to 0.1"),
    ],
    "GRPOConfig": [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha is not supported"),
        ({"router_aux_loss_coef": 0.1}, "`router_aux_loss_coef` is set to 0.1"),
        ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32 is not supported"),
        ({"use_transformers_continuous_batching": True}, "leave out use_transformers_continuous_batching"),
    ],
}
HONOURED = {
    "DPOConfig": [
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "ld_alpha": 0.5, "label_smoothing": 0.1},
        {"padding_free": True, "precompute_ref_log_probs": True, "use_weighting": True},
        {"sync_ref_model": True, "ref_model_sync_steps": 1, "f_divergence_type": "js_divergence"},
    ],
    "GRPOConfig": [
        {"beta": 0.1, "use_bias_correction_kl": True, "sync_ref_model": True, "ref_model_sync_steps": 1},
        {"loss_type": "sapo", "entropy_coef": 0.1, "top_entropy_quantile": 0.5, "pad_to_multiple_of": 8},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "activation_checkpointing": True},
        {"delta": 2.0, "off_policy_mask_threshold": 0.5, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2},
    ],
}


def trainer_with(name: str, folder: Path, tmp_path: Path, options: dict):
    """A trainer of preference pairs or of rewards with some options of its configuration."""
    if name == "DPOConfig":
        no = [{"role": "assistant", "content": "No."}]
        rows = [{"prompt": [question], "chosen": [answer], "rejected": no} for question, answer in turns(8)]
        return trl.DPOTrainer(
            transformers.AutoModelForCausalLM.from_pretrained(folder),
            args=arguments(trl.DPOConfig, tmp_path, **options),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        )
    few = dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=4, beta=0.0)
    return trl.GRPOTrainer(
        str(folder),
        reward_funcs=lambda completions, **_: [float(len(str(c)) % 7) for c in completions],
        args=arguments(trl.GRPOConfig, tmp_path, **{**few, **options}),
        train_dataset=datasets.Dataset.from_list([{"prompt": [question]} for question, _ in turns(8)]),
    )


def cases(table: dict[str, list]) -> list:
    return [(name, case) for name, some in table.items() for case in some]


@pytest.mark.parametrize(("name", "case"), cases(REFUSED))
def test_an_option_that_this_model_cannot_honour_is_refused_by_name(folder, tmp_path, name: str, case) -> None:
    options, message = case
    with pytest.raises((ValueError, AttributeError), match=message):
        trainer_with(name, folder, tmp_path, options).train()


@pytest.mark.parametrize(("name", "options"), cases(HONOURED))
def test_options_that_change_the_loss_train(folder, tmp_path, name: str, options: dict) -> None:
    check_trained(trainer_with(name, folder, tmp_path, options), folder)
