"""``python -m train task=pretrain experiment=demo key=value ...``: compose the configuration, check it, run the task.

The configuration is checked before torch is imported, so a mistake in it is reported within about two seconds.

Exit codes of ``python -m train``:

    0      the task is complete
    1      Hydra could not compose the configuration, or the code has an error (a traceback is printed)
    2      the configuration, an input file or the disk cannot be used; a message says why
    3      training stopped because a loss or gradient was not finite
    4      another process of the run was lost; the same command continues from the last checkpoint
    5      the data could not be read over the network; the same command continues from the last checkpoint
    75     the run was interrupted and its state saved; the same command continues it
    130    Ctrl-C ended the program at once; nothing was saved
    141    the program that reads the output, such as ``head``, has closed it
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
from train.distributed.launchers import LauncherError, find_process, run_to_the_end
from train.errors import EXIT_CODES, REFUSED, exit_code

FEW_CORES = 2


def choose_threads(environment: MutableMapping[str, str], cores: int) -> None:
    """Set ``OMP_NUM_THREADS=1`` on machines with at most two CPU cores, unless the user has set the number of threads.

    ``OMP_NUM_THREADS`` must be set before torch is imported, because OpenMP reads it during that import. A second
    thread saves almost no time, since a training step consists of many small matrix products. Threads also spin while
    they wait for each other, so a step takes many times as long if another process keeps a core busy
    (docs/benchmarks.md, Threads).
    """
    if cores <= FEW_CORES and not {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment.keys():
        environment["OMP_NUM_THREADS"] = "1"


choose_threads(os.environ, len(os.sched_getaffinity(0)))


def command() -> None:
    """Entry point of the commands ``python -m train`` and ``narrows``."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports, which take seconds: no traceback
    given = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank=")]  # deepspeed adds it
    if any(argument.startswith("-") for argument in given):  # options such as --help print something and run no task
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
    """Run the task that the composed configuration ``raw`` names."""
    try:
        run_task(raw)
    except SystemExit:
        # srun signals the processes that are still ending after the first one has; that would make their exit code 143.
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise


def run_task(raw: DictConfig) -> None:
    """Check the configuration and run its task.

    An error that the user can fix prints a message instead of a traceback.
    """
    try:
        checked = parse(raw)
        task = load_task(checked.task.kind)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        task(checked)
    except tuple(EXIT_CODES) as error:
        if isinstance(error, BrokenPipeError) and is_closed(sys.stdout):
            end_like_other_tools()
        fail(exit_code(error), error, told=getattr(error, "reported", None))
    except KeyboardInterrupt:
        fail(130, "Ended by Ctrl-C; nothing was saved. The same command continues from the last checkpoint, if any.")


def load_task(kind: str) -> Callable[[Any], None]:
    """Import and return the function that runs a task of ``TASKS``. This imports torch, which takes seconds."""
    module, function = TASKS[kind].split(":")
    return getattr(import_module(module), function)


def is_closed(stream: TextIO) -> bool:
    """Return whether the program that reads this output stream has closed it, as ``head`` does in ``... | head``."""
    try:
        look = select.poll()
        look.register(stream.fileno(), 0)  # poll reports errors even if no event is asked for
    except (OSError, ValueError):  # the stream is not a file
        return False
    return any(event & select.POLLERR for _, event in look.poll(0))


def end_like_other_tools() -> None:
    """End this process by SIGPIPE, without a message, as Unix tools do when their output is closed (exit code 141)."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)


def is_first() -> bool:
    """Return whether this process prints error messages: because it is rank 0, or because its environment does not say
    which rank it is and no other process reports this error.
    """
    try:
        return find_process().rank == 0
    except LauncherError as error:
        return not error.reported


def fail(code: int, error: Exception | str, told: bool | None = None) -> None:
    """Print an error message and exit with ``code``.

    With several processes only rank 0 prints, since the failure detector reports the errors of all other ranks to rank
    0 (see ``train/distributed/failure_detector.py``). told: True if another process prints the message; None: decide by
    rank.
    """
    if told is None:
        told = not is_first()
    if not told:
        print(error if code in (75, 130) else f"error: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    command()
