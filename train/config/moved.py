"""Configuration keys that were renamed.

An old key is refused with a message that names the new one. Saved configurations of earlier runs may have old keys.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

# Old key -> new key. `task.accumulation` counted micro-batches of all processes; `task.global_batch_rows` counts rows.
MOVED = {
    "task.accumulation": "task.global_batch_rows",
    "parallel.data_parallel": "parallel.world_size",
    "optim.balance": "optim.router_bias_mode",
    "optim.balance_rate": "optim.router_bias_rate",
    "runtime.balance_coef": "loss.router_balance",
    "runtime.indexer_coef": "loss.indexer_kl",
    "rl.loss.drift": "rl.loss.off_policy_threshold",
    "device": "parallel.device",  # of task=eval
}

# Old module -> new module, for functions that are named in rl.tasks.
MODULES = {"train.rl.tasks": "train.rl.rewards.builtin"}


def renamed(function: str) -> str | None:
    """Return the new name of ``function``, written ``module:function``, if the module was renamed, otherwise None."""
    module, colon, name = function.partition(":")
    return f"{MODULES[module]}:{name}" if colon and module in MODULES else None


def remedy(key: str) -> str | None:
    """Say what to write instead of ``key`` if that key was renamed; otherwise return None."""
    if key not in MOVED:
        return None
    unit = ", counted in rows: task.micro_batch times the old value" if key == "task.accumulation" else ""
    return f"Its new name is {MOVED[key]}{unit}"


def upgraded(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a saved configuration with old keys to the new keys."""
    tree = copy.deepcopy(dict(saved))
    for old, new in MOVED.items():
        section, leaf = _section(tree, old, make=False)
        if not isinstance(section, dict) or leaf not in section:
            continue
        value = section.pop(leaf)
        if old == "task.accumulation":
            kind, micro_batch = (section.get(key) for key in ("kind", "micro_batch"))
            value = None if kind in ("rl", "distill") else value * (micro_batch or 1)
        target, name = _section(tree, new, make=True)
        target[name] = value
    for task in _tasks(tree):
        task.update({key: renamed(value) or value for key, value in task.items() if isinstance(value, str)})
    return tree


def _tasks(tree: dict[str, Any]) -> list[dict[str, Any]]:
    section = tree.get("rl")
    tasks = section.get("tasks") if isinstance(section, dict) else None
    return [task for task in tasks if isinstance(task, dict)] if isinstance(tasks, list) else []


def _section(tree: dict[str, Any], key: str, make: bool) -> tuple[Any, str]:
    """Return the section that contains a dotted key, and the last part of the key.

    make: whether to create a missing section; if False, None is returned in place of a missing section.
    """
    *sections, leaf = key.split(".")
    found: Any = tree
    for name in sections:
        if make:
            found.setdefault(name, {})
        found = found.get(name) if isinstance(found, dict) else None
    return found, leaf
