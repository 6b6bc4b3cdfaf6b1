"""Builds every object of a run from the configuration: tokenizer, data loaders, model, optimizer and engine."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from tokenizers import Tokenizer
from torch.distributed.tensor import DTensor

from data import Stats, build_loaders, load_tokenizer, merge_positions, special_ids
from model import DeepseekV41, Drafter, ModelConfig, build_drafter, build_model, load_drafter
from model.build import allocate_model
from model.checkpoint.load import never_packed
from model.checkpoint.names import check_packable
from model.count import least_parameters
from model.engram import build_token_map
from model.packed import held_bytes
from model.parallel.ranks import RankGroup, rows_here
from optim import Optimizer, ParameterPlacement
from optim.ownership import RowGroups
from train.answers import own_answers
from train.checkpoint import run_state
from train.checkpoint.background import Background
from train.checkpoint.init_from import find_pretrained, frozen_packing, holds_drafter, load_pretrained_weights
from train.checkpoint.run_state import TrainerState
from train.config.dspark import DsparkConfig
from train.config.problems import ConfigError, problem
from train.config.rl import RlConfig
from train.config.schema import Config, TaskConfig
from train.distributed.dense import shard_dense
from train.distributed.engine import Engine
from train.distributed.world import World, axis_group, pick_device, settle_precision
from train.param_groups import (
    adamw_drafter_rules,
    adamw_rules,
    adapter_rules,
    drafter_rules,
    groups_of,
    report_rules,
)

Batch = dict[str, torch.Tensor]
MANY_EPOCHS = 10  # the log advises fewer tokens for a run that reads its training data more often than this


@dataclass
class Run:
    """All objects of one run in this process."""

    config: Config
    world: World
    tokenizer: Tokenizer
    model_config: ModelConfig
    model: Any  # the module that is trained: the language model, or with task=dspark a drafter
    optimizer: Optimizer
    engine: Engine
    train_batches: Any
    valid_batches: Any
    notes: list[str]  # lines for the log about decisions made while building

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches that this process computes in one step if rows have ``task.seq_len`` tokens."""
        return self.config.task.division_of_step(self.world.row_groups)[1]

    def autocast(self) -> torch.autocast:
        """Return a context in which the model computes in bf16 if ``parallel.precision`` is bf16; weights stay fp32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.parallel.precision == "bf16")

    def to_device(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the tensors of a batch, and its sequence layout if it has one, to the model's device. Copies from pinned
        memory are asynchronous.
        """
        return {
            name: value.to(self.device, non_blocking=True)
            if isinstance(value, torch.Tensor)
            else value.to(self.device)
            if name == "layout"
            else value
            for name, value in batch.items()
        }

    @property
    def rl(self) -> RlConfig:
        """The section ``rl`` of the configuration, which only task=rl and task=distill have."""
        assert self.config.rl is not None
        return self.config.rl

    @property
    def dspark(self) -> DsparkConfig:
        """The section ``dspark`` of the configuration, which only task=dspark has."""
        assert self.config.dspark is not None
        return self.config.dspark

    def lay_out(self, batch: Batch) -> dict[str, Any]:
        """Check a CPU batch and add its sequence layout (``layout``). For a model on a GPU, the result is in pinned
        memory. This method may be called in a background thread.
        """
        layout = self.model.lay_out(**batch)
        if self.device.type != "cuda":
            return {**batch, "layout": layout}
        return {**{name: tensor.pin_memory() for name, tensor in batch.items()}, "layout": layout.pinned()}

    def prepare(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Move a CPU batch and its sequence layout to the model's device. If the batch has no layout yet, ``lay_out``
        adds it first.
        """
        return self.to_device(batch if "layout" in batch else self.lay_out(dict(batch)))

    def source_counts(self) -> torch.Tensor | None:
        """Return, for each source of a mixture, this rank's number of tokens, rows, epochs and data streams, float64
        [sources, 4], to be summed over all ranks; None if there is no mixture, or if every rank counts the rows of all
        ranks.
        """
        counts = self.train_batches.counts()
        return None if counts is None else counts.to(self.device) * self.world.counts_rows

    def save(self, state: TrainerState, background: Background | None = None) -> Path:
        """Write the run state and return its folder. All ranks call this together.

        background: if given, the files are written while training continues.
        """
        return run_state.save(
            self.config.run_dir / "checkpoints",
            state,
            model=self.checkpoint_module,
            optimizer=self.optimizer,
            data=self.position(),
            model_config=self.model_config.to_dict(),
            keep=self.config.checkpoint.keep,
            background=background,
        )

    def resume(self, folder: Path) -> TrainerState:
        """Restore the run state from ``folder``, a checkpoint of this run, and return the counters."""
        positions: list[dict[str, Any]] = []
        state = run_state.load(
            folder,
            model=self.checkpoint_module,
            optimizer=self.optimizer,
            set_data=positions.append,
            model_config=self.model_config.to_dict(),
        )
        self.continue_at(self.config.task.at(state.tokens), positions[0])
        return state

    def position(self) -> dict[str, Any]:
        """Return the position of all ranks in the training data. All ranks call this together."""
        position = self.train_batches.state_dict()
        if "lanes" in position:  # each rank knows the place in its part of a stream only
            position = merge_positions(self.world.gather(position))
        return position

    def continue_at(self, task: TaskConfig, position: dict[str, Any]) -> None:
        """Continue reading the training data at ``position``, in rows of ``task.seq_len`` tokens. ``task`` holds the
        task's settings at some number of trained tokens (``TaskConfig.at``). If the row length changes, the data are
        opened again.
        """
        if self.config.task.length_schedule and task.seq_len != self.train_batches.seq_len:
            self.train_batches, _ = open_data(self.config, task, self.world, self.tokenizer, self.model_config, [])
        self.train_batches.load_state_dict(position)

    def memory(self) -> dict[str, int]:
        """Bytes of weights, gradients and optimizer state in this process, once every parameter has had an update."""
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        held = {"weights": parameters, "gradients": trained}
        sizes = {name: sum(held_bytes(rows_here(parameter)) for parameter in some) for name, some in held.items()}
        return sizes | {"optimizer state": self.optimizer.state_bytes()}

    @property
    def backbone(self) -> DeepseekV41:
        """The language model. With task=dspark it is frozen, and the drafter that belongs to it is trained."""
        return self.model.backbone if isinstance(self.model, Drafter) else self.model

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The language model, followed by the drafter if the run trains one."""
        return [self.backbone] if self.backbone is self.model else [self.backbone, self.model]

    @property
    def checkpoint_module(self) -> torch.nn.Module:
        """The module whose weights are saved in checkpoints; with LoRA it contains only the weights that change."""
        if not self.config.lora.on:
            return self.model
        from train.lora import inject

        return inject.Trained(self.model)


def build(config: Config, world: World | None = None, draw: bool = True) -> Run:
    """Build all objects of a run for this process.

    Args:
        world: the processes of the run; None means that this process is the only one.
        draw: whether the weights are initialised; if false, the caller must load every weight from a checkpoint.

    Raises:
        ConfigError: the tokenizer does not fit the model.
        ValueError: the data cannot be read (the message gives file, line and reason), or a parameter matches none of
            the optimizer's rules.
    """
    seed_everything(config.seed)
    world = world or World(pick_device(config.parallel.device))
    config = settle_precision(config, world.device)
    check_size(config, world.device)
    tokenizer = load_tokenizer(config.data, world.once)
    given = ModelConfig.from_dict(config.model)
    model_config, token_map, notes = fit_to_tokenizer(given, tokenizer)
    if config.init_from is not None and token_map is not None:
        check_engram(config.init_from, given, model_config)
    own = config.data.answers == "own"
    if not own:  # read before the model is made, which takes longer to fail
        train_batches, valid_batches = open_data(config, config.task, world, tokenizer, model_config, notes)
    world.start.mark("data")
    model: Any = make_model(config, model_config, token_map, world, draw)
    if config.checkpoint.export == "released":
        check_packable(model)
    if config.lora.on:
        notes += give_adapter(config, model)
    if config.dspark is not None:
        model, added = give_drafter(config, model)
        notes += added
    if own:
        answered, added = with_own_answers(config, model, tokenizer, world)
        notes += added
        train_batches, valid_batches = open_data(answered, config.task, world, tokenizer, model_config, notes)
    model.eval()  # train_step switches to training mode and back
    freeze(config, model)
    if world.dense_mesh is not None:
        shard_dense(model, world.dense_mesh, world.parallel.dense, config.parallel.precision == "bf16")
    optimizer = build_optimizer(config, model_config, model, world)
    world.start.mark("model")
    engine = Engine(world, model, optimizer)
    world.start.mark("optimizer and groups")
    return Run(config, world, tokenizer, model_config, model, optimizer, engine, train_batches, valid_batches, notes)


def check_size(config: Config, device: torch.device) -> None:
    """Refuse a model that cannot fit into memory.

    The needed memory is that of this process's weights and gradients in fp32; a frozen weight counts as half a byte.
    With ``parallel.dense_shards`` only the weights are counted: they are created whole and then split, but gradients
    are never whole.

    Raises:
        ConfigError: the message gives the memory that the model needs and the memory that the device has.
    """
    model, layout = ModelConfig.from_dict(config.model), config.parallel
    frozen = config.frozen_base
    size = 0.5 if frozen else 4 if layout.dense_shards > 1 else 8
    needed = least_parameters(model, layout.expert_parallel, layout.table_shards) * size
    if device.type == "cuda":
        present, where = torch.cuda.get_device_properties(device).total_memory, "GPU"
    else:
        present, where = psutil.virtual_memory().total, "machine"
    if needed > present:
        what = "weights and gradients" if size == 8 else "weights"
        needs = f"needs at least {needed / 2**30:,.0f} GiB a process for its {what}"
        remedy = "Use a smaller model, or split it (parallel.expert_parallel, parallel.table_shards)"
        raise ConfigError([f"model: {needs}; a {where} like this one has {present / 2**30:.0f} GiB. {remedy}"])


def make_model(
    config: Config, model_config: ModelConfig, token_map: torch.Tensor | None, world: World, draw: bool = True
) -> DeepseekV41:
    """Build the model with initialised weights.

    If the weights are read from a checkpoint later (without ``draw``, or because they stay frozen: LoRA, task=dspark),
    their memory is allocated but not initialised.
    """
    if draw and not config.frozen_base:
        return build_model(
            model_config,
            runtime=config.runtime,
            token_map=token_map,
            seed=config.seed,
            device=world.device,
            parallel=world.parallel,
            loss_weights=config.loss,
        )
    return allocate_model(
        model_config,
        config.runtime,
        token_map,
        world.device,
        torch.float32,
        world.parallel,
        config.loss,
        packing_of=frozen_packing(find_pretrained(config.initial_checkpoint), config.runtime.frozen)
        if config.frozen_base
        else never_packed,
    )


def epochs_text(tokens: int, epoch: int) -> str:
    """Return a log line that says how often a run of ``tokens`` tokens reads its training data of ``epoch`` tokens."""
    times = tokens / epoch
    advice = "; lower task.tokens if the validation loss rises" if times > MANY_EPOCHS else ""
    return f"the run reads the training data {times:,.2f} times (task.tokens={tokens}){advice}"


class NoLoader:
    """Replaces the data loader in tasks whose training text is generated by the model; it has no state to save."""

    def counts(self) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def open_data(
    config: Config, task: TaskConfig, world: World, tokenizer: Tokenizer, model_config: ModelConfig, notes: list[str]
) -> tuple[Any, Any]:
    """Return the loaders of training and of validation batches. Lines that describe the data are added to ``notes``.

    task: the task's settings, which give the row length of training batches; ``config.task`` gives that of held-out
    batches.
    """
    if config.rl is not None:
        return NoLoader(), NoLoader()
    train_batches, valid_batches = build_loaders(
        config.data,
        tokenizer,
        seq_len=config.task.seq_len,
        batch_rows=task.division_of_step(world.row_groups)[0] * world.row_groups,
        seed=config.seed,
        row_group=world.row_group,
        row_groups=world.row_groups,
        vision=None if model_config.vision is None else dataclasses.asdict(model_config.vision),
        step_rows=task.global_batch_rows,
        train_seq_len=task.seq_len,
        once=world.once,
    )
    notes += [f"train data: {train_batches.stats}", f"validation data: {valid_batches.stats}"]
    if isinstance(train_batches.stats, Stats) and not config.data.streaming:
        notes.append(epochs_text(config.task.tokens, train_batches.stats.tokens))
    return train_batches, valid_batches


def seed_everything(seed: int) -> None:
    """Seed the random generators of Python, NumPy and torch in this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def fit_to_tokenizer(config: ModelConfig, tokenizer: Tokenizer) -> tuple[ModelConfig, torch.Tensor | None, list[str]]:
    """Set the special token ids and the Engram vocabulary size of a model configuration to those of the tokenizer.

    A tokenizer trained on the run's own text has other ids than the released tokenizer. Returns the new configuration,
    the Engram token map (None without Engram), and a line for the log for each changed value.
    """
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > config.text.vocab_size:
        key, rule = "model.text_config.vocab_size", f"the tokenizer has {size} entries"
        raise ConfigError([problem(key, config.text.vocab_size, rule, f"Set it to {size} or more")])
    ids = special_ids(tokenizer)
    found = {"bos_token_id": ids.bos, "eos_token_id": ids.eos, "pad_token_id": ids.pad}
    changes: dict[str, Any] = {key: value for key, value in found.items() if value is not None}
    text_changes: dict[str, Any] = {**changes, "engram_pad_token_id": ids.pad}
    token_map = None
    if config.text.engram_layer_ids:
        token_map = build_token_map(tokenizer)
        text_changes["engram_compressed_vocab_size"] = int(token_map.max()) + 1
    if ids.image is not None:
        changes["image_token_id"] = ids.image
    fitted = dataclasses.replace(config, text=dataclasses.replace(config.text, **text_changes), **changes)
    notes = _changed("model.text_config", config.text, fitted.text, text_changes) + _changed(
        "model", config, fitted, changes
    )
    return fitted, token_map, notes


def check_engram(name: str, given: ModelConfig, fitted: ModelConfig) -> None:
    """Raise ``ConfigError`` if the Engram tables of a checkpoint were trained with another tokenizer than the
    checkpoint's own.
    """
    trained, found = (config.text.engram_compressed_vocab_size for config in (given, fitted))
    if trained != found:
        rule = f"its Engram tables were trained for {trained} compressed token ids, its tokenizer.json gives {found}"
        remedy = "Put the tokenizer.json that the checkpoint was trained with into its folder"
        raise ConfigError([problem("init_from", name, rule, remedy)])


def give_adapter(config: Config, model: DeepseekV41) -> list[str]:
    """Load the frozen base weights into ``model`` and add LoRA adapters to it. Returns lines for the log."""
    from train.lora import inject  # imported here since the import takes seconds

    origin = load_pretrained_weights(model, config.initial_checkpoint)
    inject.add_adapter(model, config.lora, config.seed)
    size = sum(whole_size(parameter) for parameter in inject.trained_parameters(model).values())
    return [f"weights: {origin}", f"adapter of {size:,} parameters: {', '.join(config.lora.targets)}"]


def give_drafter(config: Config, backbone: DeepseekV41) -> tuple[Drafter, list[str]]:
    """Load the frozen weights of ``backbone`` and build the drafter for it.

    Returns the drafter and lines for the log.
    """
    origin = load_pretrained_weights(backbone, config.initial_checkpoint)
    backbone.requires_grad_(False).eval()
    size = sum(map(whole_size, backbone.parameters()))
    notes = [f"backbone of {size:,} parameters, not trained: {origin}"]
    assert config.dspark is not None
    drafter, note = find_drafter(config, backbone, new=config.dspark.drafter is not None)
    return drafter, [*notes, note]


def find_drafter(config: Config, backbone: DeepseekV41, new: bool = False) -> tuple[Drafter, str]:
    """Load the drafter in the checkpoint ``init_from``, or build a new drafter if there is none or if ``new`` is true.

    Returns the drafter and a line for the log.
    """
    origin = find_pretrained(config.initial_checkpoint).folder
    if not new and holds_drafter(origin):
        return load_drafter(origin, backbone), f"drafter: its training continues from {origin}"
    return build_drafter(backbone, config.seed), "drafter: new"


def with_own_answers(config: Config, drafter: Drafter, tokenizer: Tokenizer, world: World) -> tuple[Config, list[str]]:
    """Return the configuration with the model's own answers as its data, and lines for the log; see
    ``train/answers.py``. A drafter loaded from ``init_from`` speeds up the generation of the answers; an untrained
    drafter is not used.
    """
    origin = find_pretrained(config.initial_checkpoint).folder
    trained = config.dspark is not None and config.dspark.drafter is None and holds_drafter(origin)
    data, notes = own_answers(config, drafter.backbone, drafter if trained else None, tokenizer, origin, world)
    return dataclasses.replace(config, data=data), notes


def whole_size(parameter: torch.Tensor) -> int:
    """Number of elements of a parameter over all processes; this process may hold only a part of them."""
    shard = getattr(parameter, "shard", None)
    return parameter.numel() if shard is None else shard.total * parameter.shape[1:].numel()


def freeze(config: Config, model: torch.nn.Module) -> None:
    """Set ``requires_grad=False`` on parameters that the configuration does not train; the optimizer ignores them."""
    if not config.runtime.train_indexer:
        for name, parameter in model.named_parameters():
            if ".indexer." in name:
                parameter.requires_grad_(False)


def build_optimizer(
    config: Config, model_config: ModelConfig, model: torch.nn.Module, world: World | None = None
) -> Optimizer:
    """Build the optimizer, with the table of ``train/param_groups.py`` that ``config.optim.rules`` names.

    world: the processes that share the optimizer's work; None means that this process is the only one.
    """
    optim = config.optim
    if config.lora.on and not isinstance(model, Drafter):
        rules = adapter_rules()
    elif isinstance(model, Drafter):
        switches: dict[str, Any] = {name: getattr(optim, name) for name in ("per_head", "tables", "tables_lr_factor")}
        rules = (
            drafter_rules(model_config, **switches) if optim.rules == "report" else adamw_drafter_rules(model_config)
        )
    elif optim.rules == "report":
        rules = report_rules(
            model_config,
            per_head=optim.per_head,
            tables=optim.tables,
            tables_lr_factor=optim.tables_lr_factor,
            engram_lr_factor=optim.engram_lr_factor,
        )
    else:
        rules = adamw_rules(model_config, engram_lr_factor=optim.engram_lr_factor)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    places = None if world is None or world.size == 1 else {name: placement_of(p, world) for name, p in trained}
    return Optimizer(groups_of(model, rules), optim.settings, places)


def placement_of(parameter: torch.nn.Parameter, world: World) -> ParameterPlacement:
    """Return which processes of ``world`` hold a parameter or a part of it."""
    shard = getattr(parameter, "shard", None)
    if isinstance(parameter, DTensor):
        assert world.dense_mesh is not None, "nothing else makes it a DTensor"
        rows = RowGroups(world.parallel.dense, axis_group(world.dense_mesh, "sets"))
        return ParameterPlacement(world.replica_groups[1], RankGroup(), parameter.numel(), rows)
    if shard is None:
        return ParameterPlacement(world.replica_groups[1], RankGroup(), parameter.numel())
    largest = -(-shard.total // shard.ranks.size) * parameter.shape[1:].numel()
    return ParameterPlacement(world.replica_groups[shard.ranks.size], shard.ranks, largest)


def _changed(section: str, before: Any, after: Any, keys: dict[str, Any]) -> list[str]:
    pairs = [(key, getattr(before, key), getattr(after, key)) for key in keys]
    return [f"{section}.{key}: {new} from the tokenizer (was {old})" for key, old, new in pairs if old != new]
