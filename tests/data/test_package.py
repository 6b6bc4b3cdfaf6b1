"""The package as a whole: what importing it loads, and that its files build on each other in one direction."""

from __future__ import annotations

import ast
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import data
import data.chat
from data.config import SOURCES

ROOT = Path(data.__file__).parents[1]


def order(package) -> list[str]:
    """The files of a package in the order in which its description says to read them."""
    lines = re.findall(r"^    (\w.*?):?  ", package.__doc__, re.MULTILINE)
    return [name for line in lines for name in line.split(", ")]


def imported(path: Path, package) -> set[str]:
    """The files and folders of a package that a file imports from, also inside functions."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    prefix = f"{package.__name__}."
    return {module.removeprefix(prefix).split(".")[0] for module in modules if module.startswith(prefix)}


@pytest.mark.parametrize("package", [data, data.chat])
def test_each_file_imports_only_from_those_before_it(package):
    names, folder = order(package), Path(package.__file__).parent
    assert sorted(names) == sorted(module.name for module in pkgutil.iter_modules([str(folder)]))
    for number, name in enumerate(names):
        if (folder / name).is_dir():
            found = {module for path in (folder / name).glob("*.py") for module in imported(path, package)} - {name}
        else:
            found = imported(folder / f"{name}.py", package)
        assert found <= set(names[:number]), f"{package.__name__}.{name} imports {found - set(names[:number])}"


def loaded(code: str) -> set[str]:
    """Top-level modules that a fresh Python has loaded after running `code`."""
    code += "; import json, sys; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(done.stdout))


def test_settings_errors_and_efforts_load_no_heavy_library():
    code = "from data import DataConfig, DataError; DataConfig(source='web').problems(); "
    code += "from data.chat.conversation import effort_budget; effort_budget('high')"
    heavy = {"torch", "numpy", "datasets", "pyarrow", "tokenizers", "PIL", "sklearn", "transformers"}
    assert not loaded(code) & heavy
    assert "torch" in loaded("from data import build_loaders"), "the test sees what is loaded"


def test_every_name_that_is_exported_is_there():
    tree = ast.parse(Path(data.__file__).read_text(encoding="utf-8"))
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    names = {alias.name: node.module for node in typed.body for alias in node.names}
    assert names == data._HOME and sorted(names) == sorted(data.__all__)
    for name in data.__all__:
        assert getattr(data, name) is not None
    with pytest.raises(AttributeError, match="module 'data' has no attribute 'absent'"):
        data.absent  # noqa: B018


def test_every_kind_of_source_names_its_opener_and_says_which_others_there_are():
    for kind in SOURCES.values():
        assert callable(pkgutil.resolve_name(kind.opener))
        assert kind.tokenizer_source in {None, *SOURCES} and kind.paths in ("files", "dataset", "nothing")
        assert bool(kind.suffixes) == (kind.paths == "files")
