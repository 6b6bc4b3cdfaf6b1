"""LoRA: small trained factors beside frozen weights, by means of `peft` (which only this file imports).

Linear layers and the embedding get `peft`'s own layers. The three classes here do the same for modules that `peft` does
not know: the block-diagonal output projection, the head (whose weight the chunked losses read) and the stacked routed
experts. A weight W [out, in] acts as W + alpha / rank * B A, with A [rank, in] drawn at random and B [out, rank]
initially zero; an embedding [rows, dim] has B [dim, rank] drawn and A [rank, rows] zero. Each expert has its own A and
B, stacked along the first dimension and split over ranks as the experts are; W + B A is never formed for them.

An adapter on disk has `peft`'s format: ``peft.PeftModel.from_pretrained(model, folder)`` loads it onto a plain model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import peft
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from safetensors.torch import save_file
from torch import Tensor, nn

from model.attention import GroupedLinear
from model.backbone import DeepseekV41
from model.checkpoint.save import whole_folder
from model.moe import Experts, grouped_linear
from model.parallel.tables import Head, logits
from train.config.problems import ConfigError, problem
from train.config.schema import LoraConfig
from train.lora.peft_format import BIASES, PREFIX, STACK, WEIGHTS
from train.lora.targets import LORA_TARGETS

NAME = "default"  # `peft`'s name for the only adapter


class _Wrapper(nn.Module, LoraLayer):
    """Common part of the layers below: a base layer, and the changes of its weights for merging."""

    base_layer: Any
    lora_A: Any
    lora_B: Any
    lora_dropout: Any

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: Any, r: int, lora_alpha: float, **_: Any):
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=cast(int, lora_alpha), config=config)

    def _get_in_out_features(self, module: Any) -> tuple[Any, Any]:
        return module.weight.shape[1], module.weight.shape[0]

    def changes(self, adapter: str) -> Iterator[tuple[Tensor, Tensor]]:
        """(weight of the base layer, what the adapter adds to it) pairs."""
        product = self.lora_B[adapter].weight @ self.lora_A[adapter].weight
        yield self.base_layer.weight, product * self.scaling[adapter]

    @property
    def in_use(self) -> list[str]:
        """The adapters that the forward pass adds."""
        off = self.disable_adapters or self.merged
        return [] if off else [name for name in self.active_adapters if name in self.lora_A]

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        for adapter in check_adapters_to_merge(self, adapter_names):
            for weight, change in self.changes(adapter):
                weight += change
            self.merged_adapters.append(adapter)

    @torch.no_grad()
    def unmerge(self) -> None:
        while self.merged_adapters:
            for weight, change in self.changes(self.merged_adapters.pop()):
                weight -= change


class GroupedLora(_Wrapper):
    """LoRA of a `GroupedLinear`: its groups share A, and each has its own rows of B."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        for name in self.in_use:
            low = self.lora_A[name](self.lora_dropout[name](x))
            blocks = self.lora_B[name].weight.unflatten(0, (self.base_layer.groups, -1))
            y = y + self.scaling[name] * torch.einsum("tgr,gor->tgo", low, blocks.to(low.dtype))
        return y


class HeadLora(_Wrapper):
    """LoRA of the head, whole on every rank even if the head is split. No dropout: losses read the weight alone."""

    def _get_in_out_features(self, module: Any) -> tuple[Any, Any]:
        return module.in_features, module.shard.total

    def changes(self, adapter: str) -> Iterator[tuple[Tensor, Tensor]]:
        for weight, change in super().changes(adapter):
            yield weight, change[self.base_layer.shard.start : self.base_layer.shard.stop]

    def full_weight(self) -> Tensor:
        """The changed weight [rows, dim] of all ranks."""
        weight = self.base_layer.full_weight()
        for name in self.in_use:
            weight = weight + self.scaling[name] * (self.lora_B[name].weight @ self.lora_A[name].weight)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        return logits(x, self.full_weight())


class ExpertsLora(_Wrapper):
    """LoRA of `Experts`: lora_A.w1 [E, rank, in] and lora_B.w1 [E, out, rank], likewise w2 and w3."""

    def __init__(self, base_layer: Experts, *args: Any, **kwargs: Any):
        super().__init__(base_layer, *args, **kwargs)
        base_layer.adapter = cast(Any, self.added)

    def _get_in_out_features(self, module: Any) -> tuple[Any, Any]:
        return None, None

    def update_layer(self, adapter_name: str, r: int, lora_alpha: float, config: Any, **_: Any) -> None:
        weights = {name: getattr(self.base_layer, name) for name in STACK}
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.scaling[adapter_name] = lora_alpha / r
        self.lora_dropout[adapter_name] = nn.Dropout(config.lora_dropout) if config.lora_dropout else nn.Identity()
        a = {name: weight.new_empty(len(weight), r, weight.shape[2]) for name, weight in weights.items()}
        b = {name: weight.new_zeros(len(weight), weight.shape[1], r) for name, weight in weights.items()}
        self.lora_A[adapter_name], self.lora_B[adapter_name] = nn.ParameterDict(a), nn.ParameterDict(b)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def added(self, weight: str, rows: Tensor, ends: Tensor) -> Tensor | float:
        """What the adapters add to `Experts.linear`."""
        total: Tensor | float = 0.0
        for name in self.in_use:
            missing = (
                -self.r[name] % 8
            )  # the grouped product needs rows that are multiples of 16 bytes; zeros add nothing
            a, b = self.lora_A[name][weight], self.lora_B[name][weight]
            low = grouped_linear(self.lora_dropout[name](rows), F.pad(a, (0, 0, 0, missing)), ends)
            total = total + self.scaling[name] * grouped_linear(low, F.pad(b, (0, missing)), ends)
        return total

    def changes(self, adapter: str) -> Iterator[tuple[Tensor, Tensor]]:
        for weight in STACK:
            product = self.lora_B[adapter][weight] @ self.lora_A[adapter][weight]
            yield getattr(self.base_layer, weight), product * self.scaling[adapter]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_layer(*args, **kwargs)


class Trained(nn.Module):
    """The part of a model with an adapter that a run changes: the adapter's parameters and the router biases, under the
    model's names.
    """

    def __init__(self, model: DeepseekV41):
        super().__init__()
        self.model = model

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Tensor]:  # type: ignore[override]
        state = self.model.state_dict(keep_vars=keep_vars)
        return {name: tensor for name, tensor in state.items() if ".lora_" in name or ".gate.bias" in name}


def add_adapter(model: DeepseekV41, config: LoraConfig, seed: int) -> None:
    """Freeze `model` and add an adapter, in place. The initial values are those that a single process would draw.

    Raises:
        ConfigError: a target matches nothing in this model, or what it matches is split over ranks.
    """
    modules = list(_target_modules(model, config.targets))
    choice = peft.LoraConfig(
        r=config.rank,
        lora_alpha=cast(int, config.alpha),
        lora_dropout=config.dropout,
        target_modules="|".join(map(re.escape, modules)),
    )
    choice._register_custom_module({Experts: ExpertsLora, GroupedLinear: GroupedLora, Head: HeadLora})
    peft.inject_adapter_in_model(choice, model, NAME)
    for module in model.modules():
        if isinstance(module, ExpertsLora):
            _mark(module)
    _draw(model, seed)


def trained_parameters(model: DeepseekV41) -> dict[str, nn.Parameter]:
    """The adapter's parameters by name."""
    return {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes as if it had no adapter. Which parameters are trained stays as it is."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merge(model: nn.Module) -> None:
    """Add the adapter to the weights and remove it, in place: the model is a plain one again."""
    wrappers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, module in wrappers.items():
        module.merge()
        parent, _, leaf = name.rpartition(".")
        if parent not in wrappers:  # `peft` nests several wrappers of one module
            base = module.get_base_layer()
            if isinstance(base, Experts):
                base.adapter = None
            setattr(model.get_submodule(parent), leaf, base)
    del model.peft_config


def save_adapter(model: DeepseekV41, folder: Path, base: str, biases: bool) -> None:
    """Write the adapter in `peft`'s format, whole or not at all. All ranks call it; the first one writes.

    base: the checkpoint that it belongs to, recorded for the reader. biases: the run moved the router biases, which
    `peft` does not know; they go into a separate file.
    """
    tensors = dict(_tensors(model))
    if dist.is_initialized() and dist.get_rank():
        return
    config: peft.LoraConfig = cast(Any, model.peft_config)[NAME]
    kinds = {name: type(module) for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    whole = [name for name, kind in kinds.items() if kind not in (GroupedLora, ExpertsLora)]
    parts = [f"{name}.{weight}" for name, kind in kinds.items() if kind is ExpertsLora for weight in STACK]
    parts += [f"{name}.weight" for name, kind in kinds.items() if kind is GroupedLora]
    written = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        target_modules=rf"(model\.)?({'|'.join(map(re.escape, whole))})" if whole else [],
        target_parameters=parts or None,
        base_model_name_or_path=base,
        inference_mode=True,
    )
    with whole_folder(folder) as work:
        written.save_pretrained(str(work))
        save_file(tensors, work / WEIGHTS, metadata={"format": "pt"})
        if biases:
            save_file(_biases(model), work / BIASES)
        for path in work.iterdir():  # the library makes its files readable by the owner only
            path.chmod(0o644)


def _target_modules(model: DeepseekV41, targets: list[str]) -> Iterator[str]:
    """The modules that the targets match. Raises ``ConfigError`` naming every target without any."""
    names = [name for name, _ in model.named_modules()]
    problems = []
    for target in targets:
        found = [name for name in names if re.fullmatch(LORA_TARGETS[target], name)]
        if not found:
            problems.append(problem("lora.targets", target, "this model has no such part", "Leave it out"))
        if target == "embed" and model.embed.shard.ranks.size > 1:
            rule = "not where the embedding is split over ranks"
            problems.append(problem("lora.targets", target, rule, "Use parallel.shard_embeddings=false"))
        yield from found
    if problems:
        raise ConfigError(problems)


def _mark(module: ExpertsLora) -> None:
    """Mark the adapter of split experts as split like them."""
    for weight in STACK:
        shard = getattr(getattr(module.base_layer, weight), "shard", None)
        if shard is not None:
            module.lora_A[NAME][weight].shard = module.lora_B[NAME][weight].shard = shard


@torch.no_grad()
def _draw(model: DeepseekV41, seed: int) -> None:
    """Initial values as `peft` draws them, but with a separate generator for each tensor and each expert."""
    for name, parameter in trained_parameters(model).items():
        drawn = ".lora_A." in name or ".lora_embedding_B." in name
        if not drawn:
            parameter.zero_()
        elif parameter.dim() == 3:
            shard = getattr(parameter, "shard", None)
            first = 0 if shard is None else shard.start
            for expert, part in enumerate(parameter):
                part.copy_(_start(f"{seed} {name} {first + expert}", part))
        else:
            parameter.copy_(_start(f"{seed} {name}", parameter))


def _start(key: str, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest()))
    if ".lora_embedding_B." in key:
        return torch.randn(like.shape, generator=generator)
    bound = like.shape[1] ** -0.5  # Kaiming uniform with a = sqrt(5), as for a linear layer
    return torch.rand(like.shape, generator=generator) * (2 * bound) - bound


def _tensors(model: DeepseekV41) -> Iterator[tuple[str, Tensor]]:
    """The adapter under `peft`'s names and in its shapes, on the CPU. All ranks call it together.

    `peft` nests the wrappers of a stack's three weights, w1 innermost. It has A [E * rank, in] expert by expert, and B
    [out, rank * E] with the columns of all experts next to each other.
    """
    for name, module in model.named_modules():
        if isinstance(module, ExpertsLora):
            for depth, weight in enumerate(reversed(STACK)):
                prefix = f"{PREFIX}{name}" + ".base_layer" * depth
                a, b = (_whole(part[NAME][weight]) for part in (module.lora_A, module.lora_B))
                yield f"{prefix}.lora_A.weight", a.flatten(0, 1).contiguous()
                yield f"{prefix}.lora_B.weight", b.permute(1, 2, 0).flatten(1).contiguous()
        elif isinstance(module, LoraLayer):
            for part in ("lora_embedding_A", "lora_embedding_B"):
                if NAME in getattr(module, part):
                    yield f"{PREFIX}{name}.{part}", _whole(getattr(module, part)[NAME])
            for part in ("lora_A", "lora_B"):
                if NAME in getattr(module, part):
                    yield f"{PREFIX}{name}.{part}.weight", _whole(getattr(module, part)[NAME].weight)


def _whole(parameter: nn.Parameter) -> Tensor:
    """The rows of all ranks."""
    shard = getattr(parameter, "shard", None)
    if shard is None:
        return parameter.detach().cpu()
    parts = [torch.empty_like(parameter) for _ in range(shard.ranks.size)]
    dist.all_gather(parts, parameter.detach().contiguous(), group=shard.ranks.group)
    return torch.cat(parts).cpu()


def _biases(model: DeepseekV41) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in model.named_buffers() if ".gate.bias" in name}
