"""Renamed keys: refused under their old names, naming the new ones, but read from runs saved under the old ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

# Old key -> new key. `task.accumulation` counted micro-batches of all processes, its successor counts rows.
MOVED = {
    "task.accumulation": "task.global_batch_rows",
    "parallel.data_parallel": "parallel.world_size",
    "optim.balance": "optim.router_bias_mode",
    "optim.balance_rate": "optim.router_bias_rate",
    "runtime.balance_coef": "loss.router_balance",
    "runtime.indexer_coef": "loss.indexer_kl",
    "rl.loss.drift": "rl.loss.off_policy_threshold",
}

# Old module of functions named in rl.tasks -> new one.
MODULES = {"train.rl.tasks": "train.rl.rewards.builtin"}


def renamed(function: str) -> str | None:
    """The name that ``module:function`` has now, if its module has moved."""
    module, colon, name = function.partition(":")
    return f"{MODULES[module]}:{name}" if colon and module in MODULES else None


def remedy(key: str) -> str | None:
    """What to write in place of ``key``, if it has moved."""
    if key not in MOVED:
        return None
    unit = ", in rows: task.micro_batch times the old value" if key == "task.accumulation" else ""
    return f"It is {MOVED[key]} now{unit}"


def upgraded(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration saved with old keys, converted to the new ones."""
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
    """The section that a key stands in, None or made if there is none, and the key's last part."""
    *sections, leaf = key.split(".")
    found: Any = tree
    for name in sections:
        if make:
            found.setdefault(name, {})
        found = found.get(name) if isinstance(found, dict) else None
    return found, leaf
