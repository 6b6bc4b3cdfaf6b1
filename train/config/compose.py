"""Combines the command line and the files of ``conf/`` into one nested mapping of values, using Hydra."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf

from train.config.problems import ConfigError

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
GROUPS = {path.name for path in CONF_DIR.iterdir() if path.is_dir() and not path.name.startswith("_")}


@functools.cache
def composed(*choices: str) -> dict[str, Any]:
    """Combine the files of ``conf/`` for the given choices of Hydra groups (such as ``task=sft``) and resolve the
    ``${...}`` references.

    The result is cached, so callers must not change it.
    """
    if GlobalHydra.instance().is_initialized():
        tree = compose("train", overrides=list(choices))
    else:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            tree = compose("train", overrides=list(choices))
    return cast(dict[str, Any], OmegaConf.to_container(tree, resolve=True))


def open_overrides(arguments: list[str]) -> list[str]:
    """Let Hydra accept ``key=value`` for any key, so that ``parse`` can report unknown keys together with all other
    problems.

    Group choices (``model=tiny``), explicit ``+key=``, ``~key`` and flags are passed on unchanged. A value that Hydra's
    grammar does not allow without quotes, such as a path with ``=`` or non-ASCII letters in it, is put into quotes.

    Raises:
        ConfigError: Hydra cannot read a value, even if it is put into quotes.
    """
    return [_opened(argument) for argument in arguments]


def _opened(argument: str) -> str:
    key, equals, value = argument.partition("=")
    if not equals or not key.lstrip("+")[:1].isalpha() or key.split("@")[0] in GROUPS:
        return argument
    return f"{key if key.startswith('+') else f'++{key}'}={_readable(key.lstrip('+'), value)}"


def _readable(key: str, value: str) -> str:
    """Return the value unchanged if Hydra can read it, otherwise as a quoted string or a list of quoted strings."""
    problem = _syntax_problem(key, value)
    if problem is None:
        return value
    is_list = value.startswith("[") and value.endswith("]")
    parts = [part.strip() for part in value[1:-1].split(",")] if is_list else [value]
    if not any(mark in part for part in parts for mark in "{}[]'\""):
        quoted = [part if _syntax_problem(key, part) is None else _quote(part) for part in parts]
        return f"[{','.join(quoted)}]" if is_list else quoted[0]
    example = f'{key}=["..."]' if is_list else f'{key}="..."'
    raise ConfigError([f"{key}={value}: cannot be read: {problem}. Quote the text and the whole argument: '{example}'"])


def _syntax_problem(key: str, value: str) -> str | None:
    try:
        OverridesParser.create().parse_override(f"{key}={value}")
    except HydraException as error:
        return str(error).splitlines()[0].rstrip(".")
    return None


def _quote(text: str) -> str:
    return QuotedString(text=text, quote=Quote.single).with_quotes()
