"""The configuration as dataclasses: names, types, and what each key means. No rules beyond a single value's.

Sections that another package defines are used as they are: ``runtime`` is ``model.ForwardOptions``, ``loss`` is
``model.LossWeights``, ``data`` is ``data.DataConfig``, ``optim.schedule`` and ``optim.settings`` are those of
``optim``. The ``model`` section is a released-style ``config.json``, checked by ``model.ModelConfig``.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from data import DataConfig
from model import ForwardOptions, LossWeights
from optim import Schedule, Settings
from train.config.dspark import DsparkConfig
from train.config.rl import RlConfig
from train.config.strict import STRICT
from train.config.tasks import known_task


def counted(number: int, noun: str) -> str:
    """``1 row``, ``2 rows``, ``4 processes``."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


@dataclass(config=STRICT, frozen=True)
class TaskConfig:
    """What is trained on, how much of it, and how a step is cut into forward passes.

    A step has the same ``global_batch_rows`` on any number of processes (see ``per_rank_batch``).
    """

    kind: Annotated[str, AfterValidator(known_task)]  # a task of train/config/tasks.py
    tokens: PositiveInt  # the run ends with the first step at which this many real (non-padding) tokens were trained on
    seq_len: Annotated[int, Field(ge=2)]  # tokens in a packed row
    micro_batch: PositiveInt  # the most rows in one forward pass of a process
    # Rows in one optimizer step, all processes together: a multiple of micro_batch. Null for task=rl and task=distill,
    # whose steps have as many rows as their responses fill.
    global_batch_rows: PositiveInt | None
    eval_every: PositiveInt  # optimizer steps between evaluations; first and last state are always evaluated
    sample_prompt: str  # continued (sft: answered) when the run is complete
    sample_tokens: NonNegativeInt
    sample_temperature: NonNegativeFloat  # 0 = greedy

    def per_rank_batch(self, world_size: int) -> tuple[int, int]:
        """(rows of a micro-batch, micro-batches in a step) of each of ``world_size`` processes.

        The processes share the step's micro-batches, then the rows of one: none runs more micro-batches, or more rows
        in one, than a single process would. Without ``global_batch_rows`` there is one micro-batch to share. Example:
        8 rows with ``micro_batch`` 1 on 4 processes are (1, 2); 2 rows with ``micro_batch`` 2 on 2 processes (1, 1).
        """
        count = 1 if self.global_batch_rows is None else self.global_batch_rows // self.micro_batch
        shared = math.gcd(count, world_size)
        return max(1, self.micro_batch // (world_size // shared)), count // shared

    def step_text(self, world_size: int) -> str:
        """What a step is, for people: "a step: 8 rows = 4 processes x 2 micro-batches x 1 row"."""
        rows, count = self.per_rank_batch(world_size)
        if self.global_batch_rows is None:
            return f"a step: the rows that its responses fill, in micro-batches of at most {counted(rows, 'row')}"
        factors = (counted(world_size, "process"), counted(count, "micro-batch"), counted(rows, "row"))
        return f"a step: {counted(self.global_batch_rows, 'row')} = {' x '.join(factors)}"


@dataclass(config=STRICT, frozen=True)
class OptimConfig:
    """Which method updates which parameter, how fast, and what surrounds the update."""

    rules: Literal["adamw", "report"]  # the table in train/param_groups.py
    per_head: bool  # report only: orthogonalise wq_b and the vision wqkv head by head
    tables: Literal["sinkhorn", "adamw"]  # report only: method of embedding, head and Engram tables
    tables_lr_factor: PositiveFloat  # report only: multiplies the tables' learning rate
    engram_lr_factor: PositiveFloat  # multiplies the Engram tables' learning rate
    schedule: Schedule  # lengths in tokens
    settings: Settings  # hyper-parameters of the methods
    clip: PositiveFloat  # global gradient norm
    # Router biases follow the load of each modality (separate), of both together (shared), or stay fixed (off).
    router_bias_mode: Literal["separate", "shared", "off"]
    router_bias_rate: NonNegativeFloat  # how far a router bias moves in a step


@dataclass(config=STRICT, frozen=True)
class LoraConfig:
    """Train low-rank factors beside the frozen weights instead of the weights; see ``train/lora/inject.py``."""

    targets: list[str]  # what gets factors: names in LORA_TARGETS of train/lora/targets.py; empty: no LoRA
    rank: PositiveInt
    alpha: PositiveFloat  # the factors' product is scaled by alpha / rank
    dropout: Annotated[float, Field(ge=0, lt=1)]  # on the input of the factors of linear layers and experts

    @property
    def on(self) -> bool:
        return bool(self.targets)


@dataclass(config=STRICT, frozen=True)
class CheckpointConfig:
    """When the run state is written, and how many are kept."""

    every: PositiveInt  # optimizer steps
    keep: PositiveInt
    asynchronous: bool  # copy the state into host memory and write it while training continues
    # Write the finished run's model as a checkpoint folder, <run>/export: in its own precision, or quantised as the
    # released one is.
    export: Literal[False, "plain", "released"]


@dataclass(config=STRICT, frozen=True)
class ParallelConfig:
    """Where the model runs and in which arithmetic. Several processes: train/distributed/__init__.py."""

    device: Literal["auto", "cpu", "cuda"]
    precision: Literal["fp32", "bf16"]  # bf16: autocast over fp32 parameters
    world_size: PositiveInt  # number of processes, one per GPU; they share the rows of a step
    expert_parallel: PositiveInt  # processes that the routed experts of a layer are split over
    table_shards: PositiveInt  # processes that the rows of an Engram table are split over
    shard_embeddings: bool  # split the token embedding and the head like the Engram tables
    gpu_memory_gib: PositiveFloat | None  # memory of one GPU, for the verdict of task=plan
    heartbeat_timeout: PositiveFloat  # seconds of silence after which a process counts as lost
    start_timeout: PositiveFloat  # seconds for all processes to start after the first
    collective_timeout: PositiveFloat  # seconds of one collective call; a lost process is noticed earlier


@dataclass(config=STRICT, frozen=True)
class LoggerConfig:
    """Where the numbers go besides ``train.log`` and ``metrics.jsonl``."""

    progress: bool  # progress bar, on a terminal only
    wandb: bool
    wandb_project: str


@dataclass(config=STRICT, frozen=True)
class Config:
    """A whole run. How to name a checkpoint for ``init_from``: see ``train/checkpoint/init_from.py``."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    output: str  # where run directories are made
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
    init_from: str | None  # start from the weights of this checkpoint, with its model and tokenizer

    @property
    def run_dir(self) -> Path:
        """The one directory this run writes to; the same configuration finds it again and resumes."""
        return Path(self.output) / self.name

    @property
    def frozen_base(self) -> bool:
        """Whether the weights of ``init_from`` stay as they are, below an adapter or a drafter."""
        return self.lora.on or self.dspark is not None

    @property
    def initial_checkpoint(self) -> str:
        """``init_from``, where the task or the method needs one."""
        assert self.init_from is not None
        return self.init_from


@dataclass(config=STRICT, frozen=True)
class SmallTask:
    """A task that needs no training configuration."""

    kind: str  # convert or merge


@dataclass(config=STRICT, frozen=True)
class Conversion:
    """``task=convert``: a checkpoint folder in another format. Sections used only in training are ignored."""

    task: SmallTask
    src: str  # a checkpoint folder
    dst: str  # a new folder
    format: Literal["released", "bf16"]
    adapter: str | None = None  # a folder with an adapter of that checkpoint, to be merged


@dataclass(config=STRICT, frozen=True)
class Merger:
    """``task=merge``: the weighted average of checkpoints. The sections of a training run are ignored."""

    task: SmallTask
    checkpoints: Annotated[list[str], Field(min_length=1)]  # each as for ``init_from``
    weights: list[float] | None  # one for each; null: equal shares
    dst: str  # a new folder
    format: Literal["plain", "released"]

    @property
    def shares(self) -> list[float]:
        """The weight of every checkpoint."""
        equal = [1 / len(self.checkpoints)] * len(self.checkpoints)
        return equal if self.weights is None else self.weights


@dataclass(config=STRICT, frozen=True)
class Asked:
    """What ``task=chat`` and ``task=generate`` have in common: a model, and how it answers."""

    task: SmallTask
    init_from: str  # a checkpoint folder, a run directory or one of its checkpoints
    device: Literal["auto", "cpu", "cuda"]
    thinking: bool  # whether it reasons before it answers
    effort: int | str  # low, high, max or 1 to 100; of a model that reasons
    system: str | None  # a text before the conversation
    max_tokens: PositiveInt  # of an answer, reasoning included
    temperature: NonNegativeFloat  # 0 = greedy
    top_p: Annotated[float, Field(gt=0, le=1)]  # of the likeliest tokens that are drawn from
    seed: NonNegativeInt


@dataclass(config=STRICT, frozen=True)
class Chat(Asked):
    """``task=chat``: a conversation with a model on the terminal."""


@dataclass(config=STRICT, frozen=True)
class Generation(Asked):
    """``task=generate``: answers to the prompts of a file."""

    prompts: str  # a file of records with prompt (what a user says), messages, or text (to be continued as it is)
    dst: str  # a JSONL file; what it already holds is not generated again
    batch: PositiveInt  # sequences at once


SMALL = {"convert": Conversion, "merge": Merger, "chat": Chat, "generate": Generation}
Small = Conversion | Merger | Chat | Generation


def to_dict(config: Config) -> dict[str, Any]:
    """Plain containers, as ``config.yaml`` stores them."""
    return json.loads(json.dumps(asdict(config), default=str))
