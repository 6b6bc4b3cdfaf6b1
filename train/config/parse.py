"""Converts the composed values to the typed configuration, or lists everything that is wrong with them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from train.config import moved
from train.config.compose import GROUPS, composed
from train.config.dspark import with_drafter
from train.config.problems import ConfigError, problem
from train.config.rules import convert_problems, cross_problems, evaluation_problems, merge_problems
from train.config.schema import SMALL, Config, Conversion, Evaluation, Merger, Small


def parse(raw: DictConfig | Mapping[str, Any]) -> Config | Small:
    """Convert the composed values (a nested mapping) to the typed configuration.

    Raises:
        ConfigError: the message lists every unknown key, missing key, wrong type and broken rule.
    """
    try:
        tree, small = _resolved(cast(DictConfig, OmegaConf.create(cast(dict, raw))))
    except OmegaConfBaseException as error:  # a ${...} reference names a missing key
        raise _reference_error(error.full_key or "the configuration", error) from None
    if small is not None:
        return _parse_small(tree, small)
    config, problems, bad_keys = _convert(tree)
    problems += [text for key, text in _unusable_texts(tree) if key not in bad_keys]
    if config is not None:
        problems += [text for keys, text in cross_problems(config) if not keys & bad_keys]
    if problems:
        raise ConfigError(problems)
    assert config is not None
    return config


def parse_run(raw: DictConfig | Mapping[str, Any]) -> Config:
    """Convert composed values that are known to describe a training run, as ``parse`` does."""
    config = parse(raw)
    assert isinstance(config, Config)
    return config


def _unusable_texts(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for every value that is still missing (``???``) or contains a null character."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _unusable_texts(value, f"{key}.{name}" if key else str(name))
    elif tree == "???":
        yield key, f"{key} has no value yet. Give it one: {key}=..."
    elif isinstance(tree, str) and "\0" in tree:
        yield key, problem(key, tree, "contains a null character", "Correct the value")


def _resolved(raw: DictConfig) -> tuple[dict[str, Any], type[Small] | None]:
    """Resolve the ``${...}`` references. Returns plain dicts and lists, and the configuration type of the task.

    The configuration type is None for a training run; other tasks, such as ``task=convert``, have their own
    configuration type.
    """
    task = _value(raw, "task")
    small = SMALL.get(str(task.get("kind"))) if isinstance(task, Mapping) else None
    if small is not None:  # sections for training runs may refer to keys that this task does not have
        unused = {field.name for field in fields(Config)} - {field.name for field in fields(small)}
        raw = OmegaConf.create({key: value for key, value in _plain(raw).items() if key not in unused})
    elif isinstance(init_from := _value(raw, "init_from"), str):
        raw = OmegaConf.create(_with_pretrained(_plain(raw), init_from))
    elif isinstance(section := _value(raw, "distill_data"), Mapping):
        raw = OmegaConf.create(_with_tokenizer_of(_plain(raw), section.get("teacher")))
    return cast(dict[str, Any], OmegaConf.to_container(raw, resolve=True, throw_on_missing=False)), small


def _value(raw: DictConfig, key: str) -> Any:
    try:
        return raw.get(key)
    except OmegaConfBaseException as error:  # the message of this error does not name the key
        raise _reference_error(key, error) from None


def _reference_error(key: str, error: OmegaConfBaseException) -> ConfigError:
    return ConfigError([f"{key}: {str(error.msg or error).splitlines()[0]}. Correct the ${{...}} reference"])


def _plain(raw: DictConfig) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(raw, resolve=False))


def _with_pretrained(tree: dict[str, Any], init_from: str) -> dict[str, Any]:
    """Return the values with the model configuration and the tokenizer of the checkpoint ``init_from``."""
    from train.checkpoint.init_from import find_pretrained

    try:
        origin = find_pretrained(init_from)
    except ValueError as error:
        raise ConfigError([problem("init_from", init_from, str(error), "Correct the path")]) from None
    data = tree.get("data")
    if isinstance(data, dict):
        if data.get("tokenizer", "train") != "train":
            rule = "must not be set with init_from, whose weights need the tokenizer of that checkpoint"
            remedy = "Leave data.tokenizer out"
            raise ConfigError([problem("data.tokenizer", data["tokenizer"], rule, remedy)])
        data["tokenizer"] = str(origin.tokenizer)
    model, section = origin.model, tree.get("dspark")
    drafter = section.get("drafter") if isinstance(section, dict) else None
    if isinstance(drafter, dict):
        try:
            model = with_drafter(model, drafter)
        except ValueError as error:
            raise ConfigError([problem("dspark.drafter", drafter, str(error), "Correct the keys")]) from None
    return {**tree, "model": model}


def _with_tokenizer_of(tree: dict[str, Any], teacher: Any) -> dict[str, Any]:
    """Return the values with the tokenizer of the teacher, which a student without ``init_from`` uses."""
    data = tree.get("data")
    if isinstance(teacher, str) and isinstance(data, dict) and data.get("tokenizer", "train") == "train":
        from train.checkpoint.init_from import find_pretrained

        with suppress(ValueError):  # the rules of the section refuse what is no checkpoint
            data["tokenizer"] = str(find_pretrained(teacher).tokenizer)
    return tree


def _parse_small(tree: dict[str, Any], whole: type[Small]) -> Small:
    try:
        config = TypeAdapter(whole).validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        paths = [[str(part) for part in entry["loc"]] for entry in errors]
        raise ConfigError(
            [text for path, entry in zip(paths, errors, strict=True) for text in _describe(path, entry, whole)]
        ) from None
    problems = list(merge_problems(config)) if isinstance(config, Merger) else []
    if isinstance(config, Conversion):
        problems += convert_problems(config)
    if isinstance(config, Evaluation):
        problems += evaluation_problems(config)
    if problems:
        raise ConfigError(problems)
    return config


def _convert(tree: dict[str, Any]) -> tuple[Config | None, list[str], set[str]]:
    """Convert the values. Returns the typed configuration, the problems, and the keys that have a problem.

    Wrong values are replaced by valid ones, so that rules that involve several keys can be checked too and all problems
    are reported together. If there are problems, the returned configuration may be used only to check such rules.
    """
    adapter = TypeAdapter(Config)
    try:
        return adapter.validate_json(json.dumps(tree), strict=True), [], set()
    except ValidationError as error:
        errors = error.errors(include_url=False)
    problems, bad_keys = [], set()
    for entry in errors:
        path = [str(part) for part in entry["loc"]]
        bad_keys.add(".".join(path))
        problems += _describe(path, entry)
    return _salvage(adapter, tree, errors), problems, bad_keys


def _salvage(adapter: TypeAdapter, tree: dict[str, Any], errors: list) -> Config | None:
    """Replace every wrong value by its value in ``conf/``; a wrong value without one there is removed. Returns None if
    the result is still invalid.
    """
    repaired, reference = json.loads(json.dumps(tree)), composed()
    for entry in errors:
        node, fallback = repaired, reference
        *parents, leaf = entry["loc"]
        for part in parents:
            node = node[part] if isinstance(node, list) or part in node else {}
            fallback = fallback.get(part, {}) if isinstance(fallback, dict) else {}
        if isinstance(node, list):
            return None
        node.pop(leaf, None)
        if isinstance(fallback, dict) and leaf in fallback:
            node[leaf] = fallback[leaf]
    try:
        return adapter.validate_json(json.dumps(repaired), strict=True)
    except ValidationError:
        return None


def _describe(path: list[str], entry: Mapping[str, Any], whole: type = Config) -> list[str]:
    """Describe the problems in one pydantic error. If a section checks its own values, its error may list several."""
    key = ".".join(path)
    if entry["type"] == "unexpected_keyword_argument":
        known = _known_keys(path[:-1], whole)
        if whole is Config and len(path) == 1:
            known += sorted(GROUPS - set(known))
        if moved.remedy(key):
            return [problem(key, entry["input"], "this key was renamed", str(moved.remedy(key)))]
        close = difflib.get_close_matches(path[-1], known, n=1)
        section = ".".join(path[:-1]) or "the top level"
        remedy = (
            f"Did you mean {'.'.join([*path[:-1], close[0]])}?"
            if close
            else f"The keys in {section} are: {', '.join(known)}"
        )
        return [problem(key, entry["input"], "no such key", remedy)]
    if entry["type"] in ("missing", "missing_argument"):
        return [f"{key} is missing. Give it a value: {key}=..."]
    if entry["input"] == "???":
        return [f"{key} has no value yet. Give it one: {key}=..."]
    if entry["type"] == "value_error":
        header, *lines = str(entry["ctx"]["error"]).splitlines()
        whole_line = header if header.startswith(f"{key}.") else f"{key}: {header}"
        return [f"{key}.{line.strip(' -')}" for line in lines] or [whole_line]
    rule, value, remedy = entry["msg"].replace("Input should", "should"), entry["input"], "Correct the value"
    if entry["type"] == "list_type":
        rule, remedy = "should be a list", f"Write it in brackets: {key}=[{value}]"
    elif entry["type"] == "int_type" and isinstance(value, float) and value.is_integer():
        remedy = f"Write {int(value)}"
    elif entry["type"] == "string_pattern_mismatch":
        rule = "may contain letters, digits, '.', '_' and '-', and must begin with a letter or a digit"
    return [problem(key, value, rule, remedy)]


def _known_keys(path: list[str], whole: type) -> list[str]:
    """List the keys of the section at ``path`` in the configuration type ``whole``."""
    schema = TypeAdapter(whole).json_schema()
    node = schema
    for part in path:
        node = node.get("properties", {}).get(part) or node.get("items", {})  # `part` is the index of a list item
        reference = node.get("$ref") or next(
            (option["$ref"] for option in node.get("anyOf", []) if "$ref" in option), None
        )
        node = schema["$defs"][reference.rsplit("/", 1)[-1]] if reference else node
    return list(node.get("properties", {}))
