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
    """Where this process stands among those that were started together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def find_process(environment: Mapping[str, str] = os.environ) -> ProcessInfo:
    """What the launcher says, if there is one.

    Raises:
        ConfigError: it says half of it.
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
    """Call ``main``, the whole program, and end the process. One of several ends with all that Python does at its end
    except taking itself apart: a thread of gloo or of the store that comes back to Python during that, if only to drop
    a tensor, aborts the process.
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
