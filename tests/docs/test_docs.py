"""README and docs/ do not go stale: every command is composed and checked as the command line does it, every snippet
compiled, every link, path and key looked up; and one of each kind is run.
"""

from __future__ import annotations

import ast
import glob
import importlib
import json
import re
import runpy
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from tests.docs.pages import GENERATED, ROOT, Page, all_commands, overrides_of, pages, snippets
from train.config.compose import CONF_DIR, open_overrides
from train.config.parse import parse
from train.config.schema import Config

PAGES = pages()
TOP = ("train", "model", "optim", "data", "conf", "tests", "slurm", "docs", ".ci")
FLAGS = ("--cfg", "--help")  # of Hydra: they only show something


def composed(overrides: list[str]) -> object:
    """The checked configuration that the command line would make of these arguments."""
    overrides = [word for word in overrides if word not in (*FLAGS, "job")]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        raw = compose("train", overrides=open_overrides(overrides))
    return parse(raw)


def test_every_page_is_listed_and_has_commands_to_check():
    listed = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    unlisted = [page.name for page in PAGES if page.name.startswith("docs/") and f"({page.path.name})" not in listed]
    assert unlisted == ["docs/index.md"]
    found = all_commands()
    assert sum(overrides_of(words) is not None for words in found) >= 35
    assert sum(words[0] == "make" for words in found) >= 15


def test_commands_of_the_trainer_compose(workplace: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    bad = []
    for words, where in all_commands().items():
        overrides = overrides_of(words)
        if overrides is None:
            continue
        try:
            config = composed(overrides)
        except Exception as error:  # Hydra's and ours: all are shown together
            bad.append(f"{where}: {' '.join(words)}\n    {error}")
            continue
        started = _processes(words)
        if isinstance(config, Config) and started not in (None, config.parallel.world_size):
            bad.append(f"{where}: {' '.join(words)}\n    {started} processes, world_size {config.parallel.world_size}")
    assert not bad, "\n".join(bad)


def _processes(words: tuple[str, ...]) -> int | None:
    """How many processes a command starts; None if it starts none."""
    if overrides_of(words) is None or "task=plan" in words:
        return None
    if words[0] == "torchrun":
        return int(words[words.index("--nproc-per-node") + 1])
    if words[0] == "sbatch":
        return 8 * next(int(word.removeprefix("--nodes=")) for word in words if word.startswith("--nodes="))
    return 1 if words[0] in ("python", "narrows") else None


def test_other_commands_exist():
    bad = []
    targets = _make_targets()
    for words, where in all_commands().items():
        if overrides_of(words) is not None:
            continue
        problem = _problem(words, targets)
        if problem:
            bad.append(f"{where}: {' '.join(words)}: {problem}")
    assert not bad, "\n".join(bad)


def _problem(words: tuple[str, ...], targets: set[str]) -> str | None:
    program, *rest = words
    if program == "make":
        unknown = [word for word in rest if "=" not in word and word not in targets]
        return f"no such target: {unknown}" if unknown else None
    if program == "python" and rest[:1] == ["-m"]:
        file = Path(ROOT, *rest[1].split("."))
        found = next((path for path in (file.with_suffix(".py"), file / "__main__.py") if path.is_file()), None)
        return _unknown_flag(found, rest[2:]) if found else "no such module"
    if program == "python" and rest[0].endswith(".py"):
        return _unknown_flag(ROOT / rest[0], rest[1:]) if (ROOT / rest[0]).is_file() else "no such file"
    if program in ("source", "sbatch", "bash"):
        return None if rest[-1].startswith((".venv/", "slurm/")) else "what is this?"
    return None if program == "python" and rest[0] == "-c" and compile(rest[1], "-c", "exec") else "unknown program"


def _unknown_flag(file: Path, arguments: list[str]) -> str | None:
    text = file.read_text(encoding="utf-8")
    missing = [word for word in arguments if word.startswith("--") and f'"{word}"' not in text]
    return f"no such option: {missing}" if missing else None


def _make_targets() -> set[str]:
    rules = subprocess.run(
        ["make", "--print-data-base", "--question", "--no-builtin-rules", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    return set(re.findall(r"^([\w-]+):", rules, re.MULTILINE))


def test_blocks_are_of_known_kinds():
    """A block in another language would not be checked."""
    languages = {block.language for page in PAGES for block in page.blocks if page.path.name != GENERATED}
    assert languages <= {"", "python", "mermaid"}


def test_python_snippets_compile_and_import():
    for block in (block for page in PAGES for block in page.blocks if block.language == "python"):
        compile(block.text, block.where, "exec")
    found = snippets()
    assert len(found) >= 6
    for block in found:
        for node in ast.walk(ast.parse(block.text, block.where)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing, f"{block.where}: {node.module} has no {missing}"


def test_json_examples_are_json():
    lines = [
        (block.where, line)
        for page in PAGES
        for block in page.blocks
        if block.text.startswith("{")
        for line in block.text.splitlines()
    ]
    assert len(lines) >= 3
    for where, line in lines:
        assert isinstance(json.loads(line), dict), where


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Page):
    bad = [link for link in page.links if not _link_leads(page, link)]
    bad += [path for path in page.inline if _is_path(path) and not _exists(path)]
    assert not bad


def _link_leads(page: Page, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = (page.path.parent / file).resolve() if file else page.path
    if "://" in link:
        return True
    return target.exists() and (not anchor or anchor in Page(target).anchors)


def _is_path(text: str) -> bool:
    return text.split("/")[0] in TOP and re.fullmatch(r"[\w.*{},/-]+", text) is not None and "/" in text


def _exists(text: str) -> bool:
    match = re.fullmatch(r"(.*)\{(.*)\}(.*)", text)
    options = [match[1] + option + match[3] for option in match[2].split(",")] if match else [text]
    return all(glob.glob(str(ROOT / option)) for option in options)


def test_keys_that_pages_name_exist():
    keys = set(re.findall(r"^\| `([\w.]+)`", (ROOT / "docs" / GENERATED).read_text(encoding="utf-8"), re.MULTILINE))
    sections = {key.partition(".")[0] for key in keys if "." in key}
    bad = []
    for page in PAGES:
        for code in page.inline:
            for key in re.findall(r"(?<![\w./])([a-z_]+(?:\.[a-z_]+)+)(?==|$|,)", code):
                if key.split(".")[0] in sections - {"model"} and key not in keys and not key.endswith((".py", ".png")):
                    bad.append(f"{page.name}: {key}")
    assert not bad


def test_generated_page_is_current(tmp_path: Path):
    generate = runpy.run_path(str(ROOT / "docs/generate.py"))
    assert generate["page"]() == (ROOT / "docs" / GENERATED).read_text(encoding="utf-8"), "run `make docs`"


def test_plots_are_current(tmp_path: Path):
    drawn = runpy.run_path(str(ROOT / "docs/plot.py"))["draw"](tmp_path)
    for file in drawn:
        assert file.read_bytes() == (ROOT / "docs/plots" / file.name).read_bytes(), f"{file.name}: run `make docs`"
    assert {file.name for file in drawn} == {file.name for file in (ROOT / "docs/plots").iterdir()}


@pytest.mark.parametrize("name", ["attention", "decode", "distributed", "effort", "studies", "traffic"])
def test_recorded_numbers_stand_in_a_page(name: str):
    """Plots and tables show the same numbers."""
    text = "\n".join(page.text for page in PAGES).replace(",", "")
    recorded = json.loads((ROOT / f"docs/numbers/{name}.json").read_text(encoding="utf-8"))
    found = {number: re.search(rf"(?<![\d.]){re.escape(str(number))}0*\b", text) for number in _numbers(recorded)}
    assert [number for number, match in found.items() if not match] == []


def _numbers(tree: object) -> list[float]:
    if isinstance(tree, dict):
        return [number for value in tree.values() for number in _numbers(value)]
    if isinstance(tree, list):
        return [number for value in tree for number in _numbers(value)]
    return [tree] if isinstance(tree, int | float) else []


def test_a_snippet_runs(workplace: Path, monkeypatch: pytest.MonkeyPatch):
    """The ones that use a checkpoint as a library; `make docs-check` runs the others too."""
    monkeypatch.chdir(workplace)
    run = [block for block in snippets() if "load_pretrained(" in block.text]
    assert len(run) >= 2
    for block in run:
        exec(compile(block.text, block.where, "exec"), {})


def test_make_lists_its_targets():
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = {words[1] for words in all_commands() if words[0] == "make" and len(words) > 1 and "=" not in words[1]}
    assert {name for name in named if name not in shown} == set()
