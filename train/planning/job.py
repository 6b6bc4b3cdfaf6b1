"""Builds the part of a plan that does not depend on the layout: the model, its parameters, and its FLOPs per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from model import DeepseekV41, Drafter, ModelConfig, build_drafter, build_model, count
from model.build import is_table
from model.config import drafter_problems
from model.count import Flops
from train.build import build_optimizer, freeze
from train.config.compose import composed
from train.config.dspark import DsparkConfig
from train.config.plan import PlanConfig
from train.config.problems import ConfigError, problem
from train.config.schema import Config
from train.errors import user_errors
from train.planning.items import (
    ADAPTER,
    FP32,
    Parameter,
    adapter_parameters,
    frozen_parameters,
    stored_bytes,
    trained_parameters,
)

UNSPLIT = ("attention over keys", "index scores", "indexer loss")  # FLOPs of operations without weights


@dataclass(frozen=True, eq=False)
class Job:
    """The model of a run and the parameters that are trained, independent of the layout over GPUs.

    - parameters: all parameters, first the trained ones in the order of the optimizer;
    - costs: FLOPs per token for each part of the model;
    - teacher_bytes: bytes of the teacher, a frozen model that every process holds as a whole;
    - host_table_bytes: bytes of the Engram tables that stay in host memory, over all shards.
    """

    model: DeepseekV41
    drafter: Drafter | None
    dspark: DsparkConfig | None
    parameters: list[Parameter]
    costs: dict[str, Flops]
    teacher_bytes: int
    host_table_bytes: int = 0

    @cached_property
    def frozen(self) -> bool:
        """True if the weights of the model itself are not trained."""
        return all(p.method is None for p in self.parameters if p.part in ("embedding", "attention"))

    @cached_property
    def head_gradient(self) -> bool:
        """True if the loss computes a gradient for the whole output head."""
        return any(p.method for p in self.parameters if p.part == "head" or p.name.startswith("head."))

    @cached_property
    def copied(self) -> list[tuple[int, bool, bool, int]]:
        """The weights that bf16 autocast copies, each as a tuple (layer number, whether the weight belongs to routed
        experts, whether its rows are divided over ranks, number of elements). Packed weights are not in the list,
        because autocast does not copy them.
        """
        known = {p.name: p for p in self.parameters}
        copies = ((known[name], parameter.numel()) for name, parameter in count.autocast_copies(self.model))
        return [
            (int(count.layer_of(p.name)), p.part == "routed experts", p.divided, numel)
            for p, numel in copies
            if p.packing is None
        ]

    @cached_property
    def largest_packed(self) -> int:
        """Number of values of the largest packed matrix that is unpacked as a whole. Engram tables are left out,
        because only their looked-up rows are unpacked.
        """
        shapes = (p.shape for p in self.parameters if p.packing and p.part != "Engram tables")
        return max((prod(shape[-2:]) for shape in shapes), default=0)

    @cached_property
    def block_matrices(self) -> list[int]:
        """For each block, the number of elements in its dense matrices whose rows are divided over
        ``parallel.dense_shards`` ranks.
        """
        sizes = [0] * self.model.config.text.num_hidden_layers
        for p in self.parameters:
            if p.divided:
                sizes[int(count.layer_of(p.name))] += prod(p.shape)
        return sizes


def settings(config: Config) -> PlanConfig:
    """Return the section ``plan`` of the configuration, which only task=plan has."""
    assert config.plan is not None
    return config.plan


def as_planned(config: Config) -> Config:
    """Return the configuration that is planned: ``parallel.precision=auto`` becomes bf16 (fp32 on the CPU), and the row
    length is the longest that ``task.length_schedule`` reaches before ``task.tokens`` tokens are trained.
    """
    task = config.task.at(config.task.tokens - 1)
    return replace(config, task=task).with_precision("fp32" if config.parallel.device == "cpu" else "bf16")


def job_of(config: Config) -> Job:
    """Build the job that a configuration describes. Raises ``ConfigError`` if the model cannot be trained with this
    configuration.
    """
    kind = settings(config).job
    with user_errors():
        model = build_model(ModelConfig.from_dict(config.model), runtime=config.runtime, device="meta")
        costs = count.flops(model, config.task.seq_len, config.runtime.candidate_pool)
        packed = config.runtime.frozen == "packed"
        on_host = config.runtime.tables == "host" and (config.lora.on or kind == "dspark")
        drafter, dspark, teacher = None, None, 0
        if kind == "dspark":
            drafter, dspark = _drafter(model), DsparkConfig(**composed("task=dspark")["dspark"])
            optimizer = build_optimizer(replace(config, dspark=dspark), model.config, drafter)
            parameters = [*trained_parameters(drafter, optimizer), *frozen_parameters(model, packed, on_host)]
            costs = _drafter_costs(model, drafter, dspark, costs)
        elif config.lora.on:
            adapter = list(adapter_parameters(model, config.lora))
            parameters = [*adapter, *frozen_parameters(model, packed, on_host)]
            costs = _adapter_costs(model, adapter, costs)
        else:
            freeze(config, model)
            parameters = list(trained_parameters(model, build_optimizer(config, model.config, model)))
        if kind == "distill":
            teacher = _teacher_bytes(model, packed, 2 if config.parallel.precision == "bf16" else FP32)
    tables = (p for p in frozen_parameters(model, packed) if is_table(p.name))
    host_tables = sum(stored_bytes(p.shape, p.packing) for p in tables) if on_host else 0
    return Job(model, drafter, dspark, parameters, costs, teacher, host_tables)


def _drafter(model: DeepseekV41) -> Drafter:
    if found := drafter_problems(model.config.text):
        raise ConfigError([problem("plan.job", "dspark", f"the model has no drafter: {found[0]}", "Use another model")])
    return build_drafter(model)


def _adapter_costs(model: DeepseekV41, adapter: list[Parameter], costs: Mapping[str, Flops]) -> dict[str, Flops]:
    """Compute the FLOPs per token of a LoRA run, for each part of the model and for the adapter.

    A frozen matrix needs a matrix product in the forward pass and one for the gradient of its input, but none for the
    gradient of its weight. The LoRA factors need all three matrix products.
    """
    text = model.config.text
    share = text.num_experts_per_tok / text.n_routed_experts
    forward = sum(2.0 * prod(p.shape) * (share if len(p.shape) == 3 else 1) for p in adapter)
    found = {
        part: cost if part in UNSPLIT else cost._replace(step=max(cost.forward, cost.step - cost.forward))
        for part, cost in costs.items()
    }
    return found | {ADAPTER: Flops(forward, 3 * forward, forward)}


def _drafter_costs(
    model: DeepseekV41, drafter: Drafter, dspark: DsparkConfig, costs: Mapping[str, Flops]
) -> dict[str, Flops]:
    """Compute the FLOPs per token of drafter training, for each part: a forward pass of the model, and the forward and
    backward pass of the drafter.
    """
    text = model.config.text
    share = text.dspark_num_experts_per_tok / text.dspark_n_routed_experts
    drafts = text.dspark_block_size / dspark.tokens_per_anchor
    forward = 0.0
    for name, parameter in drafter.named_parameters():
        if parameter.dim() >= 2 and "markov_head.embed" not in name:
            used = share if count.part_of(name) == "routed experts" else 1.0
            forward += 2 * used * drafts * parameter.numel()
    head = 2.0 * drafts * text.vocab_size * text.hidden_size
    found = {part: Flops(cost.forward, cost.forward, 0.0) for part, cost in costs.items() if part != "head"}
    return found | {"drafter": Flops(forward, 3 * forward, forward), "head": Flops(2 * head, 5 * head, 0.0)}


def _teacher_bytes(model: DeepseekV41, packed: bool, width: int) -> int:
    """Return the bytes of a frozen teacher model that every process holds as a whole. packed: whether the weights stay
    in the quantised formats of the released checkpoint. width: bytes per value of the weights that are not packed.
    """
    parts = frozen_parameters(model, packed)
    return sum(stored_bytes(p.shape, p.packing) or width * prod(p.shape) for p in parts)
