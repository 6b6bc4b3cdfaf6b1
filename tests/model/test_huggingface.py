"""The model behind transformers' interface: configuration, folders, loss, generation, Trainer, peft."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from golden_files import INPUTS, golden, load_oracle, oracle_rounding
from safetensors.torch import load_file
from test_config import RELEASED
from tiny import assert_same, no_rounding, tiny_model, tokens  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from model import ForwardOptions, load_pretrained, save_pretrained
from model.config import ModelConfig
from model.generation import Request, generate
from model.huggingface import DeepseekV41Config, DeepseekV41ForCausalLM

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture
def tiny() -> DeepseekV41ForCausalLM:
    """Text and images, no Engram: needs no tokenizer."""
    core = tiny_model(vision=True)
    return DeepseekV41ForCausalLM(DeepseekV41Config(**core.config.to_dict()), core).eval()


def inputs_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in load_file(folder / "inputs.safetensors").items() if name in INPUTS}


# Configuration


def test_the_released_config_goes_through_transformers_unchanged(tmp_path) -> None:
    raw = json.loads(json.dumps(ModelConfig.from_dict(RELEASED).to_dict())) | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.to_dict() == raw
    assert config.get_text_config().num_hidden_layers == 40 and config.vision_config.patch_size == 14
    config.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == raw


def test_a_configuration_is_checked(tmp_path) -> None:
    raw = ModelConfig.from_dict({}).to_dict()
    raw["text_config"]["o_groups"] = 7
    with pytest.raises(ValueError, match="o_groups.*must divide"):
        DeepseekV41Config(**raw)


def test_the_model_alone_does_not_import_transformers() -> None:
    code = "import model, sys; assert 'transformers' not in sys.modules and 'peft' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])


# Folders


def test_a_folder_gives_the_oracles_logits() -> None:
    """Engram, images and their tokenizer."""
    folder = golden("vision")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is DeepseekV41ForCausalLM and not model.training and model.dtype == torch.float32
    expected = load_file(folder / "expected.safetensors")
    with torch.no_grad(), oracle_rounding(load_oracle("vision"), model.model):
        out = model(**inputs_of(folder))
    assert (out.logits - expected["logits"]).abs().max() < 3e-4
    assert abs(out.loss - expected["loss"]) < 1e-5


@pytest.mark.parametrize("format", ["plain", "bf16", "released"])
def test_folders_come_in_and_go_out_bit_for_bit(tmp_path, format: str) -> None:
    dtype = torch.bfloat16 if format == "bf16" else None
    written = "released" if format == "released" else "plain"
    core = load_pretrained(golden("engram"))
    save_pretrained(core, tmp_path / "in", dtype=dtype, format=written, shard_bytes=100_000)
    shutil.copy(golden("engram") / "tokenizer.json", tmp_path / "in")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    assert model.dtype == (torch.float32 if format == "plain" else torch.bfloat16)
    assert model.model.layers[0].hc_attn.fn.dtype == torch.float32
    model.save_pretrained(tmp_path / "out", format=written, max_shard_size=100_000)
    source, result = load_all(tmp_path / "in"), load_all(tmp_path / "out")
    assert source.keys() == result.keys()
    for name, tensor in source.items():
        if format == "plain" or tensor.dtype != torch.float32:  # vectors are fp32 on disk, and bf16 in the model
            assert tensor.dtype == result[name].dtype, name
            assert torch.equal(tensor.view(torch.uint8), result[name].view(torch.uint8)), name
    assert any(name.endswith(".scale") for name in source) == (format == "released")
    assert (tmp_path / "in" / "tokenizer.json").read_bytes() == (tmp_path / "out" / "tokenizer.json").read_bytes()
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("in", "out")]
    assert configs[0] | {"dtype": None} == configs[1] | {"dtype": None}


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def test_saving_keeps_other_files_and_leaves_no_old_weights(tmp_path, tiny) -> None:
    tiny.save_pretrained(tmp_path / "m", max_shard_size="50KB")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    assert len(list((tmp_path / "m").glob("model-*"))) > 2
    tiny.save_pretrained(tmp_path / "m")
    names = sorted(path.name for path in (tmp_path / "m").iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]
    tiny.save_pretrained(tmp_path / "m", state_dict=tiny.state_dict())
    with pytest.raises(ValueError, match="max_shard_size='many'"):
        tiny.save_pretrained(tmp_path / "m", max_shard_size="many")
    with pytest.raises(ValueError, match="push_to_hub and variant are not supported"):
        tiny.save_pretrained(tmp_path / "m", push_to_hub=True)
    with pytest.raises(ValueError, match="model's own weights are written"):
        tiny.save_pretrained(tmp_path / "m", state_dict={"model.head.weight": torch.zeros(61, 32)})
    loaded = load_pretrained(tmp_path / "m")
    assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in tiny.model.state_dict().items())


def test_what_cannot_be_loaded_is_named(tmp_path, tiny) -> None:
    tiny.save_pretrained(tmp_path / "m")
    with pytest.raises(TypeError, match="load_in_8bit: not supported"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "m", load_in_8bit=True)
    with pytest.raises(ValueError, match="one device or 'auto'"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "m", device_map={"model.embed": "cpu", "model.head": "meta"})
    other = DeepseekV41Config(**tiny_model().config.to_dict())
    with pytest.raises(ValueError, match="not the one in"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "m", config=other)
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "m")


def test_a_new_model_with_engram_needs_its_tokenizer() -> None:
    from tokenizers import Tokenizer

    config = AutoConfig.from_pretrained(golden("engram"))
    with pytest.raises(ValueError, match="needs its tokenizer"):
        AutoModelForCausalLM.from_config(config)
    tokenizer = Tokenizer.from_file(str(golden("engram") / "tokenizer.json"))
    model = AutoModelForCausalLM.from_config(config, tokenizer=tokenizer)
    assert model(input_ids=tokens(1, 9)).logits.shape == (1, 9, config.text_config.vocab_size)


# Loss


def test_labels_are_shifted_as_transformers_does_it(tiny) -> None:
    ids = tokens(2, 20)
    labels = ids.clone()
    labels[0, 5:9] = -100
    out = tiny(input_ids=ids, labels=labels)
    expected = tiny.loss_function(out.logits, labels, vocab_size=61)
    assert abs(out.loss - expected) < 1e-6
    assert isinstance(tiny(input_ids=ids, return_dict=False), tuple)


def test_micro_batches_add_up_to_the_whole_batch(tiny, no_rounding) -> None:  # noqa: F811
    ids, labels = tokens(4, 24), tokens(4, 24)
    labels[1, 4:] = -100  # unequal numbers of targets
    labels[3, :20] = -100
    count = (labels[:, 1:] != -100).sum()
    whole = tiny(input_ids=ids, labels=labels)
    whole.loss.backward()
    expected = {name: p.grad.clone() for name, p in tiny.named_parameters() if p.grad is not None}
    tiny.zero_grad()
    total = 0.0
    for rows in (slice(0, 1), slice(1, 2), slice(2, 4)):
        loss = tiny(input_ids=ids[rows], labels=labels[rows], num_items_in_batch=count).loss
        loss.backward()
        total += loss.item()
    assert abs(total - whole.loss.item()) < 1e-5
    assert_same({name: p.grad for name, p in tiny.named_parameters() if p.grad is not None}, expected, 1e-4)


def test_position_ids_pack_documents(tiny) -> None:
    ids = tokens(2, 12)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3], [*range(12)]])
    packed = tiny(input_ids=ids, position_ids=positions).logits
    expected = tiny(input_ids=ids, seq_lens=torch.tensor([[5, 3, 4], [12, 0, 0]])).logits
    assert torch.equal(packed, expected)
    assert not torch.equal(packed, tiny(input_ids=ids).logits)
    with pytest.raises(ValueError, match="count the tokens of every document from 0"):
        tiny(input_ids=ids, position_ids=positions + 1)
    with pytest.raises(ValueError, match="do not agree with attention_mask"):
        tiny(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    with pytest.raises(ValueError, match="inputs_embeds: is not supported"):
        tiny(input_ids=ids, inputs_embeds=torch.zeros(2, 12, 32))


def test_checkpointing_changes_no_gradient(tiny) -> None:
    ids = tokens(2, 20)
    tiny(input_ids=ids, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in tiny.named_parameters() if p.grad is not None}
    tiny.zero_grad()
    tiny.gradient_checkpointing_enable()
    assert tiny.is_gradient_checkpointing and tiny.model.runtime == ForwardOptions(recompute=True)
    tiny(input_ids=ids, labels=ids).loss.backward()
    assert_same({name: p.grad for name, p in tiny.named_parameters() if p.grad is not None}, expected, 1e-6)
    tiny.gradient_checkpointing_disable()
    assert not tiny.is_gradient_checkpointing


# Generation


@torch.no_grad()
def greedy(model: DeepseekV41ForCausalLM, ids: torch.Tensor, count: int, **images) -> torch.Tensor:
    """By running everything again for every token."""
    for _ in range(count):
        new = model.model(input_ids=ids, **images).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, new], dim=1)
        if images:
            types = images["vision_token_types"]
            images["vision_token_types"] = torch.cat([types, torch.full_like(types[:, :1], -1)], dim=1)
    return ids


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    rows = [[2] * (width - len(p)) + p for p in prompts]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    return dict(input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask))


PROMPTS = [tokens(30, seed=1).tolist(), tokens(7, seed=2).tolist(), tokens(19, seed=3).tolist()]


def test_generation_of_a_padded_batch_is_that_of_each_prompt(tiny) -> None:
    batch = padded(PROMPTS)
    cached = tiny.generate(**batch, max_new_tokens=12, do_sample=False, eos_token_id=-1)
    again = tiny.generate(**batch, max_new_tokens=12, do_sample=False, eos_token_id=-1, use_cache=False)
    assert torch.equal(cached, again)
    own = generate(tiny.model, [Request(tuple(prompt), 12, temperature=0.0) for prompt in PROMPTS])
    for row, prompt, sample in zip(cached.tolist(), PROMPTS, own, strict=True):
        alone = greedy(tiny, torch.tensor([prompt]), 12)[0].tolist()
        assert row[30 - len(prompt) :] == alone == [*prompt, *sample.tokens]


def test_sampling_and_beams_need_no_second_implementation(tiny) -> None:
    """The cache notices when a beam's past changes."""
    batch = padded(PROMPTS)
    for options in (dict(do_sample=True, top_k=8), dict(do_sample=False, num_beams=3)):
        results = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            results.append(tiny.generate(**batch, max_new_tokens=8, use_cache=use_cache, **options))
        assert torch.equal(*results), options


def test_the_cache_passes_new_tokens_only(tiny, monkeypatch) -> None:
    import model.huggingface

    passed = []

    def counting(decoding, step):
        passed.append(len(step.ids))
        return real(decoding, step)

    real = model.huggingface.decoding.Decoding._pass
    monkeypatch.setattr(model.huggingface.decoding.Decoding, "_pass", counting)
    monkeypatch.setattr(model.huggingface.decoding, "PREFILL_TOKENS", 30)
    result = tiny.generate(**padded(PROMPTS), max_new_tokens=4, do_sample=False, eos_token_id=-1)
    assert passed == [27, 19, 10, 3, 3, 3]  # prompts in pieces of 10 each, then a token each
    assert torch.equal(result[:1], greedy(tiny, torch.tensor(PROMPTS[:1]), 4))


def test_generation_after_an_image() -> None:
    folder = golden("vision")
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = {name: t for name, t in inputs_of(folder).items() if name != "labels"}
    ids = inputs.pop("input_ids")
    result = model.generate(input_ids=ids, **inputs, max_new_tokens=4, do_sample=False, eos_token_id=-1)
    assert torch.equal(result, greedy(model, ids, 4, **inputs))


def test_hidden_states_of_a_generation_and_a_prompt_without_tokens(tiny) -> None:
    batch = padded(PROMPTS)
    options = dict(max_new_tokens=2, do_sample=False, eos_token_id=-1)
    found = tiny.generate(**batch, **options, return_dict_in_generate=True, output_hidden_states=True)
    assert torch.equal(found.sequences, tiny.generate(**batch, **options))
    with torch.no_grad():
        expected = tiny(**batch, output_hidden_states=True).hidden_states
    assert len(found.hidden_states) == 2
    assert all(torch.equal(a, b) for a, b in zip(found.hidden_states[0], expected, strict=True))
    batch["attention_mask"][1] = 0
    with pytest.raises(ValueError, match="attention_mask row 1 has only padding"):
        tiny.generate(**batch, **options)


def test_stopping_and_the_generation_config_of_the_folder(tmp_path, tiny) -> None:
    prompt = PROMPTS[1]
    stop = int(greedy(tiny, torch.tensor([prompt]), 3)[0, -1])
    tiny.save_pretrained(tmp_path / "m")
    raw = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    assert (raw["eos_token_id"], raw["pad_token_id"]) == (1, 2)
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps(raw | {"eos_token_id": stop}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    result = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=9, do_sample=False)
    assert result[0].tolist()[-1] == stop and len(result[0]) <= len(prompt) + 3


# Trainer and peft


class Rows(torch.utils.data.Dataset):
    def __init__(self, count: int):
        self.ids = tokens(count, 16)
        self.labels = self.ids.clone()
        for row in range(count):  # unequal numbers of targets
            self.labels[row, : row % 5 * 3] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return dict(input_ids=self.ids[row], labels=self.labels[row])


def trained(model, folder: Path, resume: bool = False, **options) -> None:
    arguments = TrainingArguments(
        output_dir=str(folder),
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        logging_strategy="no",
        **{"save_strategy": "no", **options},
    )
    Trainer(model, arguments, train_dataset=Rows(8)).train(resume_from_checkpoint=resume)


def copy_of(tiny: DeepseekV41ForCausalLM) -> DeepseekV41ForCausalLM:
    core = tiny_model(vision=True)
    return DeepseekV41ForCausalLM(tiny.config, core)


@pytest.mark.slow
def test_trainers_accumulation_is_exact(tiny, tmp_path) -> None:
    """One step of 8 rows with unequal numbers of targets, as 4 micro-batches and as one."""
    results = []
    for size in (2, 8):
        model = copy_of(tiny)
        model.training_losses = "lm"
        trained(model, tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size, max_steps=1)
        results.append({name: p.detach() for name, p in model.named_parameters()})
    start = {name: p.detach() for name, p in copy_of(tiny).named_parameters()}
    moved = {name: p - start[name] for name, p in results[1].items()}
    assert max(change.abs().max() for change in moved.values()) > 1e-3
    assert_same({name: p - start[name] for name, p in results[0].items()}, moved, 1e-3)


@pytest.mark.slow
def test_trainer_saves_the_released_layout_and_resumes(tiny, tmp_path) -> None:
    options = dict(per_device_train_batch_size=2, save_steps=2, save_strategy="steps")
    whole = copy_of(tiny)
    trained(whole, tmp_path / "a", max_steps=4, **options)
    saved = load_file(tmp_path / "a" / "checkpoint-4" / "model.safetensors")
    assert "layers.0.ffn.experts.1.w1.weight" in saved and "layers.0.hc_attn_fn" in saved
    half = load_pretrained(tmp_path / "a" / "checkpoint-2")
    shutil.rmtree(tmp_path / "a" / "checkpoint-4")
    again = copy_of(tiny)
    trained(again, tmp_path / "a", resume=True, max_steps=4, **options)
    assert not torch.equal(half.head.weight, again.model.head.weight)
    for name, p in whole.named_parameters():
        assert torch.equal(p, dict(again.named_parameters())[name]), name


@pytest.mark.slow
def test_peft_wraps_trains_and_reloads(no_rounding, tiny, tmp_path) -> None:  # noqa: F811
    from peft import LoraConfig, PeftModel, get_peft_model

    model = get_peft_model(tiny, LoraConfig(r=4, target_modules=["wq_a", "wq_b", "wkv", "wo_b"], task_type="CAUSAL_LM"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids, losses = tokens(4, 24), []
    for _ in range(12):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("lora_" in name for name in changed)
    model.eval()
    expected = model(input_ids=ids).logits
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="the model has an adapter .*merge it into the weights first"):
        tiny.save_pretrained(tmp_path / "m")
    again = PeftModel.from_pretrained(copy_of(tiny).eval(), tmp_path / "adapter")
    assert (again(input_ids=ids).logits - expected).abs().max() < 1e-5
    text = again.generate(input_ids=ids[:1], max_new_tokens=3, do_sample=False)
    merged = again.merge_and_unload()
    assert (merged(input_ids=ids).logits - expected).abs().max() < 1e-3
    assert text.shape == (1, 27)
    merged.save_pretrained(tmp_path / "merged")
    assert (load_pretrained(tmp_path / "merged")(input_ids=ids).logits - expected).abs().max() < 1e-3


@pytest.mark.slow
def test_an_adapter_of_the_trainer_goes_onto_the_transformers_model(no_rounding, tiny, tmp_path) -> None:  # noqa: F811
    """Every kind of target: linear layers, grouped and stacked weights, embedding and head."""
    from peft import PeftModel

    from train.config.schema import LoraConfig
    from train.lora import inject
    from train.lora.targets import LORA_TARGETS

    core, ids = tiny_model(vision=True).eval(), tokens(2, 20)
    targets = [target for target in LORA_TARGETS if target != "engram"]
    inject.add_adapter(core, LoraConfig(targets=targets, rank=4, alpha=8.0, dropout=0.0), seed=0)
    with torch.no_grad():
        for parameter in inject.trained_parameters(core).values():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    inject.save_adapter(core, tmp_path / "adapter", "base", biases=False)
    before = tiny(input_ids=ids).logits
    after = PeftModel.from_pretrained(tiny, tmp_path / "adapter")(input_ids=ids).logits
    assert (after - core(input_ids=ids).logits).abs().max() < 1e-5
    assert (after - before).abs().max() > 0.1


# The whole method under trainers of others


def whole_step(core, ids, labels):
    """The gradients and the expert load of the model's own losses, as `python -m train` computes them."""
    denominators = core.loss_denominators(input_ids=ids, labels=labels)
    losses = core.losses(input_ids=ids, labels=labels, denominators=denominators)
    losses.total.backward()
    gradients = {name: p.grad.clone() for name, p in core.named_parameters() if p.grad is not None}
    core.zero_grad()
    return losses, gradients


def test_a_pass_of_training_has_the_losses_and_gradients_of_python_m_train(tiny) -> None:
    ids, labels = tokens(3, 24), tokens(3, 24)
    labels[1, :9] = -100
    losses, expected = whole_step(tiny.model, ids, labels)
    tiny.train()
    out = tiny(input_ids=ids, labels=labels, use_cache=False)
    out.loss.backward()
    assert abs(out.loss.item() - losses.total.item()) < 1e-6
    found = {name: p.grad for name, p in tiny.model.named_parameters() if p.grad is not None}
    assert any(".indexer." in name for name in expected)
    assert_same(found, expected, 1e-4)  # sums of other shapes: the logits of every token at once
    assert torch.equal(tiny._load, losses.expert_load)
    tiny.zero_grad()
    tiny.training_losses = "lm"
    tiny(input_ids=ids, labels=labels).loss.backward()
    assert all(p.grad is None or not p.grad.any() for name, p in tiny.named_parameters() if ".indexer." in name)


def test_micro_batches_of_the_whole_method_add_up(tiny, no_rounding) -> None:  # noqa: F811
    """Rows with equal numbers of tokens and targets: then weighing by targets is exact for every loss."""
    ids = tokens(4, 24)
    losses, expected = whole_step(tiny.model, ids, ids)
    tiny.train()
    count, total = 4 * 23, 0.0
    for rows in (slice(0, 1), slice(1, 4)):
        loss = tiny(input_ids=ids[rows], labels=ids[rows], num_items_in_batch=count).loss
        loss.backward()
        total += loss.item()
    assert abs(total - losses.total.item()) < 1e-5
    assert_same({name: p.grad for name, p in tiny.model.named_parameters() if p.grad is not None}, expected, 1e-4)


@pytest.mark.parametrize("recompute", [False, True])
def test_router_biases_follow_the_load_of_a_step_counted_once(tiny, recompute: bool) -> None:
    from optim import balance_step_

    ids = tokens(4, 24)
    losses, _ = whole_step(tiny.model, ids, ids)
    expected = [(bias.clone(), bias_vl.clone()) for bias, bias_vl in tiny.model.router_biases()]
    balance_step_(expected, losses.expert_load, 1e-3)
    tiny.train()
    if recompute:
        tiny.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(tiny.parameters(), lr=0.0)
    for rows in (slice(0, 1), slice(1, 4)):
        tiny(input_ids=ids[rows], labels=ids[rows]).loss.backward()
    with torch.no_grad():
        tiny(input_ids=ids, labels=ids)  # a pass without gradients is no training
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0).step()  # nor is another model's step this one's
    before = [bias.clone() for bias, _ in tiny.model.router_biases()]
    optimizer.step()
    for (bias, bias_vl), (wanted, wanted_vl), old in zip(tiny.model.router_biases(), expected, before, strict=True):
        assert torch.equal(bias, wanted) and torch.equal(bias_vl, wanted_vl) and not torch.equal(bias, old)
    optimizer.step()
    assert torch.equal(tiny.model.router_biases()[0][0], expected[0][0]), "nothing new was routed"
    for layer in tiny.model.layers:
        layer.ffn.gate.weight.requires_grad_(False)
    tiny(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert torch.equal(tiny.model.router_biases()[0][0], expected[0][0]), "a router that is not trained stays as it is"


def test_a_loss_on_logits_or_hidden_states_trains_indexers_too(tiny) -> None:
    """As DPO, GRPO and TRL's own head compute it; every token counts, a pass as a part of its step."""
    ids = tokens(2, 24)
    tiny.train()
    tiny.router_bias_rate = 0.0  # the steps are to be compared
    optimizer = torch.optim.SGD(tiny.parameters(), lr=0.0)
    gradients = []
    for passes in (1, 2, 2):
        for _ in range(passes):
            if passes == 1:
                out = tiny(input_ids=ids).logits
            else:
                out = tiny.model.head(tiny.base_model(input_ids=ids, use_cache=False).last_hidden_state)
            assert out.shape == (2, 24, 61)
            (out[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean() * (-1 / passes)).backward()
        gradients.append({n: p.grad.clone() for n, p in tiny.model.named_parameters() if p.grad is not None})
        optimizer.step()
        tiny.zero_grad()
    _, expected = whole_step(tiny.model, ids, ids)
    indexer = [name for name in expected if ".indexer." in name]
    lm = {name: gradient for name, gradient in expected.items() if name not in indexer}
    assert indexer and all(gradients[0][name].abs().max() > 0 for name in indexer)
    assert_same({name: gradients[0][name] for name in lm}, lm, 1e-3)  # but for the balance loss of the last tokens
    assert_same(gradients[2], gradients[0], 1e-5)
    tiny.eval()
    with torch.no_grad():
        hidden = tiny.base_model(input_ids=ids).last_hidden_state
        assert torch.equal(tiny.model.head(hidden), tiny(input_ids=ids).logits)


def test_label_smoothing_is_of_the_next_token(tiny, tmp_path) -> None:
    """transformers 17960, 27161: for a class that it does not know Trainer smooths the loss of the same token."""
    from transformers.trainer_pt_utils import LabelSmoother

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], label_smoothing_factor=0.1)
    trainer = Trainer(tiny, arguments, train_dataset=Rows(4))
    ids = tokens(2, 16)
    loss = trainer.compute_loss(tiny.train(), {"input_ids": ids, "labels": ids.clone()})
    logits = tiny.eval()(input_ids=ids).logits[:, :-1].log_softmax(-1)
    right = -logits.gather(-1, ids[:, 1:, None]).mean()
    expected = 0.9 * right - 0.1 * logits.mean()
    assert isinstance(trainer.label_smoother, LabelSmoother) and abs(loss - expected) < 1e-5


def test_noise_on_embeddings_and_sharded_parameters_are_refused(tiny, tmp_path) -> None:
    options = dict(per_device_train_batch_size=2, max_steps=1)
    with pytest.raises(ValueError, match="neftune_noise_alpha is not supported"):
        trained(tiny, tmp_path, neftune_noise_alpha=5.0, **options)
    with pytest.raises(ValueError, match="output_router_logits: is not supported"):
        tiny.eval()(input_ids=tokens(1, 8), output_router_logits=True)


def test_generation_refuses_an_id_outside_of_the_vocabulary(tiny) -> None:
    with pytest.raises(ValueError, match="input_ids row 1 holds -1: allowed are 0..60"):
        tiny.generate(input_ids=torch.tensor([[5, 6], [7, -1]]), max_new_tokens=2)
