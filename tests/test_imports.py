"""Who may import whom, at any depth of the tree.

train -> {model, optim, data}; those three know neither train nor each other. Inside a package the order is the one its
docstring lists: an indented line names files and packages, and each imports only what is named before it. The test
reads it there, so that the docstring cannot be wrong. Imports inside functions and under ``TYPE_CHECKING`` count too.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"train", "model", "optim", "data"}
ALLOWED = {"train": PACKAGES, "model": {"model"}, "optim": {"optim"}, "data": {"data"}}
# Libraries that one file, or one folder, hides from the rest.
ONLY_IN = {
    "wandb": {"train/logging/wandb.py"},
    "matplotlib": {"train/logging/plot.py"},
    "deepspeed": {"train/distributed/engine.py"},
    "httpx2": {"train/rl/rollout/servers.py"},
    "transformers": {str(path.relative_to(ROOT)) for path in (ROOT / "model/huggingface").glob("*.py")},
    "lm_eval": {"train/evaluation/harness.py"},
    "peft": {"train/lora/inject.py"},
    "triton": {str(path.relative_to(ROOT)) for path in (ROOT / "model/kernels").glob("*.py")},
    "hydra": {"train/__main__.py", "train/config/compose.py", "train/studies/runner.py"},
}
# A line of the order in a docstring: names, a colon, then (after two spaces) what they are.
LISTED = re.compile(r"^ {4}((?:[\w.]+, )*[\w.]+)(?::?  +\S.*)?$")


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"{package}/ has no Python file"
    return found


def module_of(path: Path) -> str:
    """The dotted name of a file; of ``__init__.py`` it ends in ``__init__``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


MODULES = {module_of(path): path for package in sorted(PACKAGES) for path in files(package)}


def imports(path: Path) -> Iterator[str]:
    """What a file imports, as dotted names: of our own files the name of the file, of others that of the library."""
    package = module_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (module_named(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])]
                )
            for alias in node.names:
                inside = f"{base}.{alias.name}"
                yield module_named(inside if {inside, f"{inside}.__init__"} & set(MODULES) else base)


def module_named(name: str) -> str:
    return f"{name}.__init__" if f"{name}.__init__" in MODULES else name


def library(name: str) -> str:
    return name.partition(".")[0]


def order(package: str) -> list[str]:
    """The files and packages of a package as its docstring lists them, as dotted names."""
    text = ast.get_docstring(ast.parse(MODULES[f"{package}.__init__"].read_text(encoding="utf-8"))) or ""
    lines = [match[1] for line in text.splitlines() if (match := LISTED.match(line))]
    return [f"{package}.{name}" for line in lines for name in line.split(", ")]


def place(module: str, listed: list[str]) -> int | None:
    """Where a module, or the longest package it lies in, is listed."""
    return max(
        (n for n, name in enumerate(listed) if f"{module}.".startswith(f"{name}.")),
        key=lambda n: len(listed[n]),
        default=None,
    )


def packages() -> list[str]:
    return sorted(name.removesuffix(".__init__") for name in MODULES if name.endswith(".__init__"))


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_packages_import_in_one_direction(package: str) -> None:
    for path in files(package):
        forbidden = {library(name) for name in imports(path)} & PACKAGES - ALLOWED[package]
        assert not forbidden, f"{path.relative_to(ROOT)} imports {sorted(forbidden)}"


@pytest.mark.parametrize("package", packages())
def test_nothing_imports_upward(package: str) -> None:
    inside = {
        name: path for name, path in MODULES.items() if name.startswith(f"{package}.") and name != f"{package}.__init__"
    }
    listed = order(package)
    if len(inside) > 1 or listed:
        unlisted = [name for name in inside if place(name, listed) is None]
        assert not unlisted, f"the docstring of {package} does not list {unlisted}"
        unknown = [name for name in listed if name not in inside and f"{name}.__init__" not in inside]
        assert not unknown, f"the docstring of {package} lists {unknown}, which do not exist"
    upward = []
    for name, path in inside.items():
        for other in sorted(set(imports(path))):
            if other == f"{package}.__init__":
                upward.append(f"{name} -> its own package {package}")
            elif other in inside and place(other, listed) > place(name, listed):
                upward.append(f"{name} -> {other}")
    assert not upward, f"imports of what {package} lists later: {upward}"


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_no_circle(package: str) -> None:
    graph = {
        name: [other for other in imports(path) if other in MODULES and other != name]
        for name, path in MODULES.items()
        if name.startswith(f"{package}.")
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_the_tests_see_imports_of_every_kind() -> None:
    """On train/__main__.py, and on the lists."""
    assert {"hydra", "train.errors"} <= set(imports(ROOT / "train/__main__.py"))
    assert place("train.lora.targets", ["train.lora", "train.lora.targets"]) == 1
    assert order("train")[0] == "train.errors" and order("train")[-1] == "train.__main__"


@pytest.mark.parametrize("name", sorted(ONLY_IN))
def test_wrapped_libraries_have_one_importer(name: str) -> None:
    importers = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in files(package)
        if name in map(library, imports(path))
    }
    assert importers and importers <= ONLY_IN[name]
