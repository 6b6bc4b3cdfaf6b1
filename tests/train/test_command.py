"""The command line: help and refusals come at once and without torch, from any folder, and closed pipes are quiet."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from train.config.compose import CONF_DIR, GROUPS, open_overrides
from train.config.help import GROUPS as EXPLAINED
from train.config.help import help_text
from train.config.problems import ConfigError
from train.config.tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]
LOADED = "import sys; from train.__main__ import command\ntry: command()\nfinally: print('torch' in sys.modules)"


def environment() -> dict[str, str]:
    """That of an installation by plain path, as `make install` makes."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], "usage: python -m train task=NAME"),
        (["experiment=demo", "task.tokns=1"], "task.tokns = 1: no such key"),
        (["task=sft"], "init_from = null: task=sft starts from a checkpoint"),
        (["task=rl", "rl.samples=[1,2,3,4]", "parallel.world_size=3"], "rl.samples"),
        (["model.text_config.kv_source_layer_ids=[1,2,3]"], "kv_source_layer_ids"),
        (["lora=all", "optim=report"], "whose adapters are always trained by AdamW"),
        (["data=chat"], "data.paths=[]: must name at least one file"),
        (["data.paths=[{a]"], "cannot be read"),
    ],
)
def test_help_and_refusals_import_no_torch(arguments: list[str], expected: str) -> None:
    done = subprocess.run([sys.executable, "-c", LOADED, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False" and expected in done.stdout + done.stderr, done.stderr
    assert done.returncode == (0 if "--help" in arguments else 2) and "Traceback" not in done.stderr


def test_help_names_every_task_with_an_example_and_every_group() -> None:
    text = help_text()
    assert {path.stem for path in (CONF_DIR / "task").glob("*.yaml")} == set(TASKS)
    assert set(EXPLAINED) == GROUPS - {"task", "study"}
    for task in TASKS:
        assert re.search(rf"^  {task} .+Needs\s.+?python -m train task={task} ", text, re.MULTILINE | re.DOTALL), task
    for group in EXPLAINED:
        assert f"\n  {group} " in text
    assert "docs/configuration.md" in text


def test_every_task_is_named_by_a_function() -> None:
    for path in TASKS.values():
        module, function = path.split(":")
        source = ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
        assert f"def {function}(" in source


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"]])
def test_a_pipe_that_nobody_reads_is_quiet(arguments: list[str]) -> None:
    assert_quiet(arguments)


@pytest.mark.slow
def test_a_task_whose_output_nobody_reads_is_quiet() -> None:
    assert_quiet(["task=plan", "model=tiny", "optim=adamw", "parallel=single", "task.seq_len=64"])


def assert_quiet(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "train", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == -signal.SIGPIPE and not done.stderr, done.stderr


def test_it_runs_from_a_folder_with_folders_of_the_same_names(tmp_path: Path) -> None:
    for name in ("data", "model", "optim", "conf"):
        (tmp_path / name).mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "train", "--help"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr


@pytest.mark.parametrize("file", ["data.py", "model/__init__.py"])
def test_a_module_of_the_same_name_is_refused_in_one_line(file: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.touch()
    command = [sys.executable, "-m", "train", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and str(path) in done.stderr
    assert len(done.stderr.splitlines()) == 1 and "narrows" in done.stderr


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("data.paths=[/home/user/résumés/chats.jsonl]", ["/home/user/résumés/chats.jsonl"]),
        ("data.paths=[/a/é.jsonl,b=c.txt,/d e]", ["/a/é.jsonl", "b=c.txt", "/d e"]),
        ("init_from=/home/user/a=b", "/home/user/a=b"),
        ("init_from=/home/user/(copy) #2", "/home/user/(copy) #2"),
        ("init_from='/quoted/a=b'", "/quoted/a=b"),
        ("task.tokens=5", 5),
    ],
)
def test_a_path_is_taken_whatever_letters_it_has(argument: str, value: object) -> None:
    (opened,) = open_overrides([argument])
    assert OverridesParser.create().parse_override(opened).value() == value


@pytest.mark.parametrize("argument", ["data.paths=[{a]", "name='é", "rl.tasks=[{prompts: a, reward: b=c}]"])
def test_what_cannot_be_read_says_how_to_quote(argument: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read: .+ Quote the text and the whole argument"):
        open_overrides([argument])
