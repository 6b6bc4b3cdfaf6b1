"""``python -m train task=pretrain experiment=demo key=value ...``: compose the configuration, check it, run the task.

Torch is imported only after all rules over the configuration alone hold.

Exit codes: 0 complete; 2 configuration, input or disk refused; 3 stopped on a non-finite number; 75 interrupted, state
saved: run the same command again to continue; 4 another process of the run was lost: likewise; 130 ended at once by
Ctrl-C, without saving; 141 nobody reads its output any more. Hydra exits with 1 for what it cannot compose, as Python
does for errors.
"""

import os
import select
import signal
import sys
from collections.abc import Callable, MutableMapping
from importlib import import_module
from typing import Any, TextIO

import hydra
from omegaconf import DictConfig

from train.config.compose import CONF_DIR, open_overrides
from train.config.help import help_text
from train.config.parse import parse
from train.config.tasks import TASKS
from train.distributed.launchers import LAUNCHERS, run_to_the_end
from train.errors import LOST, REFUSED, Interrupted, NonFiniteError, RankLost

FEW_CORES = 2


def choose_threads(environment: MutableMapping[str, str], cores: int) -> None:
    """One thread where there are at most two cores, unless the user has chosen. OpenMP reads it as torch is imported.

    Two threads gain next to nothing there, since a step is many small products, and they spin while they wait for each
    other: beside one other busy process a step then takes many times as long (docs/benchmarks.md, Threads).
    """
    if cores <= FEW_CORES and not {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment.keys():
        environment["OMP_NUM_THREADS"] = "1"


choose_threads(os.environ, len(os.sched_getaffinity(0)))


def command() -> None:
    """What ``python -m train`` and ``narrows`` do with their arguments."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports take seconds; a traceback out of them helps nobody
    given = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank=")]  # deepspeed adds it
    if any(argument.startswith("-") for argument in given):  # something is printed and no task run
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if {"-h", "--help"} & set(given):
        print(help_text())
        return
    try:
        sys.argv[1:] = open_overrides(given)
    except REFUSED as error:
        fail(2, error)
    run_to_the_end(main)


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="train")
def main(raw: DictConfig) -> None:
    """Run one task."""
    try:
        run_task(raw)
    except SystemExit:
        for number in (signal.SIGUSR1, signal.SIGTERM):  # srun sends one to those that end after the first: code 143
            signal.signal(number, signal.SIG_IGN)
        raise


def run_task(raw: DictConfig) -> None:
    """Check the configuration and run its task; errors that a user can fix end in a message, not in a traceback."""
    try:
        checked = parse(raw)
        task = load_task(checked.task.kind)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        task(checked)
    except (NonFiniteError, FloatingPointError) as error:  # in a step; in generation
        fail(3, error)
    except Interrupted as error:
        fail(75, error)
    except RankLost as error:
        fail(LOST, error, told=error.reported)
    except BrokenPipeError as error:
        if is_closed(sys.stdout):
            end_like_other_tools()
        fail(2, error)
    except REFUSED as error:
        fail(2, error)
    except KeyboardInterrupt:
        fail(130, "Ended by Ctrl-C, nothing saved. The same command continues from the last checkpoint, or begins.")


def load_task(kind: str) -> Callable[[Any], None]:
    """The function that runs a task of ``TASKS``. It imports torch, which takes seconds."""
    module, function = TASKS[kind].split(":")
    return getattr(import_module(module), function)


def is_closed(stream: TextIO) -> bool:
    """Whether the reader of this output is gone (``... | head``)."""
    try:
        look = select.poll()
        look.register(stream.fileno(), 0)  # errors are always told
    except (OSError, ValueError):  # not a file
        return False
    return any(event & select.POLLERR for _, event in look.poll(0))


def end_like_other_tools() -> None:
    """End silently by the signal that ends other tools when nobody reads their output: exit code 141 in a shell."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)


def fail(code: int, error: Exception | str, told: bool | None = None) -> None:
    """End with a message. With several processes rank 0 prints it, since it hears of all others, see
    ``train/distributed/failure_detector.py``.
    """
    if told is None:
        told = any(os.environ.get(rank, "0") != "0" for rank, *_ in LAUNCHERS)
    if not told:
        print(error if code in (75, 130) else f"error: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    command()
