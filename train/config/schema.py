"""The configuration as dataclasses: name, type and meaning of every key, and rules that concern a single value.

Some sections are dataclasses of other packages: ``runtime`` is ``model.ForwardOptions``, ``loss`` is
``model.LossWeights``, ``data`` is ``data.DataConfig``, ``optim.schedule`` and ``optim.settings`` are dataclasses of the
package ``optim``. The ``model`` section has the layout of the released ``config.json``; ``model.ModelConfig`` checks
it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from data import DataConfig
from model import ForwardOptions, LossWeights
from optim import Schedule, Settings
from train.config.distill_data import DistillDataConfig
from train.config.dpo import DpoConfig
from train.config.dspark import DsparkConfig
from train.config.evaluation import EvalEntry
from train.config.plan import PlanConfig
from train.config.rl import RlConfig
from train.config.strict import STRICT
from train.config.tasks import known_task


def counted(number: int, noun: str) -> str:
    """Format a number with its noun in singular or plural: ``1 row``, ``2 rows``, ``4 processes``."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


@dataclass(config=STRICT, frozen=True)
class LongerRows:
    """An entry of ``task.length_schedule``: rows have ``seq_len`` tokens once ``tokens`` tokens have been trained."""

    tokens: PositiveInt
    seq_len: Annotated[int, Field(ge=2)]


@dataclass(config=STRICT, frozen=True)
class TaskConfig:
    """The task, the length of the run, the batch size of a step, evaluation, and the sample text at the end.

    A step has ``global_batch_rows`` rows, whatever the number of processes (see ``division_of_step``).
    """

    kind: Annotated[str, AfterValidator(known_task)]  # name of a task in train/config/tasks.py
    tokens: PositiveInt  # the run ends after the step in which it has trained on this many tokens (without padding)
    seq_len: Annotated[int, Field(ge=2)]  # number of tokens in a packed row
    # task=pretrain only: longer rows from a number of trained tokens on, as a list of {tokens, seq_len}. The tokens of
    # a step stay the same: of rows n times as long, a step has n times fewer, and so has a micro-batch, down to one.
    # Held-out rows keep the length task.seq_len, and a document with images must fit into a row of that length.
    length_schedule: list[LongerRows]
    micro_batch: PositiveInt  # largest number of rows in one forward pass of a process
    # Rows in one optimizer step over all processes: a multiple of micro_batch, and of the number of processes or of
    # groups of processes that share rows. Null for task=rl and task=distill, where the responses of a step determine
    # the number of rows.
    global_batch_rows: PositiveInt | None
    eval_every: PositiveInt  # optimizer steps between evaluations; the initial and final weights are always evaluated
    sample_prompt: str  # when the run is complete, the model continues this text (task=sft: answers it)
    sample_tokens: NonNegativeInt  # length of the sample text in tokens; 0: no sample
    sample_temperature: NonNegativeFloat  # sampling temperature of the sample text; 0: greedy
    eval_tasks: list[EvalEntry]  # tasks that every evaluation also measures: names, or sections with settings

    def at(self, tokens: int) -> TaskConfig:
        """Return a copy of the task with the row length and the row counts that ``length_schedule`` prescribes once
        ``tokens`` tokens have been trained, and with an empty ``length_schedule``.
        """
        reached = [self.seq_len, *(entry.seq_len for entry in self.length_schedule if entry.tokens <= tokens)]
        return self.with_length(reached[-1])

    def with_length(self, seq_len: int) -> TaskConfig:
        """Return a copy of the task with rows of ``seq_len`` tokens, as many tokens in a step as before, and an empty
        ``length_schedule``. ``seq_len`` must be a multiple of the present row length.
        """
        times, rows = seq_len // self.seq_len, self.global_batch_rows
        return replace(
            self,
            seq_len=seq_len,
            length_schedule=[],
            micro_batch=max(1, self.micro_batch // times),
            global_batch_rows=rows and rows // times,
        )

    def division_of_step(self, row_groups: int) -> tuple[int, int]:
        """Return (rows per micro-batch, micro-batches per step) of each process if ``row_groups`` processes compute
        different rows. Under context parallelism a group of processes that share rows counts as one process.

        Let g be the greatest common divisor of ``row_groups`` and the number of micro-batches in a step: the
        micro-batches are divided by g, and the rows of each micro-batch by ``row_groups / g``. If ``global_batch_rows``
        is None, the step counts as one micro-batch. Example: 8 rows with ``micro_batch=1`` on 4 processes give (1, 2);
        2 rows with ``micro_batch=2`` on 2 processes give (1, 1).
        """
        count = 1 if self.global_batch_rows is None else self.global_batch_rows // self.micro_batch
        shared = math.gcd(count, row_groups)
        return max(1, self.micro_batch // (row_groups // shared)), count // shared

    def step_text(self, world_size: int, context_parallel: int = 1) -> str:
        """Describe a step in the log, such as "a step: 8 rows = 4 processes x 2 micro-batches x 1 row"."""
        rows, count = self.division_of_step(world_size // context_parallel)
        if self.global_batch_rows is None:
            return f"a step: the rows that hold its responses, in micro-batches of at most {counted(rows, 'row')}"
        who = counted(world_size, "process")
        if context_parallel > 1:
            who = f"{counted(world_size // context_parallel, 'group')} of {context_parallel} processes that share rows"
        factors = (who, counted(count, "micro-batch"), counted(rows, "row"))
        return f"a step: {counted(self.global_batch_rows, 'row')} = {' x '.join(factors)}"


@dataclass(config=STRICT, frozen=True)
class OptimConfig:
    """The optimizer method of each parameter, learning rates, gradient clipping and the update of router biases."""

    rules: Literal["adamw", "report"]  # which table in train/param_groups.py assigns methods to parameters
    per_head: bool  # only with rules=report: orthogonalise wq_b and the vision wqkv head by head
    tables: Literal["sinkhorn", "adamw"]  # only with rules=report: method of token embedding, head and Engram tables
    tables_lr_factor: PositiveFloat  # only with rules=report: multiplies the learning rate of these tables
    engram_lr_factor: PositiveFloat  # multiplies the learning rate of the Engram tables
    schedule: Schedule  # learning-rate schedule; its lengths are in tokens
    settings: Settings  # hyper-parameters of the optimizer methods
    clip: PositiveFloat  # largest global norm of the gradient; a larger gradient is scaled down to it
    # How router biases are updated: from the expert load of text and images separately (separate), from the load of
    # both together (shared), or not at all (off).
    router_bias_mode: Literal["separate", "shared", "off"]
    router_bias_rate: NonNegativeFloat  # size of the change of a router bias in one step


@dataclass(config=STRICT, frozen=True)
class LoraConfig:
    """LoRA: train low-rank factors added to frozen weights, instead of the weights; see ``train/lora/inject.py``."""

    targets: list[str]  # modules that get factors: names from LORA_TARGETS in train/lora/targets.py; empty: no LoRA
    rank: PositiveInt  # rank of the factors
    alpha: PositiveFloat  # the product of the two factors is scaled by alpha / rank
    dropout: Annotated[float, Field(ge=0, lt=1)]  # dropout on the input of the factors of linear layers and experts

    @property
    def on(self) -> bool:
        return bool(self.targets)


@dataclass(config=STRICT, frozen=True)
class CheckpointConfig:
    """How often checkpoints are written, how many are kept, and whether the finished model is exported."""

    every: PositiveInt  # optimizer steps between checkpoints
    keep: PositiveInt  # number of newest checkpoints that are kept
    asynchronous: bool  # copy the state into host memory and write it while training continues
    # Write the model of the finished run as a checkpoint folder, <run>/export: in its own precision (plain), quantised
    # like the released checkpoint (released), or not at all (false).
    export: Literal[False, "plain", "released"]


@dataclass(config=STRICT, frozen=True)
class HardwareConfig:
    """Hardware rates with which task=plan estimates seconds. Rates are per GPU and direction; 1 GB is 10^9 bytes."""

    gpus_per_node: PositiveInt
    tflops: PositiveFloat  # TFLOP/s that training reaches in bf16 matrix products
    peak_tflops: PositiveFloat  # the maker's TFLOP/s for dense bf16 products; MFU is relative to it
    network_gb_s: PositiveFloat  # GB/s to other nodes
    node_gb_s: PositiveFloat  # GB/s to GPUs on the same node
    host_gb_s: PositiveFloat  # GB/s to host memory


@dataclass(config=STRICT, frozen=True)
class ParallelConfig:
    """Device, precision, number of processes and timeouts. ``train/distributed/__init__.py`` explains the processes."""

    device: Literal["auto", "cpu", "cuda"]  # auto: the GPU if there is one, otherwise the CPU
    # bf16: computation in bf16 by autocast, parameters in fp32. auto: bf16 on a GPU that computes in it, otherwise
    # fp32, because a CPU is slower in bf16, and a GPU computes grouped products of experts fast in bf16 only. task=plan
    # plans for such a GPU, unless parallel.device is cpu.
    precision: Literal["auto", "fp32", "bf16"]
    world_size: PositiveInt  # number of processes, one per GPU; the rows of a step are divided over them
    expert_parallel: PositiveInt  # number of processes over which the routed experts of a layer are split
    table_shards: PositiveInt  # number of processes over which the rows of an Engram table are split
    shard_embeddings: bool  # split the token embedding and the output head over the same processes as the Engram tables
    # Number of consecutive processes that keep the rows of each dense matrix of the blocks; the matrices are gathered
    # while their block runs (FSDP2). 1: every process keeps whole matrices.
    dense_shards: PositiveInt
    # Number of consecutive processes over which the tokens of a row are split (context parallelism).
    context_parallel: PositiveInt
    gpu_memory_gib: PositiveFloat | None  # memory of one GPU in GiB; task=plan compares its estimate with it
    heartbeat_timeout: PositiveFloat  # seconds of silence after which a process counts as lost
    start_timeout: PositiveFloat  # seconds within which all processes must start after the first one
    # Seconds that ranks wait in one collective call, after which a rank that lives but has not arrived there is named,
    # the stack traces of all ranks are written into the run directory (stacks/), and the run ends. Must be less than
    # collective_timeout.
    hang_timeout: PositiveFloat
    collective_timeout: PositiveFloat  # time limit in seconds of one collective call; a lost process is noticed earlier
    hardware: HardwareConfig

    @property
    def row_groups(self) -> int:
        """Number of processes that compute different rows. Under context parallelism a group of processes that share
        rows counts as one process.
        """
        return max(1, self.world_size // self.context_parallel)


@dataclass(config=STRICT, frozen=True)
class LoggerConfig:
    """Where metrics are shown besides the files ``train.log`` and ``metrics.jsonl``."""

    progress: bool  # show a progress bar, if the output is a terminal
    wandb: bool  # send metrics to Weights & Biases
    wandb_project: str  # name of the Weights & Biases project
    tensorboard: bool  # write events for TensorBoard into the run directory
    # Record these steps, FIRST:LAST counted from 1, with torch's profiler; null: none. The traces are in the run
    # directory under profile/, one for each rank.
    profile: Annotated[str, Field(pattern=r"^[1-9][0-9]*:[1-9][0-9]*$")] | None

    @property
    def profiled(self) -> tuple[int, int] | None:
        """First and last step to record with torch's profiler; None: no step is recorded."""
        if self.profile is None:
            return None
        first, last = map(int, self.profile.split(":"))
        return first, last


@dataclass(config=STRICT, frozen=True)
class Config:
    """The configuration of a training run. ``train/checkpoint/init_from.py`` says what ``init_from`` may name."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # the run's directory is output/name
    output: str  # folder in which run directories are created
    seed: NonNegativeInt  # seed of all random generators
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
    plan: PlanConfig | None  # task=plan only
    dpo: DpoConfig | None  # only for task=dpo
    distill_data: DistillDataConfig | None  # task=distill_data only
    init_from: str | None  # checkpoint whose weights, model configuration and tokenizer the run starts from

    def with_precision(self, automatic: Literal["fp32", "bf16"]) -> Config:
        """Return the configuration; if ``parallel.precision`` is ``auto``, it is replaced by ``automatic``."""
        if self.parallel.precision != "auto":
            return self
        return replace(self, parallel=replace(self.parallel, precision=automatic))

    @property
    def run_dir(self) -> Path:
        """The directory of this run. A run that is started again with the same configuration continues from this
        directory.
        """
        return Path(self.output) / self.name

    @property
    def frozen_base(self) -> bool:
        """True if the weights of ``init_from`` stay frozen because only a LoRA adapter or a drafter is trained."""
        return self.lora.on or self.dspark is not None

    @property
    def initial_checkpoint(self) -> str:
        """The value of ``init_from``, for tasks and methods that require it (so it is not None)."""
        assert self.init_from is not None
        return self.init_from


@dataclass(config=STRICT, frozen=True)
class SmallTask:
    """The section ``task`` of tasks that train nothing."""

    kind: str  # name of the task: a key of SMALL


@dataclass(config=STRICT, frozen=True)
class Conversion:
    """``task=convert``: write a checkpoint folder in another format. Sections for training runs are ignored."""

    task: SmallTask
    src: str  # checkpoint folder to read
    dst: str  # folder to write; it must not exist yet
    format: Literal["released", "bf16"]
    adapter: str | None = None  # folder with a LoRA adapter of that checkpoint, which is merged into its weights
    # True: do not merge what serving engines can add to packed weights, but write it beside them: dst/base, dst/adapter
    keep: bool = False
    processes: PositiveInt = 1  # number of processes on this machine that convert together


@dataclass(config=STRICT, frozen=True)
class Merger:
    """``task=merge``: write the weighted average of checkpoints. Sections for training runs are ignored."""

    task: SmallTask
    checkpoints: Annotated[list[str], Field(min_length=1)]  # checkpoints to average, named as for ``init_from``
    weights: list[float] | None  # weight of each checkpoint; null: equal weights
    dst: str  # folder to write; it must not exist yet
    format: Literal["plain", "released"]
    processes: PositiveInt = 1  # number of processes on this machine that merge together

    @property
    def shares(self) -> list[float]:
        """The weight of each checkpoint in the average."""
        equal = [1 / len(self.checkpoints)] * len(self.checkpoints)
        return equal if self.weights is None else self.weights


@dataclass(config=STRICT, frozen=True)
class Asked:
    """Settings that ``task=chat`` and ``task=generate`` share: the model, and how it answers."""

    task: SmallTask
    init_from: str  # a checkpoint folder, a run directory or one of its checkpoints
    device: Literal["auto", "cpu", "cuda"]
    thinking: bool  # whether the model reasons before it answers
    effort: int | str  # how long a reasoning model thinks: low, high, max or 1 to 100
    system: str | None  # system prompt
    max_tokens: PositiveInt  # most tokens in an answer, reasoning included
    temperature: NonNegativeFloat  # sampling temperature; 0: greedy
    top_p: Annotated[float, Field(gt=0, le=1)]  # draw from the likeliest tokens of this total probability
    seed: NonNegativeInt


@dataclass(config=STRICT, frozen=True)
class Chat(Asked):
    """``task=chat``: talk with a model on the terminal."""


@dataclass(config=STRICT, frozen=True)
class Generation(Asked):
    """``task=generate``: answer the prompts of a file and write the answers to another file."""

    prompts: str  # JSONL file of records with prompt (a user's message), messages, or text (to be continued)
    dst: str  # JSONL file for the answers; prompts that it already answers are skipped
    batch: PositiveInt  # number of sequences generated together


@dataclass(config=STRICT, frozen=True)
class Evaluation:
    """``task=eval``: measure a model on tasks. Other sections, which are for training runs, are ignored."""

    task: SmallTask
    init_from: str  # a checkpoint folder, a run directory or one of its checkpoints
    parallel: ParallelConfig  # device, precision and processes, which share the questions, as in a training run
    tasks: Annotated[list[EvalEntry], Field(min_length=1)]  # names of tasks, or sections as in task.eval_tasks
    batch: PositiveInt  # number of sequences in one forward pass
    dst: str  # JSON file for the results; an existing file is replaced
    seed: NonNegativeInt  # seed of generated questions


SMALL = {"convert": Conversion, "merge": Merger, "chat": Chat, "generate": Generation, "eval": Evaluation}
Small = Conversion | Merger | Chat | Generation | Evaluation


def to_dict(config: Config) -> dict[str, Any]:
    """Convert a configuration to plain dicts and lists, as ``config.yaml`` stores them."""
    return json.loads(json.dumps(asdict(config), default=str))
