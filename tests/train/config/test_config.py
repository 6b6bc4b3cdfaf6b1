"""The configuration: what is shipped works, and what is wrong is reported all at once, in words that help."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from omegaconf import OmegaConf
from setuptools import find_namespace_packages

from data import DataConfig
from model import DraftObjective, ForwardOptions, LossWeights, ModelConfig, TextConfig
from model.build import allocate_model
from model.count import least_parameters
from optim import Schedule, Settings
from train import loop
from train.__main__ import load_task, run_task
from train.build import check_size
from train.config import moved, rules
from train.config.compose import CONF_DIR, GROUPS, open_overrides
from train.config.parse import parse
from train.config.problems import ConfigError
from train.config.resume import check_resumable, differences, flatten
from train.config.schema import SMALL, Config, to_dict
from train.logging import plot

ROOT = Path(__file__).resolve().parents[3]
SIZES = {field.name for field in dataclasses.fields(TextConfig)}


def shipped(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


@pytest.mark.parametrize(
    "choice", [f"{group}={name}" for group in ("experiment", "model", "optim", "logger") for name in shipped(group)]
)
def test_every_shipped_choice_is_valid(compose_raw, choice: str) -> None:
    """What begins with a checkpoint lacks that, conversations lack files, small vocabularies a tokenizer; no more."""
    raw = compose_raw(choice, *tasks_of(choice), "data.vocab_size=512")
    raw.init_from = None
    try:
        parse(raw)
    except ConfigError as error:
        allowed = (
            "init_from = null",
            "data.paths",
            "data.vocab_size = 512: is greater",
            "lora.targets",
            "distill_data.teacher",
        )
        assert all(line.startswith(allowed) for line in error.problems)


def tasks_of(choice: str) -> list[str]:
    """The task in the launch command of an experiment."""
    group, _, name = choice.partition("=")
    text = (CONF_DIR / group / f"{name}.yaml").read_text(encoding="utf-8")
    return re.findall(r"^# python -m train (task=\w+) experiment=", text, re.MULTILINE)[:1]


def test_every_experiment_says_how_to_launch_it() -> None:
    for path in (CONF_DIR / "experiment").glob("*.yaml"):
        assert "python -m train task=" in path.read_text(encoding="utf-8").partition("defaults:")[0], path


def test_no_shipped_number_is_read_as_text() -> None:
    """YAML reads 1e-20 as a string; it must be written 1.0e-20."""
    for path in CONF_DIR.rglob("*.yaml"):
        for key, value in flatten(OmegaConf.to_container(OmegaConf.load(path))):
            assert not (isinstance(value, str) and re.fullmatch(r"[-+]?\d[\d._]*(e[-+]?\d+)?", value)), (
                f"{path}: {key} = {value!r}"
            )


def test_released_model_has_the_released_numbers(compose_raw) -> None:
    released = ModelConfig.from_dict(parse(compose_raw("model=v41_flash")).model)
    assert released.text == ModelConfig().text
    assert released.vision is not None and released.vision.num_hidden_layers == 32


def test_all_problems_are_reported_at_once(compose_raw) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(compose_raw(
            "name=a/b",
            "task.tokns=5",
            "task.seq_len=long",
            "task.sample_temperature=-1",
            "runtime.attention=spars",
            "optim.schedule.floor=1.0",
            "data.pths=[x]",
            "model.hidden_size=3",
            "model.text_confg.hidden_size=3",
            "model.text_config.hidden_size=big",
            "optm.clip=2",
        ))  # fmt: skip
    text = str(caught.value)
    for expected in (
        r"name = .*'a/b'|name = \"a/b\"",
        r"task\.tokns = 5: no such key\. Did you mean task\.tokens\?",
        r"task\.seq_len = \"long\": should be a valid integer",
        r"task\.sample_temperature = -1: should be greater than or equal to 0",
        r"runtime\.attention = \"spars\": should be 'sparse' or 'dense'",
        r"optim\.schedule\.floor: must lie in",
        r"data\.pths = .*no such key\. Did you mean data\.paths\?",
        r"model\.hidden_size: belongs into text_config",
        r"model\.text_confg = .*no such key\. Did you mean model\.text_config\?",
        r"model\.text_config\.hidden_size: .*must be int",
        r"optm = .*no such key",
    ):
        assert re.search(expected, text), f"{expected} not in\n{text}"
    assert len(caught.value.problems) == 11


def test_a_remedy_says_what_to_write_and_one_mistake_is_told_once(compose_raw) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(compose_raw("task.tokens=1e6", "data.source=jsonl", "data.paths=a.jsonl", "experimnet=demo"))
    text = str(caught.value)
    assert 'data.paths = "a.jsonl": should be a list. Write it in brackets: data.paths=[a.jsonl]' in text
    assert "task.tokens = 1000000.0: should be a valid integer. Write 1000000" in text
    assert "Did you mean experiment?" in text
    assert len(caught.value.problems) == 3, text


def test_the_numbers_of_the_optimizers_are_checked(compose_raw) -> None:
    wrong = {
        "muon": {"momentum": 1.0, "update_rms": 0.0},
        "sinkhorn": {"momentum": -0.1, "iterations": 0, "tau": -1.0e-3, "eps": 0.0, "update_rms": -1.0},
        "adamw": {"beta1": 1.5, "beta2": 1.0, "eps": -1.0e-8},
    }
    values = [(f"optim.settings.{method}.{key}", value) for method in wrong for key, value in wrong[method].items()]
    with pytest.raises(ConfigError) as caught:
        parse(compose_raw("task.tokns=5", *(f"{key}={value!r}" for key, value in values)))
    text = str(caught.value)
    for key, value in values:
        assert re.search(rf"{re.escape(key)}: must (lie in|be) .*, got {re.escape(repr(value))}\n?", text), (key, text)
    assert "task.tokns" in text and len(caught.value.problems) == len(values) + 1


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_the_numbers_of_the_optimizers_are_finite(compose_raw, value: str) -> None:
    keys = ("muon.update_rms", "sinkhorn.tau", "sinkhorn.eps", "adamw.eps", "adamw.beta1")
    with pytest.raises(ConfigError) as caught:
        parse(compose_raw(*(f"optim.settings.{key}={value}" for key in keys)))
    assert all(f"optim.settings.{key}" in str(caught.value) for key in keys) and len(caught.value.problems) == len(keys)


def test_settings_without_effect_are_refused(compose_raw) -> None:
    idle = ("optim.per_head=false", "optim.tables=adamw", "optim.tables_lr_factor=3.0")
    with pytest.raises(ConfigError) as caught:
        parse(compose_raw("optim=adamw", *idle))
    assert [text.split(" = ")[0] for text in caught.value.problems] == [item.split("=")[0] for item in idle]
    assert 'optim.per_head = false: has no effect with optim.rules = "adamw"' in str(caught.value)
    parse(compose_raw("optim=report", *idle))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.world_size=4"], "parallel.dense_shards = 3: must divide parallel.world_size = 4"),
        (["parallel.world_size=3", "lora=all"], "with LoRA the dense matrices are frozen"),
        (["parallel.world_size=3", "task=dspark"], "task=dspark keeps the drafter and its frozen backbone whole"),
        (["parallel.world_size=3", "task=rl"], "a process that writes responses must hold the whole model"),
    ],
)
def test_dense_matrices_are_divided_only_where_they_can_be(compose_raw, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(compose_raw("model=tiny", "parallel.dense_shards=3", *overrides))
    assert message in str(refused.value)


def test_every_folder_with_code_or_configuration_is_packaged() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packaged = find_namespace_packages(str(ROOT), include=setup["packages"]["find"]["include"])
    files = [path for top in ("train", "model", "optim", "data") for path in (ROOT / top).rglob("*.py")]
    folders = {path.parent.relative_to(ROOT) for path in (*files, *CONF_DIR.rglob("*.yaml"))}
    assert {".".join(folder.parts) for folder in folders} == set(packaged)


def test_rules_between_keys_are_checked_beside_single_mistakes(compose_raw) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(compose_raw("model=tiny", "task.seq_len=2048", "data.vocab_size=1000", "task.tokns=5"))
    text = str(caught.value)
    assert "task.seq_len = 2048: is greater than model.text_config.max_position_embeddings = 1024" in text
    assert "data.vocab_size = 1000: is greater than model.text_config.vocab_size = 512" in text
    assert "task.tokns" in text


def test_model_schedule_mistake_names_key_layer_and_rule(compose_raw) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.text_config\.kv_source_layer_ids: layer 2 must also be in index_source"
    ):
        parse(compose_raw("model=tiny", "model.text_config.kv_source_layer_ids=[1,2,3]"))


def test_missing_value_is_named(compose_raw) -> None:
    with pytest.raises(ConfigError, match="seed is missing"):
        parse(compose_raw("~seed"))


def test_only_values_are_opened_for_the_check() -> None:
    given = [
        "model=tiny",
        "experiment=demo",
        "task.tokens=5",
        "+a=1",
        "++b=2",
        "~c",
        "--help",
        "unknown=1",
        "optim@x=adamw",
    ]
    expected = [
        "model=tiny",
        "experiment=demo",
        "++task.tokens=5",
        "+a=1",
        "++b=2",
        "~c",
        "--help",
        "++unknown=1",
        "optim@x=adamw",
    ]
    assert open_overrides(given) == expected


def test_round_trip_has_no_difference(make_config) -> None:
    config = make_config()
    assert differences(to_dict(config), config) == []


def test_keys_that_moved_are_refused_with_their_new_names() -> None:
    for old, new in moved.MOVED.items():
        section, *inner = old.split(".")
        value: object = 1
        for name in reversed(inner):
            value = {name: value}
        raw = {"task": {"kind": "pretrain"}, section: value}
        with pytest.raises(ConfigError) as caught:
            parse(raw)
        assert f"{old} = 1: this key was renamed. Its new name is {new}" in str(caught.value)


def test_keys_that_moved_are_found_at_any_depth_and_only_where_they_are() -> None:
    saved = {"rl": {"loss": {"drift": 0.5, "kl": 0.0}}}
    assert moved.upgraded(saved) == {"rl": {"loss": {"off_policy_threshold": 0.5, "kl": 0.0}}}
    assert "drift" in saved["rl"]["loss"], "what was read is left as it is"
    for none in ({}, {"rl": None}, {"rl": {"loss": None}}):
        assert moved.upgraded(none) == none


def test_a_run_saved_under_keys_that_moved_continues(make_config) -> None:
    config = make_config("optim=report", "task.micro_batch=2", "task.global_batch_rows=6")
    saved = to_dict(config)
    for old, new in moved.MOVED.items():
        if not old.startswith(("rl.", "device")):  # of tasks other than this run's
            (section, leaf), (target, name) = old.split("."), new.split(".")
            saved[section][leaf] = saved[target].pop(name)
    saved["task"]["accumulation"] = 3
    del saved["loss"]
    assert check_resumable(saved, config) == []
    saved["task"]["accumulation"] = 4
    with pytest.raises(ConfigError, match="task.global_batch_rows: 8 -> 6"):
        check_resumable(saved, config)


def test_settings_that_came_later_count_as_saved_with_their_defaults(make_config) -> None:
    saved = to_dict(make_config("optim=report"))
    saved.pop("lora"), saved["runtime"].pop("decoder_replay"), saved["optim"].pop("router_bias_mode")
    saved["model"]["text_config"].pop("index_n_heads")  # 32 unless it is given
    now = ("optim=report", "model.text_config.index_n_heads=32")
    assert check_resumable(saved, make_config(*now)) == []
    assert check_resumable(saved, make_config(*now, "task.tokens=99")) == ["task.tokens: 1472 -> 99"]
    with pytest.raises(ConfigError) as caught:
        check_resumable(saved, make_config("optim=report", "runtime.decoder_replay=true", "optim.router_bias_mode=off"))
    assert [text.split(": the run")[0] for text in caught.value.problems] == [
        "model.text_config.index_n_heads: 32 -> 16",
        'optim.router_bias_mode: "separate" -> "off"',
        "runtime.decoder_replay: false -> true",
    ]


def test_changes_that_continue_and_changes_that_do_not(make_config) -> None:
    saved = to_dict(make_config())
    assert check_resumable(saved, make_config("task.tokens=99", "checkpoint.keep=9")) == [
        "checkpoint.keep: 2 -> 9",
        "task.tokens: 1472 -> 99",
    ]
    moved = ("data.cache_dir=/a", "data.paths=[/b]", "data.validation_paths=[/c]")
    assert [line.split(":")[0] for line in check_resumable(saved, make_config(*moved))] == [
        "data.cache_dir",
        "data.paths",
        "data.validation_paths",
    ]
    with pytest.raises(ConfigError) as caught:
        check_resumable(
            saved, make_config("task.seq_len=32", "model.text_config.hidden_size=16", "seed=1", "checkpoint.keep=9")
        )
    assert [text.split(":")[0] for text in caught.value.problems] == [
        "model.text_config.hidden_size",
        "seed",
        "task.seq_len",
    ]


def test_what_a_user_can_mend_ends_in_a_message(
    compose_raw, overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    for change, expected in (
        (f"output={file}", str(file)),
        ("data.paths=[/nowhere/at/all]", "/nowhere/at/all"),
        (f"data.tokenizer={file}", str(file)),
    ):
        with pytest.raises(SystemExit) as caught:
            run_task(compose_raw(*overrides, f"output={tmp_path}", change))
        error = capsys.readouterr().err
        assert caught.value.code == 2 and error.startswith("error: ") and expected in error, error


def test_our_own_mistake_in_training_keeps_its_traceback(
    compose_raw, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_, **given) -> None:
        raise ValueError("shapes do not match")

    monkeypatch.setattr(loop, "train_step", broken)
    with pytest.raises(ValueError, match="shapes do not match"):
        run_task(compose_raw(*overrides, f"output={tmp_path}"))


def test_command_line_reports_without_traceback() -> None:
    command = [sys.executable, "-m", "train", "experiment=demo", "task.tokns=1", "seed=-1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "task.tokns" in done.stderr and "seed = -1" in done.stderr and "Traceback" not in done.stderr


def missing_keys(cls: type, values: object, prefix: str = "") -> list[str]:
    """Keys of a dataclass, and of those in it, that a tree does not have."""
    if not isinstance(values, dict):
        return []
    hints, found = get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        key = f"{prefix}{field.name}"
        inner = next((kind for kind in (hints[field.name], *get_args(hints[field.name])) if is_dataclass(kind)), None)
        if field.name not in values:
            found.append(key)
        elif inner is not None:
            found += missing_keys(inner, values[field.name], f"{key}.")
    return found


@pytest.mark.parametrize(
    "choices",
    [
        *((f"{group}={name}",) for group in sorted(GROUPS - {"study", "rollout", "task"}) for name in shipped(group)),
        *((f"task={name}",) for name in shipped("task") if name not in SMALL),
        *(("task=rl", f"rollout={name}") for name in shipped("rollout")),
    ],
    ids=" ".join,
)
def test_every_value_of_a_run_stands_in_a_file(compose_raw, choices: tuple[str, ...]) -> None:
    raw = compose_raw(*choices, *tasks_of(choices[0]) if choices[0].startswith("experiment") else ())
    assert missing_keys(Config, OmegaConf.to_container(raw)) == []


def test_a_default_in_the_code_is_that_of_the_files(compose_raw) -> None:
    raw = OmegaConf.to_container(compose_raw("optim=report", "model=v41_flash", "task=pretrain"), resolve=True)
    schedule, data = Schedule(1.0, 1.0, 0, 0, 0), {**asdict(DataConfig()), "vocab_size": 129280}
    assert raw["runtime"] == asdict(ForwardOptions()) and raw["loss"] == asdict(LossWeights())
    assert raw["optim"]["settings"] == asdict(Settings()) and raw["data"] == data
    assert raw["optim"]["schedule"]["vision_factor"] == schedule.vision_factor
    drafter = OmegaConf.to_container(compose_raw("task=dspark"))["dspark"]
    assert asdict(DraftObjective()).items() <= drafter.items()
    released = {name: value for name, value in ModelConfig().to_dict()["text_config"].items() if name in SIZES}
    assert released.items() <= raw["model"]["text_config"].items()


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        (1, "a step: 8 rows = 1 process x 4 micro-batches x 2 rows"),
        (4, "a step: 8 rows = 4 processes x 1 micro-batch x 2 rows"),
        (8, "a step: 8 rows = 8 processes x 1 micro-batch x 1 row"),
    ],
)
def test_a_run_says_what_a_step_is(make_config, processes: int, expected: str) -> None:
    task = make_config("task.micro_batch=2", "task.global_batch_rows=8").task
    assert task.step_text(processes) == expected


def test_a_run_says_which_processes_share_rows(make_config) -> None:
    layout = ("parallel.world_size=4", "parallel.context_parallel=2", "task.seq_len=32")
    config = make_config("task.micro_batch=1", "task.global_batch_rows=8", *layout)
    text = config.task.step_text(config.parallel.world_size, config.parallel.context_parallel)
    assert text == "a step: 8 rows = 2 groups of 2 processes that share rows x 4 micro-batches x 1 row"
    make_config("task.micro_batch=1", "task.global_batch_rows=2", *layout)  # two groups share two rows


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["parallel.world_size=6", "parallel.context_parallel=4"], "must divide parallel.world_size = 6"),
        (["task.seq_len=33"], "must divide task.seq_len = 33"),
        (["task.seq_len=14"], "each process would get 7 of the 14 tokens of a row, fewer than the 8 of model.text_con"),
        (["task=check"], "task=check does not split rows over processes"),
        (["task.global_batch_rows=1", "parallel.world_size=4"], "parallel.world_size / parallel.context_parallel = 2"),
    ],
)
def test_rows_that_cannot_be_split_over_processes_are_refused(compose_raw, changes: list[str], reason: str) -> None:
    start = ["model=tiny", "data.vocab_size=512", "task.seq_len=32", "task.micro_batch=1", "task.global_batch_rows=6"]
    with pytest.raises(ConfigError) as caught:
        parse(compose_raw(*start, "parallel.world_size=2", "parallel.context_parallel=2", *changes))
    (line,) = [line for line in caught.value.problems if reason in line]
    key = "task.global_batch_rows" if "rows=1" in changes[0] else "parallel.context_parallel"
    assert line.startswith(f"{key} = "), line


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["task.length_schedule=[{tokens: 9, seq_len: 64}]"], "needs more tokens and longer rows than before"),
        (["task.length_schedule=[{tokens: 9, seq_len: 96}]"], "n times task.seq_len = 64 for an n that divides"),
        (["task.length_schedule=[{tokens: 9, seq_len: 512}]"], "a step keeps its 256 tokens"),
        (
            ["task.length_schedule=[{tokens: 9, seq_len: 256}]", "parallel.world_size=2"],
            r"task.global_batch_rows = 1: in rows of 256 tokens \(task.length_schedule\) must be a multiple of",
        ),
        (["task.length_schedule=[{tokens: 9, seq_len: 128}]", "data.window_tokens=500"], "data.window_tokens of at"),
        (
            ["task.length_schedule=[{tokens: 9, seq_len: 128}]", "model.text_config.max_position_embeddings=100"],
            "is longer than model.text_config.max_position_embeddings = 100",
        ),
        (["task.length_schedule=[{tokens: 9, seq_len: 128}]", "task.kind=sft"], "task=sft has rows of one length"),
    ],
)
def test_lengths_of_rows_that_do_not_fit_are_refused(make_config, changes: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_config(*changes)


def test_an_adapter_may_have_a_schedule_of_lengths(make_config, tmp_path: Path) -> None:
    """The length of rows has nothing to do with which weights are trained; only the missing checkpoint is refused."""
    with pytest.raises(ConfigError) as refused:
        make_config("lora=all", "optim=adamw", "task.length_schedule=[{tokens: 9, seq_len: 128}]")
    assert "length_schedule" not in str(refused.value) and "init_from" in str(refused.value)


def test_longer_rows_keep_the_tokens_of_a_step(make_config) -> None:
    task = make_config("task.length_schedule=[{tokens: 500, seq_len: 128}, {tokens: 900, seq_len: 256}]").task
    found = [(now.seq_len, now.global_batch_rows, now.micro_batch) for now in map(task.at, (0, 499, 500, 899, 900))]
    assert found == [(64, 4, 2), (64, 4, 2), (128, 2, 1), (128, 2, 1), (256, 1, 1)]
    assert not task.at(500).length_schedule


def test_a_key_that_is_none_any_more_is_left_out_and_told(make_config) -> None:
    saved = to_dict(make_config())
    saved["past"], saved["task"]["old"] = {"setting": 1}, "x"
    saved["model"]["text_config"]["gone"] = 3
    saved.pop("lora"), saved["runtime"].pop("decoder_replay")  # filled in all the same
    assert sorted(check_resumable(saved, make_config())) == [
        "model.text_config.gone: was 3; this version has no such key",
        'past: was {"setting": 1}; this version has no such key',
        'task.old: was "x"; this version has no such key',
    ]
    with pytest.raises(ConfigError, match="seed: 0 -> 1"):
        check_resumable(saved, make_config("seed=1"))


def test_a_saved_value_that_is_not_allowed_any_more_is_named_alone(make_config) -> None:
    """Beside it, keys that the saved configuration lacks are filled as ever."""
    saved = to_dict(make_config())
    saved["checkpoint"]["keep"] = "all"
    saved.pop("lora"), saved["runtime"].pop("decoder_replay")
    assert check_resumable(saved, make_config()) == [
        'checkpoint.keep: "all" -> 2; this version does not allow the saved value'
    ]
    saved["optim"]["router_bias_mode"] = "sometimes"
    with pytest.raises(ConfigError) as refused:
        check_resumable(saved, make_config())
    expected = 'optim.router_bias_mode: "sometimes" -> "separate"; this version does not allow the saved value'
    assert refused.value.problems == [expected]


SHAPES = [-1, 0, 1, 1.0e30, math.nan, math.inf, None, "abc", "", [], [1, 2], {"a": 1}, True, 1.5, -0.0, 10**12]
SHAPES += ["a b", "${x}", "${seed}", "???", [None], [[1]], [{}], [math.nan], "\0"]


def places(tree: object, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value of a tree, sections and items of lists among them."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


@pytest.mark.parametrize(
    "choices",
    [
        ("experiment=demo",),
        ("task=merge",),
        *(
            pytest.param(choices, marks=pytest.mark.slow)
            for choices in (
                ("experiment=vision_base",),
                ("task=rl", "rollout=sglang"),
                ("task=dspark",),
                ("task=check", "data=chat"),
                ("task=convert",),
            )
        ),
    ],
    ids=" ".join,
)
def test_any_value_of_any_key_is_taken_or_refused_by_name(compose_raw, choices: tuple[str, ...]) -> None:
    """Every key is given some values drawn by a seed."""
    tree, draw = OmegaConf.to_container(compose_raw(*choices), resolve=False), random.Random(0)
    for path in places(tree):
        for value in draw.sample(SHAPES, 2):
            changed = copy.deepcopy(tree)
            section = changed
            for part in path[:-1]:
                section = section[part]
            section[path[-1]] = copy.deepcopy(value)
            try:
                parse(changed)
            except ConfigError as error:
                assert all(re.match(r"[\w.\[\]]+( =|=|:| is| has)", line) for line in error.problems), error


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("model.text_config.rope_scaling=true", "model.text_config.rope_scaling"),
        ("model.text_config.rope_scaling=0", "model.text_config.rope_scaling"),
        ("model.text_config.rope_scaling.beta_fast=nan", "model.text_config.rope_scaling.beta_fast"),
        ("model.text_config.rope_scaling.factor=inf", "model.text_config.rope_scaling.factor"),
        ("model.text_config.num_nextn_predict_layers=-1", "model.text_config.num_nextn_predict_layers"),
        ("model.text_config.rope_scaling.beta_slow=0", "model.text_config.rope_scaling.beta_slow"),
        ("init_from=???", "init_from"),
        ('data.cache_dir="a\0b"', "data.cache_dir"),
        ("model.vision_config=[]", "model.vision_config"),
        ("++model.image_token_id=abc", "model.image_token_id"),
        ("init_from='${x}'", "init_from"),
        ("name='${x}'", "name"),
    ],
)
def test_what_was_accepted_or_crashed_is_refused_by_its_key(compose_raw, change: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(compose_raw("experiment=demo", change))
    assert re.match(rf"{re.escape(key)}\W", caught.value.problems[0]), caught.value


@pytest.mark.parametrize("value", [0, False, "", [], 3])
def test_a_section_of_the_model_is_a_mapping(value: object) -> None:
    for key in ("text_config", "vision_config"):
        with pytest.raises(ValueError, match=f"{key}: must be a mapping"):
            ModelConfig.from_dict({key: value})


def test_a_size_that_the_machine_cannot_hold_is_refused_with_what_it_needs(compose_raw, overrides, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        run_task(compose_raw(*overrides, "model.text_config.hidden_size=999999999999"))
    error = capsys.readouterr().err
    assert caught.value.code == 2, error
    assert re.search(r"model: needs at least [\d,]+ GiB .+ like this one has \d+ GiB", error), error


def test_divided_dense_matrices_halve_the_least_size(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients are never whole: 4 bytes a parameter count instead of 8."""
    parameters = least_parameters(ModelConfig.from_dict(make_config().model))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=6 * parameters))
    with pytest.raises(ConfigError, match="for its weights and gradients"):
        check_size(make_config("parallel.world_size=2"), torch.device("cpu"))
    check_size(make_config("parallel.world_size=2", "parallel.dense_shards=2"), torch.device("cpu"))


def test_the_least_size_of_a_model_is_less_than_its_size() -> None:
    for name in ("bench", "v41_flash"):
        raw = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "model" / f"{name}.yaml"))
        config = ModelConfig.from_dict(raw)
        model = allocate_model(config, None, None, "meta", torch.float32)
        exact = sum(parameter.numel() for parameter in model.parameters())
        assert 0.8 * exact < least_parameters(config) <= exact


def test_functions_that_moved_are_refused_with_their_new_names_and_runs_with_them_continue(compose_raw) -> None:
    old = "[{prompts: 'train.rl.tasks:letters', reward: 'train.rl.tasks:exact'}]"
    with pytest.raises(ConfigError) as caught:
        parse(compose_raw("task=rl", f"rl.tasks={old}"))
    text = str(caught.value)
    assert "rl.tasks[0].prompts = train.rl.tasks:letters: this function was renamed" in text
    assert "Its new name is train.rl.rewards.builtin:exact" in text
    saved = {"rl": {"tasks": [{"prompts": "a.jsonl", "reward": "train.rl.tasks:exact", "held_out": None}]}}
    expected = {"prompts": "a.jsonl", "reward": "train.rl.rewards.builtin:exact", "held_out": None}
    assert moved.upgraded(saved) == {"rl": {"tasks": [expected]}}


def test_wandb_that_is_not_installed_is_refused(compose_raw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="logger.wandb = true: wandb is not installed. Install it"):
        parse(compose_raw("logger=wandb"))


def test_a_run_without_matplotlib_draws_nothing_and_says_so(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    config = make_config()
    load_task("pretrain")(config)
    text = (config.run_dir / "train.log").read_text(encoding="utf-8")
    assert (
        text.count("loss.png is not drawn: matplotlib is not installed") == 1
        and "loss.png" not in text.partition("\n")[2]
    )
    assert not (config.run_dir / "loss.png").exists()
