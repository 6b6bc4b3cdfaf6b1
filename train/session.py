"""Start and end of a run, shared by all tasks: its processes, its directory, its log and its export.

A task enters ``run_session`` and builds its objects. It resumes from the checkpoint that was found or calls ``begin``,
then trains inside ``run_logger``. At the end it calls ``report_end``.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import yaml

from data.tokenizer_files import tokenizer_files
from model import Drafter, convert_checkpoint, save_pretrained
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
from train.distributed.world import World, is_collective, settle_precision
from train.errors import LOST, Interrupted, NonFiniteError, exit_code
from train.logging.log import NullReporter, Reporter
from train.lora.peft_format import merged_record, read_changes
from train.lora.serving import merge_report

ANSWERS = ("sft", "dpo", "rl", "distill")  # tasks whose model answers questions


@contextmanager
def run_session(config: Config) -> Iterator[tuple[World, Path | None, list[str]]]:
    """Connect the processes of the run and lock ``config.run_dir`` against other runs. If one process fails, all end.

    Yields the processes, the checkpoint to continue from (or None), and a line for each setting that changed since that
    checkpoint was saved.

    Raises:
        ConfigError: another process uses the directory; or the directory holds a run that cannot continue with this
            configuration; or the number of processes differs from the configured number.
        RankLost: another process ended or no longer answers.
    """
    world = launch(config.parallel, config.run_dir / "stacks")
    alone = only_process_in(config.run_dir) if world.first else nullcontext()
    with world.collective_guard(Interrupted, NonFiniteError), alone:
        folder, changes = world.from_first(find_state(settle_precision(config, world.device)))
        if world.first:
            print("Preparing data and model; the first time takes a minute ...", flush=True)
        yield world, folder, changes


@contextmanager
def run_logger(
    run: Run, state: TrainerState, folder: Path | None, changes: list[str], reporter_class: type[Reporter] = Reporter
) -> Iterator[Reporter]:
    """Save the run's settings, log its first lines and yield the logger. The logger is closed at the end in any case.

    Args:
        folder, changes: the checkpoint and the changed settings that ``run_session`` yields.
        reporter_class: class of the logger on rank 0; the other ranks log nothing.
    """
    if run.world.first:
        save_settings(run)
        origin.record(run.config)
    reporter = reporter_class(run.config, state) if run.world.first else NullReporter()
    run.world.start.mark("weights")
    code = 0
    try:
        announce(run, state, reporter, folder, changes)
        yield reporter
    except BaseException as error:
        code = LOST if is_collective(error) else exit_code(error)  # `collective_guard` makes it a `RankLost`
        raise
    finally:
        reporter.close(code)


def find_state(config: Config) -> tuple[Path | None, list[str]]:
    """Find the checkpoint to continue from (or None), and the settings that changed since it was saved.

    Raises:
        ConfigError: the directory holds a run that cannot be continued with this configuration.
    """
    path, folder = config.run_dir / "config.yaml", run_state.latest(config.run_dir / "checkpoints")
    if folder is None or not path.exists():
        return folder, []
    saved = yaml.safe_load(path.read_text(encoding="utf-8"))
    changes = check_resumable(origin.renamed(saved, config), config)
    return folder, [*changes, *origin.changed_files(config)]


@contextmanager
def only_process_in(directory: Path) -> Iterator[None]:
    """Lock a run directory so that no second process uses it. The system releases the lock when the process ends."""
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
    """Return the counters of a new run, after loading the weights of ``init_from`` if it is set."""
    if run.config.init_from is not None and not run.config.frozen_base:  # a frozen base was loaded by `build`
        run.notes.append(f"weights: {load_pretrained_weights(run.model, run.config.init_from)}")
    return TrainerState()


def save_settings(run: Run) -> None:
    """Write the configuration and the tokenizer of the run into its directory."""
    directory, config = run.config.run_dir, to_dict(run.config)
    write_text(directory / "tokenizer.json", run.tokenizer.to_str(pretty=True))
    write_text(directory / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def announce(run: Run, state: TrainerState, reporter: Reporter, folder: Path | None, changes: list[str]) -> None:
    """Log the first lines of a run: model size, step size, memory, and the checkpoint that the run continues from."""
    size = sum(whole_size(parameter) for parameter in run.model.parameters())
    reporter.log(f"run {run.config.run_dir}: {size:,} parameters on {run.device.type}, {run.config.parallel.precision}")
    reporter.log(run.config.task.at(state.tokens).step_text(run.world.size, run.world.parallel.context.size))
    reporter.log(f"threads of this process: {torch.get_num_threads()} (OMP_NUM_THREADS sets them)")
    for note in run.notes:
        reporter.log(note)
    for line in memory_lines(run.world.gather(run.memory())):
        reporter.log(line)
    if folder is None:
        if run.world.size > 1:
            reporter.log("parameters that rank 0 updates:")
        reporter.log(format_table(run.optimizer.table()))
        return
    done = "; it is complete, raise task.tokens to train on" if state.tokens >= run.config.task.tokens else ""
    reporter.log(f"continuing from {folder}: step {state.step}, {state.tokens:,} tokens{done}")
    for change in changes:
        reporter.log(f"setting changed since that checkpoint: {change}")


def memory_lines(ranks: list[dict[str, int]], most: int = 8) -> list[str]:
    """Return log lines with the memory of each rank, or one line with the ranges for more than ``most`` ranks."""
    if len(ranks) > most:
        ranges = {name: [rank[name] / 2**20 for rank in ranks] for name in ranks[0]}
        shown = ", ".join(f"{name} {min(sizes):.2f} to {max(sizes):.2f} MiB" for name, sizes in ranges.items())
        return [f"memory of {len(ranks)} ranks, each: {shown}"]
    names = [f" of rank {number}" for number in range(len(ranks))] if len(ranks) > 1 else [""]
    return [
        f"memory{name}: " + ", ".join(f"{part} {size / 2**20:.2f} MiB" for part, size in rank.items())
        for name, rank in zip(names, ranks, strict=True)
    ]


def report_end(
    run: Run, state: TrainerState, reporter: Reporter, results: Iterable[str] = (), drafter: Drafter | None = None
) -> None:
    """Log what the finished run trained, the lines `results` and the files that the run wrote, and export the model if
    the configuration asks for it.

    drafter: a drafter that was trained along with the model, to be exported together with the model.
    """
    reporter.log(f"trained {state.step} steps, {state.tokens:,} tokens in {state.seconds:.0f} s")
    for line in results:
        reporter.log(line)
    directory = run.config.run_dir
    reporter.log(f"checkpoint: {run_state.latest(directory / 'checkpoints')}")
    if run.config.lora.on:
        reporter.log(f"adapter:    {keep_adapter(run)}")
    if run.config.checkpoint.export:
        for line in export(run, directory / "export", drafter):
            reporter.log(line)
        reporter.log(f"export:     {directory / 'export'}")
        if run.config.task.kind in ANSWERS:
            reporter.log(f"ask it:     python -m train task=chat init_from={directory / 'export'}")
    if (picture := reporter.plot()) is not None:
        reporter.log(f"plot:       {picture}")
    reporter.log(f"metrics:    {directory / 'metrics.jsonl'}")


def export(run: Run, folder: Path, drafter: Drafter | None = None) -> list[str]:
    """Write the model of the finished run as a checkpoint folder, with its drafter. All ranks call this together.

    If the base weights are packed in memory (``lora.base``), the adapter is merged while the files of the base
    checkpoint are copied, a few rows at a time, so the merged weights are never in memory as a whole. Every rank merges
    a part of the rows. Returns log lines that say how much of the adapter's change the stored weights contain after
    rounding.
    """
    config, form = run.config, run.config.checkpoint.export
    assert form, "export() was called although checkpoint.export is off"
    if config.lora.on and holds_packed(run.model):
        ranks = storage.ranks()
        with all_or_none(ranks):
            changes = read_changes(config.run_dir / "adapter", run.model_config.text.n_routed_experts)
            base = find_pretrained(config.initial_checkpoint).folder
            files = {MERGED: merged_record(config.run_dir / "adapter", base)}
        written = convert_checkpoint(base, folder, form, changes=changes, replace=True, files=files, ranks=ranks)
        return merge_report(written.arrived) if form == "released" else []
    files = tokenizer_files(config.data, run.tokenizer)
    if config.lora.on and run.world.first:  # it alone writes these files, and has written the adapter
        files[MERGED] = merged_record(config.run_dir / "adapter", find_pretrained(config.initial_checkpoint).folder)
    save_pretrained(
        run.backbone,
        folder,
        run.tokenizer,
        format=form,
        companions=files,
        ranks=storage.ranks(),
        drafter=run.model if config.dspark is not None else drafter,
    )
    return []


def keep_adapter(run: Run) -> Path:
    """Save the LoRA adapter, then merge it into the weights unless the weights are packed. Returns the adapter's
    folder.
    """
    from train.lora import inject

    folder, config = run.config.run_dir / "adapter", run.config
    inject.save_adapter(run.model, folder, config.initial_checkpoint, biases=config.optim.router_bias_mode != "off")
    run.world.barrier()  # the first process writes, and the export of every process reads
    if not holds_packed(run.model):
        inject.merge(run.model)
    return folder
