"""Training on packed documents (``task=pretrain``) or conversations (``task=sft``): from the start, from another
checkpoint, or from where the run directory stands.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import yaml

from data.chat import prompt_ids
from data.companions import companion_files
from model import save_pretrained
from optim import format_table
from train import checkpoint, storage
from train.answers import most_frequent
from train.build import Run, build
from train.checkpoint import State, write_text
from train.config import Config, ConfigError, check_resumable, to_dict
from train.engine import launch
from train.errors import given
from train.initial import load_origin
from train.loop import Interrupted, NonFiniteError, resume, train
from train.metrics import Reporter, Silent
from train.sample import sample


def run(config: Config) -> None:
    """Train, or continue, the run in ``config.run_dir``, and print what came out.

    Raises:
        InputError, DataError, OSError: what was given cannot be used.
        NonFiniteError, Interrupted: see ``train.loop.train``.
    """
    world = launch(config.parallel)
    alone = only_process_in(config.run_dir) if world.first else nullcontext()
    with world.together(Interrupted, NonFiniteError), alone:
        folder, changes = world.from_first(find_state(config))
        if world.first:
            print("Preparing tokenizer, data and model; the first time takes a minute ...", flush=True)
        with given():
            objects = build(config, world)
            state = resume(objects, folder) if folder else begin(objects)
        if world.first:
            save_settings(config, objects)
        report = Reporter(config, state) if world.first else Silent()
        try:
            announce(objects, state, report, folder, changes)
            train(objects, state, report)
            _summarise(objects, state, report)
        finally:
            report.close()


def save_settings(config: Config, run: Run) -> None:
    """What a later run needs besides the weights."""
    write_text(config.run_dir / "tokenizer.json", run.tokenizer.to_str(pretty=True))
    write_text(config.run_dir / "config.yaml", yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True))


def begin(run: Run) -> State:
    """The state before the first step; the weights are those of ``init_from``, if that is set."""
    if run.config.init_from is not None and not run.config.lora.on:  # with an adapter `build` has loaded them
        run.notes.append(f"weights: {load_origin(run.model, run.config.init_from)}")
    return State()


def find_state(config: Config) -> tuple[Path | None, list[str]]:
    """The checkpoint to continue from, if any, and the settings that changed since.

    Raises:
        ConfigError: the directory holds a run that this configuration would not continue.
    """
    path, folder = config.run_dir / "config.yaml", checkpoint.latest(config.run_dir / "checkpoints")
    if folder is None or not path.exists():
        return folder, []
    return folder, check_resumable(yaml.safe_load(path.read_text(encoding="utf-8")), config)


@contextmanager
def only_process_in(directory: Path) -> Iterator[None]:
    """Keep a second process out of a run directory; the lock ends with the process, however it ends."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                [f"{directory} is in use by another process. Wait for it, or choose another name=..."]
            ) from None
        yield


def announce(run: Run, state: State, report: Reporter, folder: Path | None, changes: list[str]) -> None:
    """The opening lines: what is trained, from where, and how."""
    size = sum(whole_size(parameter) for parameter in run.model.parameters())
    report.log(f"run {run.config.run_dir}: {size:,} parameters on {run.device.type}, {run.config.parallel.precision}")
    for note in run.notes:
        report.log(note)
    for line in memory_lines(run.world.gather(run.memory())):
        report.log(line)
    if folder is None:
        if run.world.size > 1:
            report.log("what rank 0 holds:")
        report.log(format_table(run.optimizer.table()))
        return
    report.log(f"continuing from {folder}: step {state.step}, {state.tokens:,} tokens")
    for change in changes:
        report.log(f"changed since: {change}")


def whole_size(parameter: torch.nn.Parameter) -> int:
    """Elements of the parameter, of which this process may hold a part."""
    shard = getattr(parameter, "shard", None)
    return parameter.numel() if shard is None else shard.total * parameter.shape[1:].numel()


def memory_lines(ranks: list[dict[str, int]], most: int = 8) -> list[str]:
    """What each rank holds; of many, the range."""
    if len(ranks) > most:
        ranges = {name: [rank[name] / 2**20 for rank in ranks] for name in ranks[0]}
        shown = ", ".join(f"{name} {min(sizes):.2f} to {max(sizes):.2f} MiB" for name, sizes in ranges.items())
        return [f"memory of {len(ranks)} ranks, each: {shown}"]
    return [
        f"memory of rank {number}: " + ", ".join(f"{name} {size / 2**20:.2f} MiB" for name, size in rank.items())
        for number, rank in enumerate(ranks)
    ]


def _summarise(run: Run, state: State, report: Reporter) -> None:
    """The closing lines: what was reached, what the model writes, where everything lies."""
    first, last = state.first_valid, state.last_valid
    assert first is not None and last is not None
    task = run.config.task
    report.stop_bar()
    width = min(shutil.get_terminal_size().columns, 100)
    report.log("=" * width)
    if task.sample_tokens:
        text = sample(
            run.model,
            run.tokenizer,
            _prompt(run),
            tokens=task.sample_tokens,
            temperature=task.sample_temperature,
            seed=run.config.seed,
            stop=run.model_config.eos_token_id,
        )
        shown = f"is answered\n{text}" if task.kind == "sft" else f"continues\n{task.sample_prompt}{text}"
        report.log(f"sample: {task.sample_prompt!r} {shown}\n" + "-" * width)
    report.log(f"trained {state.step} steps, {state.tokens:,} tokens in {state.seconds:.0f} s")
    report.log(
        f"validation loss: first {first['loss']:.4f} final {last['loss']:.4f} nats per token, "
        f"ratio {last['loss'] / first['loss']:.1%}, final {last['bits_per_byte']:.4f} bits per byte"
    )
    if "exact_match" in last:
        share, answer = most_frequent(run.valid_batches)
        always = run.tokenizer.decode(answer.tolist())
        reached = f"first {first['exact_match']:.1%} final {last['exact_match']:.1%} of {last['answers']}"
        report.log(f"held-out answers right to the last token: {reached}; always {always!r} would be {share:.1%}")
    report_files(run, report)


def report_files(run: Run, report: Reporter) -> None:
    """Export the complete run's model, if that is asked for, and name the files of the run."""
    directory = run.config.run_dir
    report.log(f"checkpoint: {checkpoint.latest(directory / 'checkpoints')}")
    if run.config.lora.on:
        report.log(f"adapter:    {keep_adapter(run)}")
    if run.config.checkpoint.export:
        files = companion_files(run.config.data, run.tokenizer)
        save_pretrained(
            run.model,
            directory / "export",
            run.tokenizer,
            format=run.config.checkpoint.export,
            companions=files,
            ranks=storage.ranks(),
        )
        report.log(f"export:     {directory / 'export'}")
    report.log(f"plot:       {report.plot()}")
    report.log(f"metrics:    {directory / 'metrics.jsonl'}")


def keep_adapter(run: Run) -> Path:
    """Write the adapter, and merge it into the weights. Returns its folder."""
    from train import lora

    folder, config = run.config.run_dir / "adapter", run.config
    lora.save_adapter(run.model, folder, config.init_from, biases=config.optim.balance != "off")
    lora.merge(run.model)
    return folder


def _prompt(run: Run) -> list[int]:
    """The tokens of ``task.sample_prompt``; for ``sft`` it is what a user says, up to where the answer begins."""
    task = run.config.task
    if task.kind == "sft":
        return prompt_ids(run.tokenizer, [{"role": "user", "content": task.sample_prompt}])
    return run.tokenizer.encode(task.sample_prompt, add_special_tokens=False).ids
