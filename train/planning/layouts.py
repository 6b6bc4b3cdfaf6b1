"""Lists the ways to spread a job over GPUs. Each way is a set of values for the configuration keys that can be changed
to make the job fit or run faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from model import ModelConfig
from train.config.schema import Config
from train.planning.job import Job

EXPERT_SPLITS = 4  # for each number of GPUs, the 4 largest allowed values of expert_parallel are tried


@dataclass(frozen=True)
class Layout:
    """One way to spread a job over GPUs: the values of the configuration keys that the search varies.

    - gpus: number of GPUs;
    - context: number of GPUs over which each row is split;
    - experts: number of GPUs over which the routed experts of a layer are split;
    - dense: number of GPUs over which the dense matrices of the blocks are split;
    - recompute: whether activations are recomputed in the backward pass;
    - offload: whether the residual streams that enter each block are kept in host memory until the backward pass.
    """

    gpus: int
    context: int
    experts: int
    dense: int
    recompute: bool
    offload: bool

    @property
    def values(self) -> dict[str, object]:
        """The values that the layout sets in the configuration, by configuration key."""
        return {
            "parallel.world_size": self.gpus,
            "parallel.context_parallel": self.context,
            "parallel.expert_parallel": self.experts,
            "parallel.table_shards": self.gpus,
            "parallel.shard_embeddings": self.gpus > 1,
            "parallel.dense_shards": self.dense,
            "runtime.recompute": self.recompute,
            "runtime.offload": "inputs" if self.offload else "off",
        }

    @classmethod
    def of(cls, config: Config) -> Layout:
        """Return the layout that a configuration describes."""
        parallel = config.parallel
        sizes = (parallel.world_size, parallel.context_parallel, parallel.expert_parallel, parallel.dense_shards)
        return cls(*sizes, config.runtime.recompute, config.runtime.offload == "inputs")

    def applied(self, config: Config) -> Config:
        """Return the configuration, changed to use this layout."""
        parts: dict[str, dict[str, object]] = {"parallel": {}, "runtime": {}}
        for key, value in self.values.items():
            section, _, name = key.partition(".")
            parts[section][name] = value
        parallel, runtime = (replace(getattr(config, part), **values) for part, values in parts.items())
        return replace(config, parallel=parallel, runtime=runtime)

    def command(self, config: Config) -> str:
        """Return the settings of this layout that differ from the configuration, in the form ``key=value`` of the
        command line.
        """
        told = []
        for key, value in self.values.items():
            section, _, name = key.partition(".")
            if getattr(getattr(config, section), name) != value:
                told.append(f"{key}={str(value).lower()}")
        return " ".join(told)


def layouts(config: Config, job: Job, gpus: int) -> Iterator[Layout]:
    """Yield all layouts of a job over exactly ``gpus`` GPUs that the rules of the configuration allow."""
    text = job.model.config.text
    splits = [n for n in divisors(text.n_routed_experts) if gpus % n == 0 and _drafter_divides(job, n)]
    whole = job.frozen or job.drafter is not None
    dense = [1] if whole else [n for n in (1, config.parallel.hardware.gpus_per_node) if gpus % n == 0]
    shared = contexts(config, gpus)
    memory = ((False, False), (True, False), (True, True))  # pairs (recompute, offload) of a layout
    for context, experts, divided, saved in product(shared, splits[-EXPERT_SPLITS:], dense, memory):
        yield Layout(gpus, context, experts, divided, *saved)


def contexts(config: Config, gpus: int) -> list[int]:
    """Return the values that ``parallel.context_parallel`` (the number of GPUs over which a row is split) may have with
    ``gpus`` GPUs.
    """
    length, rows = config.task.seq_len, config.task.global_batch_rows or 1
    window = ModelConfig.from_dict(config.model).text.sliding_window
    return [
        n for n in divisors(gpus) if length % n == 0 and (n == 1 or length // n >= window) and rows % (gpus // n) == 0
    ]


def _drafter_divides(job: Job, experts: int) -> bool:
    return job.drafter is None or job.model.config.text.dspark_n_routed_experts % experts == 0


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def gpu_counts(most: int) -> list[int]:
    """Return the numbers of GPUs that the search tries, in ascending order: 1, 2, 4, ... and 3, 6, 12, ..., up to
    `most`.
    """
    return sorted({n for power in range(12) for n in (2**power, 3 * 2**power) if n <= most})
