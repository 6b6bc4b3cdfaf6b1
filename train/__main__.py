"""``python -m train task=pretrain experiment=demo key=value ...``: compose the configuration, check it, run the task.

Exit codes: 0 complete; 2 configuration, input or disk refused; 3 stopped on a non-finite number; 75 interrupted with
the state saved: run the same command again to continue; 4 another process of the run was lost: the same; 130
ended at once by Ctrl-C, without saving. Hydra refuses what it cannot compose by 1, as Python does.
"""

import os
import signal
import sys

import hydra
from omegaconf import DictConfig

from train.config.compose import CONF_DIR, open_overrides
from train.config.parse import parse
from train.distributed.failure_detector import LOST, RankLost
from train.distributed.world import LAUNCHERS, run_to_the_end
from train.errors import REFUSED, Interrupted, NonFiniteError
from train.tasks import check, convert, dspark, merge, plan, pretrain, rl

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds; a traceback out of them helps nobody

TASKS = {
    "pretrain": pretrain.run,
    "sft": pretrain.run,
    "rl": rl.run,
    "distill": rl.run,
    "dspark": dspark.run,
    "plan": plan.run,
    "check": check.run,
    "convert": convert.run,
    "merge": merge.run,
}


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
    """Check the configuration and run its task; problems a user can mend end in a message, not in a traceback."""
    try:
        checked = parse(raw)
        TASKS[checked.task.kind](checked)
    except (NonFiniteError, FloatingPointError) as error:  # in a step; in generation
        fail(3, error)
    except Interrupted as error:
        fail(75, error)
    except RankLost as error:
        fail(LOST, error, told=error.told)
    except REFUSED as error:
        fail(2, error)
    except KeyboardInterrupt:
        fail(130, "Ended by Ctrl-C, nothing saved. The same command continues from the last checkpoint, or begins.")


def fail(code: int, error: Exception | str, told: bool | None = None) -> None:
    """End with a message. Of several processes rank 0 prints it: it hears of
    every other's, see ``train/distributed/failure_detector.py``.
    """
    if told is None:
        told = any(os.environ.get(rank, "0") != "0" for rank, *_ in LAUNCHERS)
    if not told:
        print(error if code in (75, 130) else f"error: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    given = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank=")]  # deepspeed adds it
    sys.argv[1:] = open_overrides(given)
    run_to_the_end(main)
