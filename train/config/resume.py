"""Checks which settings changed since a run was saved, and whether the run may continue with the new values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from model import ModelConfig
from train.config import moved
from train.config.compose import composed
from train.config.problems import ConfigError, shown
from train.config.schema import Config, to_dict

# A run may continue with other values of these keys. A change of any other key is refused.
CHANGEABLE = (
    "name",  # the run directory was renamed
    "task.tokens",
    "task.length_schedule",  # the data loader packs what is not used yet into rows of the new length
    "task.eval_every",
    "task.eval_tasks",
    "task.sample_",
    "rl.eval_",
    "rl.reward_",
    "rl.rollout.",
    "data.cache_dir",
    "data.paths",  # the same data may lie elsewhere; the data loader refuses to continue with other content
    "data.validation_paths",
    "checkpoint.",
    "logger.",
    "output",
    "parallel.device",
    "parallel.world_size",
    "parallel.expert_parallel",
    "parallel.table_shards",
    "parallel.shard_embeddings",
    "parallel.dense_shards",
    "parallel.context_parallel",
    "parallel.gpu_memory_gib",
    "parallel.hardware.",
    "runtime.frozen",
    "runtime.tables",
    "runtime.recompute",
    "runtime.keep_combined",
    "runtime.gather",
    "runtime.offload",
    "optim.schedule.",
    "optim.settings.",
    "optim.clip",
    "optim.router_bias_rate",
)


def differences(saved: Mapping[str, Any], config: Config) -> list[tuple[str, Any, Any]]:
    """List (key, saved value, new value) for every key whose value differs between ``saved`` and ``config``."""
    old, new = dict(flatten(saved)), dict(flatten(to_dict(config)))
    return [
        (key, old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    ]


def check_resumable(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Check that the run in ``config.run_dir`` may continue with ``config``. Returns log lines about changed settings.

    A setting that did not exist yet when the run was saved is treated as if it had been saved with its default value.

    Raises:
        ConfigError: settings changed that must stay the same in a continued run; the message lists their keys.
    """
    complete, gone, barred = _completed(moved.upgraded(saved), config.task.kind)
    changed = (
        differences(moved.upgraded(saved), config)
        if complete is None
        else differences(to_dict(complete), _whole_model(config))
    )
    lines = {key: f"{key}: {shown(old, 1000)} -> {shown(new, 1000)}" for key, old, new in changed}
    given = dict(flatten(to_dict(config)))
    for key, value in barred.items():
        now = shown(given.get(key), 1000)
        lines[key] = f"{key}: {shown(value, 1000)} -> {now}; this version does not allow the saved value"
    fatal = [text for key, text in lines.items() if not key.startswith(CHANGEABLE)]
    if fatal:
        raise ConfigError(
            fatal,
            f"The run in {config.run_dir} was trained with the values on the left and cannot continue with the values "
            "on the right. Restore the old values, or start another run with name=...",
        )
    dropped = [f"{key}: was {shown(value, 1000)}; this version has no such key" for key, value in gone.items()]
    return [*lines.values(), *dropped]


def _completed(saved: Mapping[str, Any], kind: str) -> tuple[Config | None, dict[str, Any], dict[str, Any]]:
    """Complete a saved configuration of task ``kind`` with today's defaults for keys that it lacks.

    Returns three values: the configuration; the saved keys that no longer exist, with their values; and the keys whose
    saved values are no longer allowed, with the saved values. Where a saved value is no longer allowed, the
    configuration contains the default. The configuration is None if the saved values break a rule that concerns several
    keys.
    """
    defaults = json.loads(json.dumps(composed(f"task={kind}")))
    tree = _overlaid(defaults, saved)
    tree["model"] = saved.get("model")  # taken whole: the default model's keys must not fill gaps
    gone: dict[str, Any] = {}
    barred: dict[str, Any] = {}
    tree = json.loads(json.dumps(tree))
    while True:
        try:
            return _whole_model(TypeAdapter(Config).validate_json(json.dumps(tree), strict=True)), gone, barred
        except ValidationError as error:
            unknown = [entry["loc"] for entry in error.errors() if entry["type"] == "unexpected_keyword_argument"]
            for entry in () if unknown else error.errors():
                section, default = _section(tree, entry["loc"]), _section(defaults, entry["loc"])
                *_, leaf = entry["loc"] or ("",)
                if section is None or default is None or section[leaf] == default[leaf]:
                    return None, gone, {}
                barred[".".join(map(str, entry["loc"]))], section[leaf] = section[leaf], default[leaf]
            if not unknown:
                continue
        except ValueError as error:  # raised by ModelConfig
            lines = [line.strip() for line in str(error).splitlines()]
            unknown = [
                ("model", *line.removesuffix(": unknown key").split("."))
                for line in lines
                if line.endswith(": unknown key")
            ]
        if not unknown:
            return None, gone, {}
        for loc in unknown:
            gone[".".join(map(str, loc))] = _take(tree, loc)


def _section(tree: Any, loc: Sequence[str | int]) -> dict[str | int, Any] | None:
    """Return the mapping that holds the value at ``loc``, or None if there is no such value."""
    *parents, leaf = loc or ("",)
    for part in parents:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) and leaf in tree else None


def _take(tree: Any, loc: Sequence[str | int]) -> Any:
    *parents, leaf = loc
    for part in parents:
        tree = tree[part]
    return tree.pop(leaf)


def _whole_model(config: Config) -> Config:
    """Return the configuration with every key of the model section, including keys that have default values."""
    return replace(config, model=ModelConfig.from_dict(config.model).to_dict())


def _overlaid(tree: Any, values: Any) -> Any:
    if not isinstance(tree, Mapping) or not isinstance(values, Mapping):
        return values
    return {**tree, **{key: _overlaid(tree.get(key), value) for key, value in values.items()}}


def flatten(tree: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every value in nested mappings. A list counts as one value."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree
