"""LoRA: trains low-rank factors that are added to frozen weights, with the library `peft` (only imported here).

Linear layers and the embedding get `peft`'s own LoRA layers. The three classes here are LoRA layers for modules that
`peft` does not support: the block-diagonal output projection, the output head (whose weight the chunked losses read
directly) and the stacked routed experts.

With LoRA a weight W [out, in] is replaced by W + alpha / rank * B A. A [rank, in] is initialised at random and B
[out, rank] with zeros. For an embedding [rows, dim], B [dim, rank] is initialised at random and A [rank, rows] with
zeros. Each expert has its own A and B. The A and B of all experts are stacked along the first dimension and split
over ranks like the experts; the sum W + B A is never computed for experts during training.

Adapters are saved in `peft`'s format: ``peft.PeftModel.from_pretrained(model, folder)`` adds a saved adapter to a plain
model.
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
    """Base class of the LoRA layers below. It holds the frozen layer and computes the change of its weight."""

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
        """Yield each weight of the frozen layer together with the matrix that the adapter adds to it."""
        product = self.lora_B[adapter].weight @ self.lora_A[adapter].weight
        yield self.base_layer.weight, product * self.scaling[adapter]

    @property
    def in_use(self) -> list[str]:
        """Names of the adapters that the forward pass currently adds."""
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
    """LoRA layer for a `GroupedLinear`. All groups share A, and each group has its own rows of B."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        for name in self.in_use:
            low = self.lora_A[name](self.lora_dropout[name](x))
            blocks = self.lora_B[name].weight.unflatten(0, (self.base_layer.groups, -1))
            y = y + self.scaling[name] * torch.einsum("tgr,gor->tgo", low, blocks.to(low.dtype))
        return y


class HeadLora(_Wrapper):
    """LoRA layer for the output head.

    Every rank stores the factors in full, even if the head itself is split over ranks. Dropout is not supported,
    because the losses read only the weight of the head and never call the layer.
    """

    def _get_in_out_features(self, module: Any) -> tuple[Any, Any]:
        return module.in_features, module.shard.total

    def changes(self, adapter: str) -> Iterator[tuple[Tensor, Tensor]]:
        for weight, change in super().changes(adapter):
            yield weight, change[self.base_layer.shard.start : self.base_layer.shard.stop]

    def full_weight(self) -> Tensor:
        """Return the whole weight of the head over all ranks with the adapter added, [rows, dim]."""
        weight = self.base_layer.full_weight()
        for name in self.in_use:
            weight = weight + self.scaling[name] * (self.lora_B[name].weight @ self.lora_A[name].weight)
        return weight

    def weight_and_shard(self) -> tuple[Tensor, None]:
        """Return the whole weight, and None for its shard (see `Head.weight_and_shard`)."""
        return self.full_weight(), None

    def forward(self, x: Tensor) -> Tensor:
        return logits(x, self.full_weight())


class ExpertsLora(_Wrapper):
    """LoRA layer for `Experts`, with factors lora_A.w1 [E, rank, in] and lora_B.w1 [E, out, rank] for the weight w1,
    and such a pair of factors for each of w2 and w3.
    """

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
        """Compute what the adapters add to the result of `Experts.linear` for one of the weights w1, w2 and w3."""
        total: Tensor | float = 0.0
        for name in self.in_use:
            # Grouped matrix products need rows of a multiple of 16 bytes, so zeros are appended
            missing = -self.r[name] % 8
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
    """The part of a LoRA model that training changes: the parameters of the adapter and the router biases.

    Checkpoints of a LoRA run contain only the tensors of this module, under their names in the model.
    """

    def __init__(self, model: DeepseekV41):
        super().__init__()
        self.model = model

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Tensor]:  # type: ignore[override]
        state = self.model.state_dict(keep_vars=keep_vars)
        return {name: tensor for name, tensor in state.items() if ".lora_" in name or ".gate.bias" in name}


def add_adapter(model: DeepseekV41, config: LoraConfig, seed: int) -> None:
    """Freeze `model` and add LoRA layers to it, in place.

    The initial values of the factors do not depend on the number of processes.

    Raises:
        ConfigError: a name in `lora.targets` matches no module of this model, or a module that does not support LoRA
            while it is split over ranks.
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
    """Return the parameters of the adapter by name."""
    return {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Context in which the model computes without its adapter; which parameters are trained does not change."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merge(model: nn.Module) -> None:
    """Add the adapter to the weights and remove the LoRA layers, in place."""
    wrappers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, module in wrappers.items():
        module.merge()
        parent, _, leaf = name.rpartition(".")
        if parent not in wrappers:  # `peft` nests several wrappers around one module
            base = module.get_base_layer()
            if isinstance(base, Experts):
                base.adapter = None
            setattr(model.get_submodule(parent), leaf, base)
    del model.peft_config


def save_adapter(model: DeepseekV41, folder: Path, base: str, biases: bool) -> None:
    """Save the adapter in `peft`'s format. All ranks call this together; rank 0 writes the files, all of them or none.

    Args:
        base: the checkpoint that the adapter belongs to; its name is stored in the adapter's configuration.
        biases: whether the run updated the router biases. `peft` does not support router biases, so they are saved in a
            separate file.
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
        for path in work.iterdir():  # `peft` creates files that only their owner can read
            path.chmod(0o644)


def _target_modules(model: DeepseekV41, targets: list[str]) -> Iterator[str]:
    """Return the names of the modules that the targets match.

    Raises:
        ConfigError: some targets match no module; the message names them.
    """
    names = [name for name, _ in model.named_modules()]
    problems = []
    for target in targets:
        found = [name for name in names if re.fullmatch(LORA_TARGETS[target], name)]
        if not found:
            problems.append(problem("lora.targets", target, "this model has no such part", "Leave that target out"))
        if target == "embed" and model.embed.shard.ranks.size > 1:
            rule = "cannot be used if the embedding is split over ranks (parallel.shard_embeddings)"
            problems.append(problem("lora.targets", target, rule, "Use parallel.shard_embeddings=false"))
        yield from found
    if problems:
        raise ConfigError(problems)


def _mark(module: ExpertsLora) -> None:
    """If the experts are split over ranks, mark the factors of the adapter as split in the same way."""
    for weight in STACK:
        shard = getattr(getattr(module.base_layer, weight), "shard", None)
        if shard is not None:
            module.lora_A[NAME][weight].shard = module.lora_B[NAME][weight].shard = shard


@torch.no_grad()
def _draw(model: DeepseekV41, seed: int) -> None:
    """Initialise the factors as `peft` does, but with a separate random generator for each tensor and each expert."""
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
    bound = like.shape[1] ** -0.5  # Kaiming uniform with a = sqrt(5), as torch initialises linear layers
    return torch.rand(like.shape, generator=generator) * (2 * bound) - bound


def _tensors(model: DeepseekV41) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the adapter with the names and shapes that `peft` uses, on the CPU.

    All ranks call this together. For stacked experts `peft` nests the wrappers of the three weights, w1 innermost. The
    factor A is stored as [E * rank, in], expert after expert; B as [out, rank * E], the expert index running fastest.
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
    """Return the whole parameter, with the rows of all ranks."""
    shard = getattr(parameter, "shard", None)
    if shard is None:
        return parameter.detach().cpu()
    parts = [torch.empty_like(parameter) for _ in range(shard.ranks.size)]
    dist.all_gather(parts, parameter.detach().contiguous(), group=shard.ranks.group)
    return torch.cat(parts).cpu()


def _biases(model: DeepseekV41) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in model.named_buffers() if ".gate.bias" in name}
