"""How a run of every task begins and ends: its processes, its directory, its log.

A task opens a ``run_session``, builds its objects, resumes from the checkpoint found or calls ``begin``, then trains
inside ``run_logger``; ``report_files`` prints the last lines.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import yaml

from data.tokenizer_files import tokenizer_files
from model import convert_checkpoint, save_pretrained
from model.checkpoint.names import MERGED
from model.packed import holds_packed
from model.parallel.collective_errors import all_or_none
from optim import format_table
from train import origin
from train.build import Run, whole_size
from train.checkpoint import run_state, storage
from train.checkpoint.init_from import find_pretrained, load_pretrained_weights
from train.checkpoint.run_state import TrainerState, write_text
from train.config.problems import ConfigError
from train.config.resume import check_resumable
from train.config.schema import Config, to_dict
from train.distributed.launch import launch
from train.distributed.world import World
from train.errors import Interrupted, NonFiniteError
from train.logging.log import NullReporter, Reporter
from train.lora.peft_format import merged_record, read_changes


@contextmanager
def run_session(config: Config) -> Iterator[tuple[World, Path | None, list[str]]]:
    """Start or join the processes of the run, which end together, and lock ``config.run_dir`` against other runs.

    Yields the processes, the checkpoint to continue from (or None), and the settings that changed since.

    Raises:
        ConfigError: the directory is in use, or holds a run that this configuration would not continue; the number of
            processes is not the configured one.
        RankLost: another process ended or no longer answers.
    """
    world = launch(config.parallel)
    alone = only_process_in(config.run_dir) if world.first else nullcontext()
    with world.collective_guard(Interrupted, NonFiniteError), alone:
        folder, changes = world.from_first(find_state(config))
        if world.first:
            print("Preparing data and model; the first time takes a minute ...", flush=True)
        yield world, folder, changes


@contextmanager
def run_logger(
    run: Run, state: TrainerState, folder: Path | None, changes: list[str], reporter_class: type[Reporter] = Reporter
) -> Iterator[Reporter]:
    """Save the run's settings, log the opening lines, and yield the logger; it is closed at the end in any case.

    folder, changes: from ``run_session``. reporter_class: class of the first process's logger; the others log nothing.
    """
    if run.world.first:
        save_settings(run)
        origin.record(run.config)
    reporter = reporter_class(run.config, state) if run.world.first else NullReporter()
    try:
        announce(run, state, reporter, folder, changes)
        yield reporter
    finally:
        reporter.close()


def find_state(config: Config) -> tuple[Path | None, list[str]]:
    """The checkpoint to continue from (or None), and the settings that changed since.

    Raises:
        ConfigError: the directory holds a run that this configuration would not continue.
    """
    path, folder = config.run_dir / "config.yaml", run_state.latest(config.run_dir / "checkpoints")
    if folder is None or not path.exists():
        return folder, []
    saved = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "init_from" in origin.check(config):  # the same checkpoint, perhaps under another name
        saved["init_from"], saved["data"]["tokenizer"] = config.init_from, config.data.tokenizer
    return folder, check_resumable(saved, config)


@contextmanager
def only_process_in(directory: Path) -> Iterator[None]:
    """Lock a run directory against a second process; the lock ends with the process, however that ends."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                [f"{directory} is in use by another process. Wait for it, or choose another name=..."]
            ) from None
        yield


def begin(run: Run) -> TrainerState:
    """The state before the first step; the weights come from ``init_from`` if that is set."""
    if run.config.init_from is not None and not run.config.frozen_base:  # else `build` has loaded them
        run.notes.append(f"weights: {load_pretrained_weights(run.model, run.config.init_from)}")
    return TrainerState()


def save_settings(run: Run) -> None:
    """Write what a later run needs besides the weights."""
    directory, config = run.config.run_dir, to_dict(run.config)
    write_text(directory / "tokenizer.json", run.tokenizer.to_str(pretty=True))
    write_text(directory / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def announce(run: Run, state: TrainerState, reporter: Reporter, folder: Path | None, changes: list[str]) -> None:
    """The opening lines: what is trained, from where, and how."""
    size = sum(whole_size(parameter) for parameter in run.model.parameters())
    reporter.log(f"run {run.config.run_dir}: {size:,} parameters on {run.device.type}, {run.config.parallel.precision}")
    reporter.log(run.config.task.step_text(run.world.size))
    reporter.log(f"threads of this process: {torch.get_num_threads()} (OMP_NUM_THREADS sets them)")
    for note in run.notes:
        reporter.log(note)
    for line in memory_lines(run.world.gather(run.memory())):
        reporter.log(line)
    if folder is None:
        if run.world.size > 1:
            reporter.log("what rank 0 holds:")
        reporter.log(format_table(run.optimizer.table()))
        return
    done = "; it is complete, raise task.tokens to train on" if state.tokens >= run.config.task.tokens else ""
    reporter.log(f"continuing from {folder}: step {state.step}, {state.tokens:,} tokens{done}")
    for change in changes:
        reporter.log(f"changed since: {change}")


def memory_lines(ranks: list[dict[str, int]], most: int = 8) -> list[str]:
    """What each rank holds; with many ranks, the range."""
    if len(ranks) > most:
        ranges = {name: [rank[name] / 2**20 for rank in ranks] for name in ranks[0]}
        shown = ", ".join(f"{name} {min(sizes):.2f} to {max(sizes):.2f} MiB" for name, sizes in ranges.items())
        return [f"memory of {len(ranks)} ranks, each: {shown}"]
    names = [f" of rank {number}" for number in range(len(ranks))] if len(ranks) > 1 else [""]
    return [
        f"memory{name}: " + ", ".join(f"{part} {size / 2**20:.2f} MiB" for part, size in rank.items())
        for name, rank in zip(names, ranks, strict=True)
    ]


def report_files(run: Run, reporter: Reporter) -> None:
    """Export the finished run's model if configured, and log the files of the run."""
    directory = run.config.run_dir
    reporter.log(f"checkpoint: {run_state.latest(directory / 'checkpoints')}")
    if run.config.lora.on:
        reporter.log(f"adapter:    {keep_adapter(run)}")
    if run.config.checkpoint.export:
        export(run, directory / "export")
        reporter.log(f"export:     {directory / 'export'}")
    if (picture := reporter.plot()) is not None:
        reporter.log(f"plot:       {picture}")
    reporter.log(f"metrics:    {directory / 'metrics.jsonl'}")


def export(run: Run, folder: Path) -> None:
    """Write the finished run's model as a checkpoint folder, all ranks together.

    An adapter on packed weights is merged while the files of its base are rewritten, a few rows at a time, so the
    merged weights are never held in memory.
    """
    config, form = run.config, run.config.checkpoint.export
    assert form, "only a run that exports comes here"
    if config.lora.on and holds_packed(run.model):
        with all_or_none(storage.ranks()):
            if run.world.first:
                changes = read_changes(config.run_dir / "adapter", run.model_config.text.n_routed_experts)
                base = find_pretrained(config.initial_checkpoint).folder
                files = {MERGED: merged_record(config.run_dir / "adapter", base)}
                convert_checkpoint(base, folder, form, changes=changes, replace=True, files=files)
        return
    files = tokenizer_files(config.data, run.tokenizer)
    if config.lora.on:
        files[MERGED] = merged_record(config.run_dir / "adapter", find_pretrained(config.initial_checkpoint).folder)
    save_pretrained(
        run.backbone,
        folder,
        run.tokenizer,
        format=form,
        companions=files,
        ranks=storage.ranks(),
        drafter=run.model if config.dspark is not None else None,
    )


def keep_adapter(run: Run) -> Path:
    """Write the adapter, and merge it into the weights unless they are packed. Returns its folder."""
    from train.lora import inject

    folder, config = run.config.run_dir / "adapter", run.config
    inject.save_adapter(run.model, folder, config.initial_checkpoint, biases=config.optim.router_bias_mode != "off")
    if not holds_packed(run.model):
        inject.merge(run.model)
    return folder
