"""Training on packed documents (``task=pretrain``) or conversations (``task=sft``): from scratch, from another
checkpoint, or resuming the run directory. The loop is ``train/loop.py``.
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
from train.run import begin, report_files, run_logger, run_session
from train.tasks.sample import sample


def run(config: Config) -> None:
    """Train, or continue, the run in ``config.run_dir``, and print what came out.

    Raises:
        InputError, DataError, OSError: what was given cannot be used.
        NonFiniteError, Interrupted: see ``train.loop.repeat``.
    """
    with run_session(config) as (world, folder, changes):
        with user_errors():
            objects = build(config, world)
            state = objects.resume(folder) if folder else begin(objects)
        with run_logger(objects, state, folder, changes) as reporter:
            train(objects, state, reporter)
            _summarise(objects, state, reporter)


def _summarise(run: Run, state: TrainerState, reporter: Reporter) -> None:
    """The closing lines: results, a sample, and the files."""
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
    reporter.log(f"trained {state.step} steps, {state.tokens:,} tokens in {state.seconds:.0f} s")
    reporter.log(
        f"validation loss: first {first['loss']:.4f} final {last['loss']:.4f} nats per token, "
        f"ratio {last['loss'] / first['loss']:.1%}, final {last['bits_per_byte']:.4f} bits per byte"
    )
    if "exact_match" in last:
        share, answer = most_frequent(run.valid_batches)
        always = run.tokenizer.decode(answer.tolist())
        reached = f"first {first['exact_match']:.1%} final {last['exact_match']:.1%} of {last['answers']}"
        reporter.log(f"held-out answers right to the last token: {reached}; always {always!r} would be {share:.1%}")
    report_files(run, reporter)


def _prompt(run: Run) -> list[int]:
    """The tokens of ``task.sample_prompt``; for ``sft`` it becomes a user message, up to where the answer begins."""
    task = run.config.task
    if task.kind == "sft":
        return prompt_ids(run.tokenizer, [{"role": "user", "content": task.sample_prompt}])
    return run.tokenizer.encode(task.sample_prompt, add_special_tokens=False).ids
