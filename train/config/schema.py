"""Configuration of a run: typed, checked as a whole before anything is built.

The values live in ``conf/`` (YAML, composed by Hydra); the dataclasses here hold only names, types and rules. Sections
that another package defines are used as they are: ``runtime`` is ``model.ForwardOptions``, ``loss`` is
``model.LossWeights``, ``data`` is ``data.DataConfig``, ``optim.schedule`` and
``optim.settings`` are those of ``optim``. The ``model`` section is a released-style ``config.json`` and is checked by
``model.ModelConfig``.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from data import DataConfig
from model import ForwardOptions, LossWeights, ModelConfig, TextConfig
from optim import Schedule, Settings
from train.checkpoint.init_from import find_pretrained
from train.config import moved
from train.config.dspark import DsparkConfig, with_drafter
from train.config.rl import RlConfig
from train.config.strict import STRICT
from train.errors import InputError
from train.lora.targets import LORA_TARGETS

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
GROUPS = {path.name for path in CONF_DIR.iterdir() if path.is_dir() and not path.name.startswith("_")}


@dataclass(config=STRICT, frozen=True)
class TaskConfig:
    """What is trained on, how much of it, and how a step is cut into forward passes.

    A step has the same ``global_batch_rows`` on any number of processes (see ``per_rank_batch``).
    """

    kind: Literal[
        "pretrain", "sft", "rl", "distill", "dspark", "plan", "check"
    ]  # plan: compute what the rest of this configuration costs; check: read its data
    tokens: PositiveInt  # the run ends with the first step at which this many real (non-padding) tokens were trained on
    seq_len: Annotated[int, Field(ge=2)]  # tokens in a packed row
    micro_batch: PositiveInt  # rows in one forward pass of a process, at most
    # Rows in one optimizer step, all processes together: a multiple of micro_batch. Null for task=rl and task=distill,
    # whose steps have as many rows as their responses fill.
    global_batch_rows: PositiveInt | None
    eval_every: PositiveInt  # optimizer steps between evaluations; first and last state are always evaluated
    sample_prompt: str  # continued once the run is complete
    sample_tokens: NonNegativeInt
    sample_temperature: NonNegativeFloat  # 0 = greedy

    def per_rank_batch(self, world_size: int) -> tuple[int, int]:
        """(rows of a micro-batch, micro-batches in a step) of each of ``world_size`` processes.

        The processes share the step's micro-batches, then the rows of one: none runs more micro-batches, or more rows
        in one, than a single process would. Without ``global_batch_rows`` there is one micro-batch to share.
        """
        count = 1 if self.global_batch_rows is None else self.global_batch_rows // self.micro_batch
        shared = math.gcd(count, world_size)
        return max(1, self.micro_batch // (world_size // shared)), count // shared


@dataclass(config=STRICT, frozen=True)
class OptimConfig:
    """Which method updates which parameter, how fast, and what surrounds the update."""

    rules: Literal["adamw", "report"]  # the table in train/param_groups.py
    per_head: bool  # report only: orthogonalise wq_b and the vision wqkv head by head
    tables: Literal["sinkhorn", "adamw"]  # report only: method of embedding, head and Engram tables
    tables_lr_factor: PositiveFloat  # report only: multiplies the tables' learning rate
    engram_lr_factor: PositiveFloat  # the Engram tables' own factor
    schedule: Schedule  # lengths in tokens
    settings: Settings  # hyper-parameters of the methods
    clip: PositiveFloat  # global gradient norm
    router_bias_mode: Literal["separate", "shared", "off"]  # router biases follow each modality, the total, nothing
    router_bias_rate: NonNegativeFloat  # step of the router biases


@dataclass(config=STRICT, frozen=True)
class LoraConfig:
    """Train low-rank factors beside the frozen weights instead of the weights; see ``train/lora/inject.py``."""

    targets: list[str]  # what gets factors: names in LORA_TARGETS of train/lora/targets.py; none: no LoRA
    rank: PositiveInt
    alpha: PositiveFloat  # the factors' product counts alpha / rank
    dropout: Annotated[float, Field(ge=0, lt=1)]  # of what the factors of linear layers and experts read

    @property
    def on(self) -> bool:
        return bool(self.targets)


@dataclass(config=STRICT, frozen=True)
class CheckpointConfig:
    """When the run state is written and how many of them stay."""

    every: PositiveInt  # optimizer steps
    keep: PositiveInt
    asynchronous: bool  # copy the state into host memory and write it while training goes on
    # Write the complete run's model as a checkpoint folder, <run>/export: in its own precision, or quantised as the
    # released one is.
    export: Literal[False, "plain", "released"]


@dataclass(config=STRICT, frozen=True)
class ParallelConfig:
    """Where and in which arithmetic the model runs. Several processes: train/distributed/engine.py."""

    device: Literal["auto", "cpu", "cuda"]
    precision: Literal["fp32", "bf16"]  # bf16: autocast over fp32 parameters
    world_size: PositiveInt  # processes, one a GPU; each has its own rows of a step
    expert_parallel: PositiveInt  # processes that the routed experts of a layer are split over
    table_shards: PositiveInt  # processes that the rows of an Engram table are split over
    shard_embeddings: bool  # split the token embedding and the head like the Engram tables
    gpu_memory_gib: PositiveFloat | None  # of one GPU; what task=plan compares with


@dataclass(config=STRICT, frozen=True)
class LoggerConfig:
    """Where the numbers go besides ``train.log`` and ``metrics.jsonl``."""

    progress: bool  # bar, shown on a terminal only
    wandb: bool
    wandb_project: str


@dataclass(config=STRICT, frozen=True)
class Config:
    """A whole run. The name of a checkpoint for ``init_from``: see ``train/checkpoint/init_from.py``."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    output: str  # run directories are made in here
    seed: NonNegativeInt
    task: TaskConfig
    model: dict[str, Any]
    runtime: ForwardOptions
    loss: LossWeights
    optim: OptimConfig
    data: DataConfig
    lora: LoraConfig
    checkpoint: CheckpointConfig
    parallel: ParallelConfig
    logger: LoggerConfig
    rl: RlConfig | None  # task=rl and task=distill only
    dspark: DsparkConfig | None  # task=dspark only
    init_from: str | None  # begin with the weights of this checkpoint, and take its model and its tokenizer

    @property
    def run_dir(self) -> Path:
        """The one directory this run writes to; the same configuration finds it again and resumes."""
        return Path(self.output) / self.name


@dataclass(config=STRICT, frozen=True)
class SmallTask:
    """A task that needs no training configuration."""

    kind: Literal["convert", "merge"]


@dataclass(config=STRICT, frozen=True)
class Conversion:
    """``task=convert``: a checkpoint folder in another format. The sections of a training run are not looked at."""

    task: SmallTask
    src: str  # a checkpoint folder
    dst: str  # a new folder
    format: Literal["released", "bf16"]
    adapter: str | None = None  # a folder with an adapter of that checkpoint, to be merged into it


@dataclass(config=STRICT, frozen=True)
class Merger:
    """``task=merge``: the weighted average of checkpoints. The sections of a training run are not looked at."""

    task: SmallTask
    checkpoints: Annotated[list[str], Field(min_length=1)]  # each as for ``init_from``
    weights: list[float] | None  # of each; None: equal shares
    dst: str  # a new folder
    format: Literal["plain", "released"]

    @property
    def shares(self) -> list[float]:
        """The weight of every checkpoint."""
        equal = [1 / len(self.checkpoints)] * len(self.checkpoints)
        return equal if self.weights is None else self.weights

    def problems(self) -> Iterator[str]:
        """What is wrong with the weights."""
        remedy = "Correct them, or leave them out for equal shares"
        if len(self.shares) != len(self.checkpoints):
            rule = f"{len(self.checkpoints)} checkpoints need as many weights"
            yield problem("weights", self.weights, rule, remedy)
        elif abs(math.fsum(self.shares) - 1) > 1e-9:
            rule = f"their sum is {math.fsum(self.shares):.12g}, must be 1"
            yield problem("weights", self.weights, rule, remedy)


SMALL = {"convert": Conversion, "merge": Merger}


class ConfigError(InputError):
    """The configuration cannot be used. The message lists every problem found: key, value, rule, remedy; and below
    them what is common to all, if anything.
    """

    def __init__(self, problems: list[str], common: str = ""):
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"{count} in the configuration:", *(f"  - {problem}" for problem in problems), common]
        super().__init__("\n".join(filter(None, lines)))


def problem(key: str, value: object, rule: str, remedy: str) -> str:
    """One line of a ``ConfigError``."""
    return f"{key} = {_shown(value)}: {rule}. {remedy}"


def open_overrides(arguments: list[str]) -> list[str]:
    """Let Hydra accept ``key=value`` for any key, so that ``parse`` sees unknown keys and reports them with the rest.

    Group choices (``model=tiny``), explicit ``+key=``, ``~key`` and flags pass unchanged.
    """

    def is_value(argument: str) -> bool:
        key, equals, _ = argument.partition("=")
        return bool(equals) and key[:1].isalpha() and key.split("@")[0] not in GROUPS

    return [f"++{argument}" if is_value(argument) else argument for argument in arguments]


def parse(raw: DictConfig | Mapping[str, Any]) -> Config | Conversion | Merger:
    """The typed configuration of a composed tree.

    Raises:
        ConfigError: listing every unknown key, missing key, wrong type and broken rule at once.
    """
    task = raw.get("task")
    small = SMALL.get(task.get("kind")) if isinstance(task, Mapping) else None
    if small is not None:  # a training run's sections may refer to settings that this task does not have
        unused = {field.name for field in fields(Config)} - {"task"}
        raw = {key: raw[key] for key in raw if key not in unused}
    elif isinstance(raw.get("init_from"), str):
        raw = _with_pretrained(raw)
    try:
        tree = OmegaConf.to_container(OmegaConf.create(raw), resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere
        raise ConfigError(
            [f"{error.full_key}: {str(error.msg).splitlines()[0]}. Correct the ${{...}} reference"]
        ) from None
    if small is not None:
        return _parse_small(tree, small)
    config, problems, bad_keys = _convert(tree)
    if config is not None:
        problems += [text for keys, text in _cross_checks(config) if not keys & bad_keys]
    if problems:
        raise ConfigError(problems)
    assert config is not None
    return config


def _with_pretrained(raw: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The tree with the model and the tokenizer of the checkpoint in ``init_from``."""
    tree = OmegaConf.to_container(OmegaConf.create(raw), resolve=False)
    try:
        origin = find_pretrained(tree["init_from"])
    except ValueError as error:
        raise ConfigError([problem("init_from", tree["init_from"], str(error), "Correct the path")]) from None
    data = tree.get("data")
    if isinstance(data, dict):
        if data.get("tokenizer", "train") != "train":
            rule, remedy = "the tokenizer of init_from is used, no other fits its weights", "Leave data.tokenizer out"
            raise ConfigError([problem("data.tokenizer", data["tokenizer"], rule, remedy)])
        data["tokenizer"] = str(origin.tokenizer)
    model, section = origin.model, tree.get("dspark")
    drafter = section.get("drafter") if isinstance(section, dict) else None
    if isinstance(drafter, dict):
        try:
            model = with_drafter(model, drafter)
        except ValueError as error:
            raise ConfigError([problem("dspark.drafter", drafter, str(error), "Correct it")]) from None
    return {**tree, "model": model}


def _parse_small(tree: dict[str, Any], whole: type[Conversion] | type[Merger]) -> Conversion | Merger:
    try:
        config = TypeAdapter(whole).validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        paths = [[str(part) for part in entry["loc"]] for entry in errors]
        raise ConfigError(
            [text for path, entry in zip(paths, errors, strict=True) for text in _describe(path, entry, whole)]
        ) from None
    problems = list(config.problems()) if isinstance(config, Merger) else []
    if problems:
        raise ConfigError(problems)
    return config


def _convert(tree: dict[str, Any]) -> tuple[Config | None, list[str], set[str]]:
    """Typed configuration, problems, and the keys that have one.

    When single values are wrong they are set aside and the rest is converted again, so that the rules between keys are
    checked in the same pass; the configuration returned is then good for checking only.
    """
    adapter = TypeAdapter(Config)
    try:
        return adapter.validate_json(json.dumps(tree), strict=True), [], set()
    except ValidationError as error:
        errors = error.errors(include_url=False)
    problems, bad_keys = [], set()
    for entry in errors:
        path = [str(part) for part in entry["loc"]]
        bad_keys.add(".".join(path))
        problems += _describe(path, entry)
    return _salvage(adapter, tree, errors), problems, bad_keys


def _salvage(adapter: TypeAdapter, tree: dict[str, Any], errors: list) -> Config | None:
    """``tree`` with every wrong value replaced by the one in ``conf/`` or dropped; None where that does not help."""
    repaired, reference = json.loads(json.dumps(tree)), _reference()
    for entry in errors:
        node, fallback = repaired, reference
        *parents, leaf = entry["loc"]
        for part in parents:
            node = node[part] if isinstance(node, list) or part in node else {}
            fallback = fallback.get(part, {}) if isinstance(fallback, dict) else {}
        if isinstance(node, list):
            return None
        node.pop(leaf, None)
        if isinstance(fallback, dict) and leaf in fallback:
            node[leaf] = fallback[leaf]
    try:
        return adapter.validate_json(json.dumps(repaired), strict=True)
    except ValidationError:
        return None


def _describe(path: list[str], entry: dict[str, Any], whole: type = Config) -> list[str]:
    """The problems behind one pydantic error: several when a section checked itself and found several."""
    key = ".".join(path)
    if entry["type"] == "unexpected_keyword_argument":
        known = _known_keys(path[:-1], whole)
        if whole is Config and len(path) == 1:
            known += sorted(GROUPS - set(known))
        if moved.remedy(key):
            return [problem(key, entry["input"], "this key has moved", str(moved.remedy(key)))]
        close = difflib.get_close_matches(path[-1], known, n=1)
        section = ".".join(path[:-1]) or "the top level"
        remedy = (
            f"Did you mean {'.'.join([*path[:-1], close[0]])}?" if close else f"Known in {section}: {', '.join(known)}"
        )
        return [problem(key, entry["input"], "no such key", remedy)]
    if entry["type"] in ("missing", "missing_argument"):
        return [f"{key} is missing. Give it a value: {key}=..."]
    if entry["input"] == "???":
        return [f"{key} has no value yet. Give it one: {key}=..."]
    if entry["type"] == "value_error":
        header, *lines = str(entry["ctx"]["error"]).splitlines()
        whole_line = header if header.startswith(f"{key}.") else f"{key}: {header}"
        return [f"{key}.{line.strip(' -')}" for line in lines] or [whole_line]
    rule, value, remedy = entry["msg"].replace("Input should", "should"), entry["input"], "Correct the value"
    if entry["type"] == "list_type":
        rule, remedy = "should be a list", f"Write it in brackets: {key}=[{value}]"
    elif entry["type"] == "int_type" and isinstance(value, float) and value.is_integer():
        remedy = f"Write {int(value)}"
    elif entry["type"] == "string_pattern_mismatch":
        rule = "should be letters, digits, '.', '_' and '-', the first a letter or a digit"
    return [problem(key, value, rule, remedy)]


def _known_keys(path: list[str], whole: type) -> list[str]:
    """Field names of the section at ``path`` of the configuration ``whole``."""
    schema = TypeAdapter(whole).json_schema()
    node = schema
    for part in path:
        node = node.get("properties", {}).get(part) or node.get("items", {})  # of a list: any number
        reference = node.get("$ref") or next(
            (option["$ref"] for option in node.get("anyOf", []) if "$ref" in option), None
        )
        node = schema["$defs"][reference.rsplit("/", 1)[-1]] if reference else node
    return list(node.get("properties", {}))


def _reference(*choices: str) -> dict[str, Any]:
    """The plain default configuration: stands in for wrong values while the other rules are checked."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    if GlobalHydra.instance().is_initialized():
        return OmegaConf.to_container(compose("train", overrides=list(choices)), resolve=True)
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return OmegaConf.to_container(compose("train", overrides=list(choices)), resolve=True)


def _cross_checks(config: Config) -> Iterator[tuple[set[str], str]]:
    """Rules between keys: (keys involved, problem)."""
    yield from _model_checks(config)
    yield from _optim_checks(config.optim)
    yield from _lora_checks(config)
    for text in config.data.problems():
        text = text if text.startswith("data.") else f"data.{text}"
        yield {text.partition("=")[0]}, text
    if config.task.kind == "sft" and config.data.source != "chat":
        rule, remedy = "task=sft trains on conversations", "Use data=chat data.paths=[...]"
        yield {"data.source"}, problem("data.source", config.data.source, rule, remedy)
    if config.task.kind in ("sft", "rl", "distill", "dspark") and config.init_from is None:
        rule = f"task={config.task.kind} starts from a checkpoint"
        yield {"init_from"}, problem("init_from", None, rule, "Name its folder or a run directory: init_from=...")
    yield from _rl_checks(config)
    yield from _dspark_checks(config)
    yield from _parallel_checks(config.parallel, config.task)


def _parallel_checks(parallel: ParallelConfig, task: TaskConfig) -> Iterator[tuple[set[str], str]]:
    if parallel.device == "cuda" and not torch.cuda.is_available():
        rule, remedy = "no CUDA device is present", "Use parallel.device=auto or cpu"
        yield {"parallel.device"}, problem("parallel.device", "cuda", rule, remedy)
    rows, ranks, writes = task.global_batch_rows, parallel.world_size, task.kind in ("rl", "distill")
    if (rows is None) != writes:
        rule = f"must be null with task={task.kind}" if writes else f"is what task={task.kind} needs"
        remedy = "A step has the rows that its responses fill" if writes else "Set the rows of a step"
        yield {"task.global_batch_rows", "task.kind"}, problem("task.global_batch_rows", rows, rule, remedy)
    elif rows is not None and rows % math.lcm(task.micro_batch, ranks):
        rule = f"must be a multiple of task.micro_batch = {task.micro_batch} and of parallel.world_size = {ranks}"
        keys = {"task.micro_batch", "task.global_batch_rows", "parallel.world_size"}
        remedy = f"The next is {-(-rows // math.lcm(task.micro_batch, ranks)) * math.lcm(task.micro_batch, ranks)}"
        yield keys, problem("task.global_batch_rows", rows, rule, remedy)
    for key in ("expert_parallel", "table_shards"):
        if ranks % getattr(parallel, key):
            rule = f"must divide parallel.world_size = {ranks}"
            value, remedy = getattr(parallel, key), "Choose a divisor"
            yield {f"parallel.{key}", "parallel.world_size"}, problem(f"parallel.{key}", value, rule, remedy)
    if parallel.shard_embeddings and parallel.table_shards == 1:
        rule, remedy = "has no effect with parallel.table_shards = 1", "Raise that, or leave it out"
        keys = {"parallel.shard_embeddings", "parallel.table_shards"}
        yield keys, problem("parallel.shard_embeddings", True, rule, remedy)


def _rl_checks(config: Config) -> Iterator[tuple[set[str], str]]:
    kind, parallel = config.task.kind, config.parallel
    writes = kind in ("rl", "distill")
    if (config.rl is None) == writes:
        rule = f"is what task={kind} needs" if writes else f"has no effect with task={kind}"
        yield {"rl", "task.kind"}, problem("rl", None if writes else "...", rule, "Use task=rl, or leave it out")
    if config.rl is None:
        return
    for text in config.rl.problems(kind, parallel.world_size, config.task.seq_len):
        yield {"rl", "parallel.world_size", "task.seq_len"}, f"rl.{text}"
    if config.task.sample_tokens:
        rule, remedy = "has no effect with task=rl and task=distill, which evaluate responses", "Leave it out"
        yield {"task.sample_tokens"}, problem("task.sample_tokens", config.task.sample_tokens, rule, remedy)
    if config.lora.dropout:
        rule = "responses would be written by another policy than is trained"
        yield {"lora.dropout"}, problem("lora.dropout", config.lora.dropout, rule, "Use 0")
    for key in ("expert_parallel", "table_shards"):
        if getattr(parallel, key) > 1 and config.rl.rollout is None:
            rule = "a process that writes responses must hold the whole model"
            value, remedy = getattr(parallel, key), "Use 1, or servers (rollout=sglang); world_size may be more"
            yield {f"parallel.{key}"}, problem(f"parallel.{key}", value, rule, remedy)
    if config.rl.rollout is not None and config.lora.on:
        rule, remedy = "servers are given whole weights, not an adapter", "Use rollout=local, or leave lora out"
        yield {"lora.targets", "rl"}, problem("lora.targets", config.lora.targets, rule, remedy)


def _dspark_checks(config: Config) -> Iterator[tuple[set[str], str]]:
    drafts = config.task.kind == "dspark"
    if (config.dspark is None) == drafts:
        rule = "is what task=dspark needs" if drafts else f"has no effect with task={config.task.kind}"
        yield (
            {"dspark", "task.kind"},
            problem("dspark", None if drafts else "...", rule, "Use task=dspark, or leave it out"),
        )
    if config.dspark is None:
        return
    for text in config.dspark.problems(config.model, config.parallel.expert_parallel) if config.init_from else ():
        yield {"dspark", "model", "parallel.expert_parallel"}, text
    if config.lora.on:
        rule = "the backbone of a drafter is not trained"
        yield {"lora.targets"}, problem("lora.targets", config.lora.targets, rule, "Leave lora out")
    if config.task.sample_tokens:
        rule = "has no effect with task=dspark, which trains no model that continues a text"
        yield {"task.sample_tokens"}, problem("task.sample_tokens", config.task.sample_tokens, rule, "Leave it out")


def _model_checks(config: Config) -> Iterator[tuple[set[str], str]]:
    known = [*ModelConfig().to_dict(), "quantization_config"]
    misplaced = {field.name for field in fields(TextConfig)}  # ModelConfig names these; other keys it carries along
    # The config.json of others has more keys, which are carried along.
    foreign = set() if config.init_from else config.model.keys() - set(known) - misplaced
    for key in sorted(foreign):
        close = difflib.get_close_matches(key, known, n=1)
        remedy = f"Did you mean model.{close[0]}?" if close else f"Known in model: {', '.join(known)}"
        yield {"model"}, problem(f"model.{key}", config.model[key], "no such key", remedy)
    try:
        text = ModelConfig.from_dict(config.model).text
    except ValueError as error:
        for line in str(error).splitlines()[1:] or [str(error)]:
            yield {"model"}, f"model.{line.strip()}"
        return
    if text.n_routed_experts % config.parallel.expert_parallel:
        rule = f"must divide model.text_config.n_routed_experts = {text.n_routed_experts}"
        value, remedy = config.parallel.expert_parallel, "Choose a divisor"
        yield {"parallel.expert_parallel"}, problem("parallel.expert_parallel", value, rule, remedy)
    if config.task.seq_len > text.max_position_embeddings:
        rule = f"longer than model.text_config.max_position_embeddings = {text.max_position_embeddings}"
        remedy = "Shorten the rows or raise max_position_embeddings"
        yield {"task.seq_len"}, problem("task.seq_len", config.task.seq_len, rule, remedy)
    if config.data.tokenizer == "train" and config.data.vocab_size > text.vocab_size:
        rule = f"more entries than model.text_config.vocab_size = {text.vocab_size}"
        yield {"data.vocab_size"}, problem("data.vocab_size", config.data.vocab_size, rule, "Make them equal")


def _optim_checks(optim: OptimConfig) -> Iterator[tuple[set[str], str]]:
    """What only the report's rules look at must not seem to change a run with AdamW's."""
    if optim.rules == "report":
        return
    for key, neutral in (("per_head", True), ("tables", "sinkhorn"), ("tables_lr_factor", 1.0)):
        if getattr(optim, key) != neutral:
            rule = f"has no effect with optim.rules = {_shown(optim.rules)}"
            remedy = "Leave it out, or use optim=report"
            yield {"optim.rules", f"optim.{key}"}, problem(f"optim.{key}", getattr(optim, key), rule, remedy)


def _lora_checks(config: Config) -> Iterator[tuple[set[str], str]]:
    lora = config.lora
    for target in lora.targets:
        if target not in LORA_TARGETS:
            close = difflib.get_close_matches(target, LORA_TARGETS, n=1)
            remedy = f"Did you mean {close[0]}?" if close else f"Known: {', '.join(LORA_TARGETS)}"
            yield {"lora.targets"}, problem("lora.targets", target, "no such target", remedy)
    if len(set(lora.targets)) < len(lora.targets):
        yield {"lora.targets"}, problem("lora.targets", lora.targets, "names one twice", "Name each once")
    if not lora.on:
        return
    if config.task.kind == "plan":
        yield {"lora.targets"}, problem("lora.targets", lora.targets, "task=plan knows no LoRA", "Leave lora out")
    if config.init_from is None and config.task.kind != "plan":
        rule, remedy = "an adapter belongs to trained weights, and there are none", "Name a checkpoint: init_from=..."
        yield {"lora.targets", "init_from"}, problem("lora.targets", lora.targets, rule, remedy)
    if config.optim.rules != "adamw":
        rule = "has no effect: an adapter is trained by AdamW"
        yield {"optim.rules"}, problem("optim.rules", config.optim.rules, rule, "Use optim=adamw")
    if "indexer" in lora.targets and not config.runtime.train_indexer:
        rule, remedy = "with runtime.train_indexer = false it is not trained", "Leave one of them out"
        yield {"lora.targets", "runtime.train_indexer"}, problem("lora.targets", "indexer", rule, remedy)


# A run may continue with other values of these; a change of anything else would make it another run.
CHANGEABLE = (
    "task.tokens",
    "task.eval_every",
    "task.sample_",
    "rl.eval_",
    "rl.reward_",
    "rl.rollout.",
    "data.cache_dir",
    "data.paths",  # another place of the same data: the loader refuses to continue with other content
    "data.validation_paths",
    "checkpoint.",
    "logger.",
    "output",
    "parallel.device",
    "parallel.world_size",
    "parallel.expert_parallel",
    "parallel.table_shards",
    "parallel.shard_embeddings",
    "parallel.gpu_memory_gib",
    "runtime.recompute",
    "runtime.frozen",
    "optim.schedule.",
    "optim.settings.",
    "optim.clip",
    "optim.router_bias_rate",
)


def differences(saved: Mapping[str, Any], config: Config) -> list[tuple[str, Any, Any]]:
    """Keys whose value in a saved configuration differs from ``config``: (key, saved value, new value)."""
    old, new = dict(flatten(saved)), dict(flatten(to_dict(config)))
    return [
        (key, old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    ]


def check_resumable(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Changes to report when the run in ``config.run_dir`` continues under ``config``. A setting that there was none of
    when the run was saved counts as saved with its default.

    Raises:
        ConfigError: naming every key whose change would not continue that run but make another one.
    """
    saved = moved.upgraded(saved)
    complete = _completed(saved, config.task.kind)
    changed = differences(saved, config) if complete is None else differences(to_dict(complete), _whole_model(config))
    shown = {key: f"{key}: {_shown(old, 1000)} -> {_shown(new, 1000)}" for key, old, new in changed}
    fatal = [text for key, text in shown.items() if not key.startswith(CHANGEABLE)]
    if fatal:
        raise ConfigError(
            fatal,
            f"The run in {config.run_dir} was trained with the first values and cannot continue with the second ones. "
            "Restore them, or start another run with name=...",
        )
    return list(shown.values())


def _completed(saved: Mapping[str, Any], kind: str) -> Config | None:
    """A saved configuration of task ``kind`` with today's defaults for what it lacks; None if it has what is gone."""
    tree = _overlaid(_reference(f"task={kind}"), saved)
    tree["model"] = saved.get("model")  # not laid over another one
    try:
        return _whole_model(TypeAdapter(Config).validate_json(json.dumps(tree), strict=True))
    except ValueError:
        return None


def _whole_model(config: Config) -> Config:
    """With every key of the model, also those that were left to their defaults."""
    return replace(config, model=ModelConfig.from_dict(config.model).to_dict())


def _overlaid(tree: Any, values: Any) -> Any:
    if not isinstance(tree, Mapping) or not isinstance(values, Mapping):
        return values
    return {**tree, **{key: _overlaid(tree.get(key), value) for key, value in values.items()}}


def to_dict(config: Config) -> dict[str, Any]:
    """Plain containers, as ``config.yaml`` stores them."""
    return json.loads(json.dumps(asdict(config), default=str))


def flatten(tree: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, leaf) pairs of nested mappings; a list is a leaf."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def _shown(value: object, limit: int = 80) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 3] + "..."
