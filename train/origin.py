"""Records which other checkpoints and files a run began with, and checks those that it reads again later.

A run with LoRA, a drafter, a KL term or teachers reads other checkpoints again whenever it is continued. A setting such
as ``init_from=runs/base`` means the newest checkpoint of that run, and that run may have saved a newer one since. A
checkpoint that was moved or renamed may be named by its new path.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.checkpoint.init_from import find_pretrained
from train.checkpoint.run_state import write_text
from train.config.problems import ConfigError, problem
from train.config.schema import Config

FILE = "origin.json"  # in the run directory: key -> folder and digest
SAMPLE = 2**20  # bytes at the beginning and at the end of each file that enter the hash


def named(config: Config) -> dict[str, str]:
    """Map configuration keys to the checkpoints that the run begins with."""
    found = {"init_from": config.init_from} if config.init_from else {}
    for number, task in enumerate(config.rl.tasks if config.rl is not None else ()):
        if teacher := getattr(task, "teacher", None):
            found[f"rl.tasks[{number}].teacher"] = teacher
    if config.distill_data is not None and config.distill_data.weight:
        found["distill_data.teacher"] = config.distill_data.teacher
    return found


def task_files(config: Config) -> dict[str, Path]:
    """Map configuration keys of RL tasks to the Python files whose functions draw prompts and reward responses."""
    found = {}
    for number, task in enumerate(config.rl.tasks if config.rl is not None else ()):
        for field in ("prompts", "reward"):
            place = getattr(task, field).rpartition(":")[0]
            if place.endswith(".py"):
                found[f"rl.tasks[{number}].{field}"] = Path(place).expanduser()
    return found


def reads_again(config: Config, key: str) -> bool:
    """Return whether the run reads the checkpoint of a key of ``named`` again when it is continued."""
    loss = None if config.rl is None else config.rl.loss
    frozen = config.frozen_base or config.dpo is not None or (loss is not None and bool(loss.kl))
    return key != "init_from" or frozen


def digest(folder: Path) -> str:
    """Hash a checkpoint folder: the name, the size and the first and last MiB of each file."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json")):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            found.update(file.read(SAMPLE))
            file.seek(max(0, size - SAMPLE))
            found.update(file.read(SAMPLE))
    return found.hexdigest()


def record(config: Config) -> None:
    """Write ``origin.json``, which says which checkpoints and which functions of RL tasks the run begins with, into the
    run directory, unless the file exists.
    """
    path = config.run_dir / FILE
    if path.exists():
        return
    folders = {key: find_pretrained(name).folder.resolve() for key, name in named(config).items()}
    noted: dict[str, dict[str, str | None]]
    noted = {key: {"folder": str(folder), "digest": digest(folder)} for key, folder in folders.items()}
    noted |= {key: {"file": str(file), "digest": _content(file)} for key, file in task_files(config).items()}
    if noted:
        write_text(path, json.dumps(noted, indent=2) + "\n")


def _content(file: Path) -> str | None:
    """Hash a file; None if it cannot be read."""
    try:
        return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return None


def changed_files(config: Config) -> list[str]:
    """Return a line for the log for each file of an RL task whose content has changed since the run began. A reward
    function may be corrected in the middle of a run, but the log must say so.
    """
    path = config.run_dir / FILE
    noted = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return [
        f"{key}: {file} has other content than when the run began"
        for key, file in task_files(config).items()
        if key in noted and noted[key]["digest"] != _content(file)
    ]


def check(config: Config) -> set[str]:
    """Compare the checkpoints that a continued run names with those in its ``origin.json``.

    Returns the configuration keys whose checkpoints have the recorded content, even if their path has changed.

    Raises:
        ConfigError: a checkpoint that is read again differs from the one the run began with; the message names both
            folders.
    """
    path, same, problems = config.run_dir / FILE, set(), []
    noted = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for key, name in named(config).items():
        if key not in noted:
            continue
        folder, began = find_pretrained(name).folder.resolve(), Path(noted[key]["folder"])
        if digest(folder) == noted[key]["digest"]:
            same.add(key)
            continue
        if not reads_again(config, key):
            continue
        there = began.is_dir() and digest(began) == noted[key]["digest"]
        remedy = f"Continue with {key}={began}" if there else f"{began} is missing or was changed; restore it"
        rule = f"now means {folder}, but this run began with {began}, which has other weights"
        problems.append(problem(key, name, rule, f"{remedy}, or start another run with name=..."))
    if problems:
        raise ConfigError(problems)
    return same


def renamed(saved: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return the saved configuration of a run. The path of a checkpoint that was moved or renamed is taken from
    ``config``.

    Raises:
        ConfigError: for the same reasons as in ``check``.
    """
    tree = copy.deepcopy(dict(saved))
    for key in check(config):
        if key == "init_from":
            tree["init_from"], tree["data"]["tokenizer"] = config.init_from, config.data.tokenizer
        elif key == "distill_data.teacher":
            assert config.distill_data is not None
            tree["distill_data"]["teacher"] = config.distill_data.teacher
            if config.init_from is None:
                tree["data"]["tokenizer"] = config.data.tokenizer
        else:  # "rl.tasks[NUMBER].teacher"
            number = int(key[len("rl.tasks[") : key.index("]")])
            tree["rl"]["tasks"][number]["teacher"] = named(config)[key]
    return tree
