"""Reads rank and number of processes from the launcher's environment variables, and ends the process. This file imports
no torch.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from train.config.problems import ConfigError

# Environment variables that each launcher sets: rank, number of processes, rank on this host.
LAUNCHERS = (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))

FAULTS = (1, 2, 3)  # exit codes of errors that would occur again if the run were restarted; see train/__main__.py


@dataclass(frozen=True)
class ProcessInfo:
    """The rank of this process, the number of processes of the run, and the rank of this process among the processes on
    its host.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def find_process(environment: Mapping[str, str] = os.environ) -> ProcessInfo:
    """Read rank and number of processes from the environment; without a launcher there is one process of rank 0.

    Raises:
        ConfigError: some of the launcher's environment variables are missing.
    """
    for names in LAUNCHERS:
        if all(name in environment for name in names[:2]):
            rank, size = (int(environment[name]) for name in names[:2])
            if size == 1:
                return ProcessInfo()
            missing = [name for name in (names[2], "MASTER_ADDR", "MASTER_PORT") if name not in environment]
            if missing:
                rule = f"{size} processes were started, but the environment lacks {', '.join(missing)}"
                raise ConfigError([f"{rule}. Start the processes with torchrun, or with the scripts in slurm/"])
            return ProcessInfo(rank, size, int(environment[names[2]]))
    return ProcessInfo()


def note_fault(code: object) -> None:
    """Write the exit code of this process into the file that ``NARROWS_FAULT_FILE`` names, if starting the run again
    would end in the same way. Such exit codes are 1 (an error in the code), 2 (refused input) and 3 (numbers that are
    not finite). If the file has been written, slurm/train.sbatch does not put the job back into the queue.
    """
    path = os.environ.get("NARROWS_FAULT_FILE")
    if path and code in FAULTS:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{code}\n")


def run_to_the_end(main: Callable[[], None]) -> None:
    """Call ``main``, which is the whole program, then end the process.

    With several processes the exit handlers run, but the finalisation of the Python interpreter is skipped. During
    finalisation a thread of gloo or of the store may still call into Python, which would abort the process.
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
    note_fault(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
