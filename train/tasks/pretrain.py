"""Training on packed documents (``task=pretrain``) or on conversations (``task=sft``).

A run starts from random weights or from another checkpoint, or resumes from the last checkpoint in its directory. The
training loop is in ``train/loop.py``.
"""

from __future__ import annotations

import shutil

from data.chat.prompt import prompt_ids
from train.build import Run, build
from train.checkpoint.run_state import TrainerState
from train.config.schema import Config
from train.errors import user_errors
from train.evaluation.exact_match import most_frequent
from train.logging.log import Reporter
from train.loop import train
from train.session import begin, report_end, run_logger, run_session
from train.tasks.sample import sample


def run(config: Config) -> None:
    """Train the run in ``config.run_dir`` from the start or from its last checkpoint, and print the results.

    Raises:
        InputError, DataError, OSError: the configuration, a checkpoint or the data cannot be used.
        NonFiniteError, Interrupted: the run ended early, see ``train.loop.repeat``.
    """
    with run_session(config) as (world, folder, changes):
        with user_errors():
            objects = build(config, world, draw=folder is None and config.init_from is None)
            state = objects.resume(folder) if folder else begin(objects)
        with run_logger(objects, state, folder, changes) as reporter:
            train(objects, state, reporter)
            _summarise(objects, state, reporter)


def _summarise(run: Run, state: TrainerState, reporter: Reporter) -> None:
    """Log the last lines of a run: its results, a sample text, and the files that it wrote."""
    first, last = state.first_valid, state.last_valid
    assert first is not None and last is not None
    task = run.config.task
    reporter.stop_bar()
    width = min(shutil.get_terminal_size().columns, 100)
    reporter.log("=" * width)
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
        reporter.log(f"sample: {task.sample_prompt!r} {shown}\n" + "-" * width)
    results = [
        f"validation loss: first {first['loss']:.4f} final {last['loss']:.4f} nats per token, "
        f"ratio {last['loss'] / first['loss']:.1%}, final {last['bits_per_byte']:.4f} bits per byte"
    ]
    if "exact_match" in last:
        share, answer = most_frequent(run.valid_batches)
        always = run.tokenizer.decode(answer.tolist())
        reached = f"first {first['exact_match']:.1%} final {last['exact_match']:.1%} of {last['answers']}"
        baseline = f"always answering {always!r} would reach {share:.1%}"
        results.append(f"held-out answers that are right in every token: {reached}; {baseline}")
    report_end(run, state, reporter, results)


def _prompt(run: Run) -> list[int]:
    """Return the tokens of ``task.sample_prompt``. With task=sft it is formatted as a user message to be answered."""
    task = run.config.task
    if task.kind == "sft":
        return prompt_ids(run.tokenizer, [{"role": "user", "content": task.sample_prompt}])
    return run.tokenizer.encode(task.sample_prompt, add_special_tokens=False).ids
