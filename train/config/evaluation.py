"""The tasks that a model is evaluated on: ``task.eval_tasks`` in a training run, ``tasks`` in ``task=eval``."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from train.config.strict import STRICT

RETRIEVAL = ("needle", "multikey")  # the tasks of train/evaluation/retrieval.py
CONVERSATIONS = (".jsonl", ".jsonl.gz", ".jsonl.zst")  # suffixes of files of conversations
HARNESS_FILE = (".yaml", ".yml")  # suffixes of task files of lm-evaluation-harness


@dataclass(config=STRICT, frozen=True)
class EvalTask:
    """A task that a model is evaluated on. A list of tasks may contain just the name of a task instead of such a
    section.
    """

    # needle, multikey; a JSONL file of conversations; or a task of lm-evaluation-harness: its name or its YAML file.
    task: str
    # Only for needle and multikey: length of the prompts in tokens.
    lengths: Annotated[list[Annotated[int, Field(ge=64)]], Field(min_length=1)] = field(default_factory=lambda: [1024])
    # Only for needle and multikey: position of the wanted sentence in the text, 0 (beginning) to 1 (end).
    depths: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1)] = field(
        default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0]
    )
    samples: PositiveInt = 8  # only for needle and multikey: questions for every length and depth
    keys: Annotated[int, Field(ge=2)] = 4  # only for multikey: number of sentences that state a number
    limit: PositiveInt | None = None  # only for other tasks: use only this many records (of each task of a group)
    few_shot: NonNegativeInt | None = (
        None  # only for lm-evaluation-harness: solved examples in a prompt; null: as in the task
    )

    @property
    def kind(self) -> str:
        """The kind of this evaluation task: ``retrieval``, ``conversations`` or ``harness``."""
        if self.task in RETRIEVAL:
            return "retrieval"
        return "conversations" if self.task.endswith(CONVERSATIONS) else "harness"


def _named(value: Any) -> Any:
    return {"task": value} if isinstance(value, str) else value


EvalEntry = Annotated[EvalTask, BeforeValidator(_named)]  # an entry of a list of tasks
