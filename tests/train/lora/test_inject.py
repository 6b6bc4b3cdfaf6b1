"""LoRA: only the adapter is trained, merging changes nothing, and what is written is what `peft` and engines read."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from model import ForwardOptions, Request, load_pretrained, save_pretrained
from model.generation import generate
from tests.model.tiny import no_rounding, tiny_drafter  # noqa: F401
from tests.train.tasks.test_sft import write_chats
from train import loop
from train.build import Run, build
from train.config.parse import parse
from train.config.problems import ConfigError
from train.config.schema import Config, Conversion, LoraConfig, SmallTask
from train.errors import InputError
from train.lora import inject, peft_format
from train.lora.peft_format import read_adapter
from train.lora.targets import LORA_TARGETS
from train.tasks import convert, pretrain

EVERYTHING = [target for target in LORA_TARGETS if target not in ("vision", "aligner")]
ALL = f"lora.targets=[{','.join(EVERYTHING)}]"


@pytest.fixture(scope="module")
def base(compose_raw, overrides, tmp_path_factory) -> Path:
    """A model as a run exports it."""
    folder = tmp_path_factory.mktemp("base")
    run = build(parse(compose_raw(*overrides, f"output={folder}")))
    save_pretrained(run.model, folder / "export", run.tokenizer)
    return folder / "export"


@pytest.fixture
def make(compose_raw, overrides, base: Path, tmp_path: Path):
    """``make("key=value", ...)``: the configuration of a short fine-tuning run with an adapter."""
    kept = [text for text in overrides if not text.startswith(("model=", "data.source", "data.paths", "data.valid"))]
    chats = write_chats(tmp_path, 60)

    def configure(*changes: str) -> Config:
        fixed = ["task=sft", "lora=all", "lora.rank=4", f"output={tmp_path}", f"init_from={base}"]
        fixed += [f"data.paths=[{chats}]", "data.validation_share=0.2", "task.tokens=600"]
        return parse(compose_raw(*kept, *fixed, "optim.schedule.peak=1.0e-2", *changes))

    return configure


def stepped(config: Config, steps: int = 2) -> Run:
    """A run after a few optimizer steps."""
    run = build(config)
    batches = iter(run.train_batches)
    for step in range(steps):
        loop.train_step(run, [next(batches)], step, 0)
    return run


def logits(model: torch.nn.Module, run: Run) -> torch.Tensor:
    batch = next(iter(run.valid_batches))
    with torch.no_grad():
        return model(**batch).logits


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def convert_with(adapter: Path | None, src: Path, dst: Path, format: str) -> Path:
    adapter = None if adapter is None else str(adapter)
    convert.run(Conversion(SmallTask("convert"), str(src), str(dst), format, adapter))
    return dst


def test_a_new_adapter_changes_nothing_and_a_trained_one_merges_exactly(no_rounding, make, base: Path) -> None:  # noqa: F811
    plain = load_pretrained(base)
    run = build(make(ALL))
    modules = set(inject._target_modules(plain, EVERYTHING))
    before = logits(plain, run)
    assert torch.equal(logits(run.model, run), before)
    for name, parameter in inject.trained_parameters(run.model).items():  # each target counts, none hides another
        if not parameter.any():
            parameter.data.normal_(std=0.02 if "experts" in name else 0.01)
    trained = logits(run.model, run)
    assert (trained - before).abs().max() > 1e-2
    inject.merge(run.model)
    assert run.model.state_dict().keys() == plain.state_dict().keys()
    assert (logits(run.model, run) - trained).abs().max() < 1e-5
    changed = {name for name, tensor in run.model.state_dict().items() if raw(tensor) != raw(plain.state_dict()[name])}
    assert changed == {
        f"{name}.{weight}" for name in modules for weight in (inject.STACK if name.endswith(".experts") else ["weight"])
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_any_rank_can_be_trained(make, precision: str) -> None:
    run = stepped(make("lora.targets=[experts]", "lora.rank=3", f"parallel.precision={precision}"))
    for name, parameter in inject.trained_parameters(run.model).items():
        assert parameter.abs().max() > 0, f"{name} has not moved"


@pytest.mark.parametrize("balance", ["off", "separate"])
def test_only_the_adapter_is_trained(make, base: Path, balance: str) -> None:
    run = stepped(make(ALL, f"optim.router_bias_mode={balance}"))
    trained = {name for name, parameter in run.model.named_parameters() if parameter.requires_grad}
    assert trained == set(inject.trained_parameters(run.model))
    assert {group["method"] for group in run.optimizer.param_groups} == {"adamw"}
    plain = {name: raw(tensor) for name, tensor in load_pretrained(base).state_dict().items()}
    moved, kept = set(), set()
    for name, tensor in run.model.state_dict().items():
        if name in trained:
            moved.add(name)
            continue
        original = name.replace(".base_layer", "")
        (kept if raw(tensor) == plain.pop(original) else moved).add(name)
    assert not plain, "every tensor of the base is there"
    biases = {name for name in kept | moved if name.endswith(".gate.bias")}  # text alone moves those of text
    assert moved - trained <= biases and bool(moved - trained) == (balance == "separate")
    for name, parameter in inject.trained_parameters(run.model).items():
        assert parameter.abs().max() > 0, f"{name} has not moved"


def test_peft_reads_what_is_written(no_rounding, make, base: Path, tmp_path: Path) -> None:  # noqa: F811
    """With nothing but `peft` on a plain model; its wrappers compute the experts in another way."""
    run = stepped(make(ALL, "lora.dropout=0.1"), 4)
    run.model.eval()
    expected = logits(run.model, run)
    inject.save_adapter(run.model, tmp_path / "adapter", str(base), biases=False)
    plain = load_pretrained(base)
    with torch.no_grad():
        loaded = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert written.keys() == peft.get_peft_model_state_dict(loaded).keys()
    assert (logits(loaded, run) - expected).abs().max() < 1e-5


def test_an_adapter_is_merged_into_the_released_layout_and_nothing_else_changes(make, base: Path, tmp_path) -> None:
    released = convert_with(None, base, tmp_path / "released", "released")
    run = build(make("lora.targets=[attention,experts,embed]", f"init_from={released}", "runtime.frozen=values"))
    for parameter in inject.trained_parameters(run.model).values():  # so much that every tile gets another code
        parameter.data.normal_(std=0.1)
    inject.save_adapter(run.model, tmp_path / "adapter", str(released), biases=False)
    merged = convert_with(tmp_path / "adapter", released, tmp_path / "merged", "released")
    inject.merge(run.model)
    save_pretrained(run.model, tmp_path / "expected", run.tokenizer, format="released")
    before, after = (load_file(folder / "model.safetensors") for folder in (released, merged))
    assert before.keys() == after.keys()
    touched = re.compile(r"embed\.weight|.*attn\.w(q_a|q_b|kv|o_a|o_b)\.\w+|.*ffn\.experts\.\d+\.w[123]\.\w+")
    touched = {name for name in before if touched.fullmatch(name) and ".indexer." not in name}
    same = {name for name in before if raw(before[name]) == raw(after[name])}
    assert before.keys() - touched <= same
    assert not {name for name in touched & same if name.endswith(".weight")}
    found, expected = (load_pretrained(folder).state_dict() for folder in (merged, tmp_path / "expected"))
    for name, tensor in found.items():  # products may differ in the last bit, and codes by one where that decides
        assert (tensor - expected[name]).abs().mean() <= 1e-3 * tensor.abs().mean(), name
    with pytest.raises(ValueError, match="does not hold a readable LoRA adapter"):
        convert_with(base, released, tmp_path / "x", "released")
    again = convert_with(None, merged, tmp_path / "again", "bf16")
    for folder in (merged, again):  # peft 1355: it would count twice, also after another conversion
        with pytest.raises(ValueError, match="has already been merged into .*merged_adapters.json names it"):
            convert_with(tmp_path / "adapter", folder, tmp_path / "twice", "bf16")
    assert not (tmp_path / "twice").exists()


def test_an_adapter_of_peft_on_the_transformers_class_is_merged(base: Path, tmp_path: Path) -> None:
    """Its names have one more prefix, and layers need not have the same targets."""
    import model.huggingface  # noqa: F401  registers the class

    tuned = AutoModelForCausalLM.from_pretrained(base)
    parameters = ["experts.w1", "layers.1.ffn.experts.w3", "layers.1.ffn.experts.w2"]
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["wq_a", "embed"], target_parameters=parameters)
    tuned = peft.get_peft_model(tuned, config)
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    tuned.save_pretrained(tmp_path / "adapter")
    found = load_pretrained(convert_with(tmp_path / "adapter", base, tmp_path / "merged", "bf16")).state_dict()
    for name, tensor in tuned.merge_and_unload().model.state_dict().items():
        assert torch.allclose(found[name], tensor, atol=1e-6, rtol=2**-8), name


A, B = "layers.0.attn.wq_a.lora_A.weight", "layers.0.attn.wq_a.lora_B.weight"
DAMAGED = [
    ({"r": 0}, {}, "not the configuration of a plain LoRA adapter: r = 0"),
    ({"lora_alpha": None}, {}, "lora_alpha = None"),
    ({"r": 8}, {}, r"the factors of .* must be \[8, in\] and \[out, 8\]"),
    ({"init_lora_weights": "pissa"}, {}, "init_lora_weights = 'pissa'"),
    ({"modules_to_save": ["head"]}, {}, "modules_to_save"),
    ({"a_setting_of_later": True}, {}, "a_setting_of_later = True"),
    ({"target_parameters": ["experts.w1"]}, {}, "does not name the weights of layers.0.ffn.experts"),
    ({}, {A: lambda t: t[:, 1:]}, r"wq_a.weight has shape \[.*, but its change is for shape \["),
    ({}, {B: lambda t: t[1:]}, r"wq_a.weight has shape \[.*, but its change is for shape \["),
    ({}, {A: lambda t: t / 0}, f"{A} has a NaN or infinite value"),
    ({}, {A: lambda t: None}, f"{B} is not a LoRA factor, or its matching factor is missing"),
    ({}, {B: lambda t: None}, f"{A} has no matching factor .*{B}"),
    ({}, {"layers.0.ffn.experts.base_layer.lora_A.weight": lambda t: t[4:]}, "the factors of layers.0.ffn.experts are"),
]


@pytest.mark.parametrize(("settings", "changes", "message"), DAMAGED)
def test_a_damaged_adapter_is_named_and_nothing_is_written(make, base: Path, tmp_path, settings, changes, message):
    inject.save_adapter(build(make("lora.targets=[attention,experts]")).model, tmp_path / "a", str(base), biases=False)
    config, tensors = (tmp_path / "a" / file for file in (peft_format.CONFIG, peft_format.WEIGHTS))
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    stored = load_file(tensors)
    for name, change in changes.items():
        stored[peft_format.PREFIX + name] = change(stored[peft_format.PREFIX + name])
    save_file({name: t.contiguous() for name, t in stored.items() if t is not None}, tensors)
    with pytest.raises(InputError, match=message):
        convert_with(tmp_path / "a", base, tmp_path / "merged", "bf16")
    assert not list(tmp_path.glob("*merged*"))


def test_a_run_keeps_the_adapter_alone_and_exports_it_merged(make, base: Path) -> None:
    config = make("name=whole", "optim.router_bias_mode=separate")
    pretrain.run(config)
    whole, exported = config.run_dir, load_pretrained(config.run_dir / "export")
    run = build(config)
    assert sum(tensor.numel() for tensor in run.checkpoint_module.state_dict().values()) < 0.5 * sum(
        tensor.numel() for tensor in exported.state_dict().values()
    )
    merged = load_pretrained(convert_with(whole / "adapter", base, whole / "merged", "bf16")).state_dict()
    for name, tensor in exported.state_dict().items():  # bf16 has 8 bits
        assert torch.allclose(tensor, merged[name], atol=1e-6, rtol=2**-8), name
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "valid"]
    assert losses[-1] < losses[0]
    with pytest.raises(ConfigError, match="holds only an adapter"):
        make(f"init_from={whole}")
    with pytest.raises(ValueError, match="has already been merged into .*export"):
        convert_with(whole / "adapter", whole / "export", whole / "twice", "bf16")


@pytest.mark.slow
def test_resuming_is_exact(make) -> None:
    options = ("lora.dropout=0.2", "checkpoint.every=1")
    pretrain.run(make("name=split", "task.tokens=300", *options))
    pretrain.run(make("name=split", *options))
    pretrain.run(make("name=whole", *options))
    first, second = (
        load_file(make(f"name={name}").run_dir / "adapter" / "adapter_model.safetensors") for name in ("split", "whole")
    )
    assert first.keys() == second.keys() and all(raw(first[name]) == raw(second[name]) for name in first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["lora.targets=[atention]"], 'lora.targets = "atention": no such target. Did you mean attention?'),
        (["lora.targets=[attention,attention]"], "contains the same target twice"),
        (["task=pretrain", "init_from=null", "model=tiny"], "LoRA needs the trained weights of a checkpoint"),
        (["optim=report"], 'optim.rules = "report": has no effect with LoRA, whose adapters'),
        (["lora.targets=[indexer]", "runtime.train_indexer=false"], "is not trained with runtime.train_indexer"),
    ],
)
def test_what_does_not_fit_is_refused(make, changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make(*changes)
    assert message in str(refused.value)


def test_a_target_that_names_nothing_is_refused(make) -> None:
    with pytest.raises(ConfigError, match='lora.targets = "vision": this model has no such part'):
        build(make("lora.targets=[attention,vision]"))


@pytest.mark.slow
def test_a_base_that_was_trained_on_meanwhile_is_not_continued_on(make, base: Path, tmp_path: Path) -> None:
    """NeMo Speech 12565: a name that means the newest checkpoint of a run means another one by then."""
    mine = tmp_path / "base"
    shutil.copytree(base, mine)
    config = make("name=dependent", f"init_from={mine}")
    pretrain.run(config)
    noted = json.loads((config.run_dir / "origin.json").read_text())
    assert noted["init_from"]["folder"] == str(mine)
    moved = shutil.move(mine, tmp_path / "elsewhere")
    pretrain.run(make("name=dependent", f"init_from={moved}", "task.tokens=2000"))  # the same weights: may be renamed
    shutil.copytree(moved, mine)
    tensors = load_file(mine / "model.safetensors")
    save_file({name: tensor + 1 if name == "norm.weight" else tensor for name, tensor in tensors.items()},
              mine / "model.safetensors")  # fmt: skip
    with pytest.raises(ConfigError, match=f"now means {mine}, but this run began with {mine}, which has other weights"):
        pretrain.run(make("name=dependent", f"init_from={mine}", "task.tokens=3000"))


@pytest.mark.usefixtures("no_rounding")
def test_a_model_with_an_adapter_decodes_with_a_drafter() -> None:
    """Greedy samples are those without the drafter, and not those of the model without the adapter."""
    drafter = tiny_drafter(ForwardOptions(kv_quant=False))
    requests = [Request(tuple(range(3, 3 + length)), 12, temperature=0) for length in (1, 5, 12, 40)]
    before = generate(drafter.backbone, requests)
    inject.add_adapter(drafter.backbone, LoraConfig(["attention", "experts", "head"], 4, 8.0, 0.0), 0)
    with torch.no_grad():
        for parameter in inject.trained_parameters(drafter.backbone).values():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    drafter.backbone.eval()
    plain, own = generate(drafter.backbone, requests), generate(drafter.backbone, requests, drafter=drafter)
    assert [sample.tokens for sample in own] == [sample.tokens for sample in plain]
    assert [sample.tokens for sample in plain] != [sample.tokens for sample in before]
    assert all(len(sample.accepted) > 0 for sample in own)


def trained_adapter(make, folder: Path, out: Path, targets: str, std: float, biases: bool = False) -> Path:
    """An adapter with random factors of this size on the released folder ``folder``."""
    run = build(make(f"lora.targets=[{targets}]", f"init_from={folder}", "runtime.frozen=values"))
    draw = torch.Generator().manual_seed(0)
    for parameter in inject.trained_parameters(run.model).values():
        parameter.data.normal_(std=std, generator=draw)
    inject.save_adapter(run.model, out, str(folder), biases=biases)
    return out


@pytest.mark.slow
def test_a_merge_says_what_rounding_has_left_of_the_adapter(make, base: Path, tmp_path, capsys) -> None:
    """Shares against fp64 from the files before and after; a small change is rounded away, a large one is not."""
    released = convert_with(None, base, tmp_path / "released", "released")
    before = load_pretrained(released).state_dict()
    experts = load_pretrained(released).config.text.n_routed_experts
    for std, warned in ((0.003, True), (0.3, False)):
        folder = trained_adapter(make, released, tmp_path / f"adapter-{std}", "attention,experts,embed", std)
        adapter = read_adapter(folder, experts)
        capsys.readouterr()
        after = load_pretrained(convert_with(folder, released, tmp_path / f"merged-{std}", "released")).state_dict()
        shown = capsys.readouterr().out
        meant = stored = along = 0.0
        for name, (b, a) in adapter.factors.items():
            if match := re.fullmatch(r"(.*experts)\.(\d+)\.(w[123])\.weight", name):
                stack, expert = f"{match[1]}.{match[3]}", int(match[2])
                wanted = adapter.scaling * (b.double() @ a.double())
                got = after[stack][expert].double() - before[stack][expert].double()
                meant, stored = meant + wanted.square().sum(), stored + got.square().sum()
                along = along + (wanted * got).sum()
        line = next(line for line in shown.splitlines() if line.startswith("  experts"))
        found = [float(text.rstrip("%")) / 100 for text in line.split()[1:]]
        assert found == pytest.approx([float((stored / meant).sqrt()), float(along / meant)], abs=6e-4)
        assert ("warning: rounding takes more than half" in shown and "keep=true" in shown) == warned
        assert re.search(r"  embed +\d+\.\d% +\d+\.\d%", shown) and "  attention" in shown


@pytest.mark.slow
def test_an_adapter_is_kept_beside_its_packed_base(make, base: Path, tmp_path, capsys) -> None:
    released = convert_with(None, base, tmp_path / "released", "released")
    adapter = trained_adapter(make, released, tmp_path / "adapter", "attention,shared_experts,experts,head", 0.1, True)
    convert.run(Conversion(SmallTask("convert"), str(released), str(tmp_path / "kept"), "released", str(adapter), True))
    kept, old = (load_file(folder / "model.safetensors") for folder in (tmp_path / "kept/base", released))
    changed = {name for name in old if raw(old[name]) != raw(kept[name])}
    assert {name.split(".")[-2] for name in changed if "gate.bias" not in name} == {"wo_a", "head"}
    assert re.search(r"  attention +\d", capsys.readouterr().out)
    exact = load_pretrained(convert_with(adapter, released, tmp_path / "exact", "bf16")).state_dict()
    again = load_pretrained(
        convert_with(tmp_path / "kept/adapter", tmp_path / "kept/base", tmp_path / "again", "bf16")
    ).state_dict()
    for name, tensor in exact.items():
        if "wo_a" not in name:  # rounded to FP8 in the base
            assert torch.equal(tensor, again[name]), name
    with pytest.raises(ValueError, match="has already been merged into"):
        convert_with(adapter, tmp_path / "kept/base", tmp_path / "twice", "bf16")
    plain = trained_adapter(make, released, tmp_path / "experts", "experts", 0.1)
    convert.run(Conversion(SmallTask("convert"), str(released), str(tmp_path / "linked"), "released", str(plain), True))
    for path in (tmp_path / "linked/base").iterdir():
        assert path.samefile(released / path.name)
    only = trained_adapter(make, released, tmp_path / "only-head", "head", 0.1)
    with pytest.raises(ValueError, match="changes nothing that serving engines add"):
        convert.run(
            Conversion(SmallTask("convert"), str(released), str(tmp_path / "none"), "released", str(only), True)
        )
    assert not (tmp_path / "none").exists()
