"""Who may import whom: train -> {model, optim, data}; those three know neither train nor each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"train", "model", "optim", "data"}
ALLOWED = {"train": PACKAGES, "model": {"model"}, "optim": {"optim"}, "data": {"data"}}
# Libraries that one file, or one folder, hides from the rest.
ONLY_IN = {
    "wandb": {"train/logging/wandb.py"},
    "deepspeed": {"train/distributed/engine.py"},
    "httpx2": {"train/rl/rollout/servers.py"},
    "transformers": {"model/huggingface.py"},
    "peft": {"train/lora/inject.py"},
    "triton": {str(path.relative_to(ROOT)) for path in (ROOT / "model/kernels").glob("*.py")},
    "hydra": {"train/__main__.py", "train/config/compose.py", "train/studies/runner.py"},
}


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0] if node.level == 0 and node.module else path.parent.name)
    return found


def sources(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package}/ has no Python file"
    return files


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_packages_import_in_one_direction(package: str) -> None:
    for path in sources(package):
        forbidden = imported(path) & PACKAGES - ALLOWED[package]
        assert not forbidden, f"{path.relative_to(ROOT)} imports {sorted(forbidden)}"


@pytest.mark.parametrize("library", sorted(ONLY_IN))
def test_wrapped_libraries_have_one_importer(library: str) -> None:
    importers = {str(p.relative_to(ROOT)) for package in PACKAGES for p in sources(package) if library in imported(p)}
    assert importers <= ONLY_IN[library]
