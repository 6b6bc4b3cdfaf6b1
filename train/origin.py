"""What a run depends on outside of its own directory, and whether it is still what the run began with.

A run with an adapter, a drafter, a KL term or teachers reads other checkpoints again whenever it is continued. A name
such as ``init_from=runs/base`` means that run's newest checkpoint, which may be another one by then.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from train.checkpoint.init_from import find_pretrained
from train.checkpoint.run_state import write_text
from train.config.problems import ConfigError, problem
from train.config.schema import Config

FILE = "origin.json"  # in the run directory: key -> folder and digest
SAMPLE = 2**20  # bytes of a file's beginning and end that are looked at


def needed(config: Config) -> dict[str, str]:
    """Key -> name of every checkpoint that the run reads again when it is continued."""
    loss = None if config.rl is None else config.rl.loss
    found = {}
    if config.init_from and (config.frozen_base or (loss is not None and loss.kl)):
        found["init_from"] = config.init_from
    for number, task in enumerate(config.rl.tasks if config.rl is not None else ()):
        if teacher := getattr(task, "teacher", None):
            found[f"rl.tasks[{number}].teacher"] = teacher
    return found


def digest(folder: Path) -> str:
    """A hash of a checkpoint's files: their names, sizes, and the first and last megabyte of each."""
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
    """Note in the run directory which checkpoints the run reads, unless that has been noted."""
    path, names = config.run_dir / FILE, needed(config)
    if names and not path.exists():
        folders = {key: find_pretrained(name).folder.resolve() for key, name in names.items()}
        noted = {key: {"folder": str(folder), "digest": digest(folder)} for key, folder in folders.items()}
        write_text(path, json.dumps(noted, indent=2) + "\n")


def check(config: Config) -> set[str]:
    """The keys whose checkpoints are noted and the same, whatever they are called now.

    Raises:
        ConfigError: one of them is another than the run began with; it names both.
    """
    path, same, problems = config.run_dir / FILE, set(), []
    noted = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for key, name in needed(config).items():
        if key not in noted:
            continue
        folder, began = find_pretrained(name).folder.resolve(), Path(noted[key]["folder"])
        if digest(folder) == noted[key]["digest"]:
            same.add(key)
            continue
        there = began.is_dir() and digest(began) == noted[key]["digest"]
        remedy = f"Continue with {key}={began}" if there else f"{began} is no longer there as it was; bring it back"
        rule = f"is {folder} now, and this run began with {began}, which has other weights"
        problems.append(problem(key, name, rule, f"{remedy}, or start another run with name=..."))
    if problems:
        raise ConfigError(problems)
    return same
