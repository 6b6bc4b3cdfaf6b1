"""The text that ``python -m train --help`` prints. Comments in ``conf/`` describe the tasks and groups."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

from train.config.compose import CONF_DIR
from train.config.tasks import TASKS

GROUPS = {  # what each group decides; task is shown separately, and only `python -m train.studies` reads study
    "model": "the shape of the model, in the keys of a released config.json",
    "data": "where documents come from",
    "optim": "the method that updates parameters, and its learning rates",
    "lora": "whether LoRA adapters are trained instead of the weights, and for which modules",
    "parallel": "number of processes, device and precision",
    "rollout": "whether this process or inference servers write the responses of task=rl and task=distill",
    "logger": "where the metrics of a run are written",
    "experiment": "a complete run, which makes a choice for every other group",
}


def help_text() -> str:
    """Return the text that ``--help`` prints."""
    width = min(shutil.get_terminal_size().columns, 120)
    lines = [
        "usage: python -m train task=NAME [group=CHOICE ...] [key=value ...]      (or: narrows task=NAME ...)",
        "",
        "Tasks, each with an example",
        *(line for name in TASKS for line in _task(name, width)),
        "",
        "Groups: group=CHOICE takes the values of conf/<group>/<choice>.yaml",
        *(line for name in GROUPS for line in _group(name, width)),
        "",
        "Keys: key=value changes one value. docs/configuration.md explains every key. A misspelt key or a value that",
        "cannot be used is refused before anything is built, with all problems in one message.",
        "",
        "  --cfg job      print the whole configuration that the other arguments give, and exit",
        "  --hydra-help   print the flags of Hydra, the library that composes the configuration",
    ]
    return "\n".join(lines)


def _task(name: str, width: int) -> Iterator[str]:
    comment = _comment(CONF_DIR / "task" / f"{name}.yaml")
    example = next(line.strip() for line in comment if line.strip().startswith("python -m train"))
    yield from _entry(name, comment[0], width)
    yield f"{'':15}{example}"


def _group(name: str, width: int) -> Iterator[str]:
    choices = ", ".join(sorted(path.stem for path in (CONF_DIR / name).glob("*.yaml")))
    yield from _entry(name, f"{GROUPS[name]}: {choices}", width)


def _entry(name: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=f"  {name:13}", subsequent_indent=" " * 15)


def _comment(path: Path) -> list[str]:
    """Read the lines of the comment at the top of a file."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    return [line.removeprefix("#").removeprefix(" ") for line in lines if "@package" not in line]
