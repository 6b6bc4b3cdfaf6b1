"""Which process of a run this one is, by the variables of what started it, and how it ends. Imports no torch."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from train.config.problems import ConfigError

# What starts processes, by the variables it sets: rank, number of processes, rank on this host.
LAUNCHERS = (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))


@dataclass(frozen=True)
class ProcessInfo:
    """This process's position among those started together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def find_process(environment: Mapping[str, str] = os.environ) -> ProcessInfo:
    """The position that the launcher gives, or that of a single process.

    Raises:
        ConfigError: some of the launcher's variables are missing.
    """
    for names in LAUNCHERS:
        if all(name in environment for name in names[:2]):
            rank, size = (int(environment[name]) for name in names[:2])
            if size == 1:
                return ProcessInfo()
            missing = [name for name in (names[2], "MASTER_ADDR", "MASTER_PORT") if name not in environment]
            if missing:
                rule = f"{size} processes were started, but the environment lacks {', '.join(missing)}"
                raise ConfigError([f"{rule}. Start them by torchrun, or see slurm/"])
            return ProcessInfo(rank, size, int(environment[names[2]]))
    return ProcessInfo()


def run_to_the_end(main: Callable[[], None]) -> None:
    """Call ``main``, the whole program, and end the process. With several processes this runs atexit handlers but skips
    interpreter finalisation, in which a thread of gloo or of the store that calls back into Python, if only to drop a
    tensor, would abort the process.
    """
    if all(os.environ.get(size, "1") == "1" for _, size, _ in LAUNCHERS):
        main()
        return
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
