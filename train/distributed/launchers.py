"""Reads rank and number of processes from the launcher's environment variables, and ends the process. This file imports
no torch.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from train.errors import InputError

# Environment variables that each launcher sets: rank, number of processes, rank on this host.
LAUNCHERS = (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))

FAULTS = (1, 2, 3)  # exit codes of errors that would occur again if the run were restarted; see train/__main__.py


class LauncherError(InputError):
    """An environment variable of the launcher has an impossible value. The message is one line.

    reported: True if another process prints the message.
    """

    def __init__(self, text: str, reported: bool = False):
        super().__init__(text)
        self.reported = reported


@dataclass(frozen=True)
class ProcessInfo:
    """The rank of this process, the number of processes of the run, and the rank of this process among the processes on
    its host.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def find_process(environment: Mapping[str, str] = os.environ) -> ProcessInfo:
    """Read rank and number of processes from the environment; without a launcher, this process is the only one and has
    rank 0.

    Raises:
        LauncherError: some of the launcher's environment variables are missing, or have impossible values.
    """
    for names in LAUNCHERS:
        if all(name in environment for name in names[:2]):
            return _process(names, environment)
    for name, other, harmless in (("RANK", "WORLD_SIZE", "0"), ("WORLD_SIZE", "RANK", "1")):
        if environment.get(name, harmless) != harmless:
            rule = f"{name}={environment[name]} is set, but {other} is not"
            raise LauncherError(f"{rule}. Start the processes with torchrun, which sets both, or unset {name}")
    return ProcessInfo()


def _process(names: tuple[str, str, str], environment: Mapping[str, str]) -> ProcessInfo:
    """Read three numbers from the environment variables ``names``: the rank of this process, the number of processes,
    and the rank of this process on its host.
    """
    size = _whole_number(names[1], environment, 1)
    rank = _whole_number(names[0], environment, 0, size - 1, f"there are {size} processes ({names[1]})")
    if size == 1:
        return ProcessInfo()
    missing = [name for name in (names[2], "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        rule = f"{size} processes were started, but the environment lacks {', '.join(missing)}"
        raise LauncherError(f"{rule}. Start the processes with torchrun, or with the scripts in slurm/", rank > 0)
    local = _whole_number(names[2], environment, 0, size - 1, f"there are {size} processes ({names[1]})")
    _whole_number("MASTER_PORT", environment, 1, 65535, "it is the port at which the processes meet", rank > 0)
    interfaces = [name for name in environment.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    here = [name for _, name in socket.if_nameindex()]
    if unknown := [name for name in interfaces if name not in here]:
        rule = (
            f"GLOO_SOCKET_IFNAME={environment['GLOO_SOCKET_IFNAME']}: {socket.gethostname()} has no network interface"
        )
        raise LauncherError(f"{rule} {', '.join(unknown)}, but {', '.join(here)}", local > 0)
    return ProcessInfo(rank, size, local)


def _whole_number(
    name: str,
    environment: Mapping[str, str],
    least: int,
    most: int | None = None,
    why: str = "",
    reported: bool = False,
) -> int:
    """Return the value of an environment variable, a whole number of at least ``least`` and at most ``most``.

    why: the reason for the limit ``most``, for the error message. reported: True if another process prints the message.
    """
    text = environment[name]
    value = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else -1
    if value < least or (most is not None and value > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}, since {why}"
        raise LauncherError(f"{name}={text} must be a whole number {allowed}. The launcher sets {name}", reported)
    return value


def note_fault(code: object) -> None:
    """Write the exit code of this process into the file that ``NARROWS_FAULT_FILE`` names, if starting the run again
    would end in the same way. The run would end in the same way after exit code 1 (an error in the code), 2 (refused
    input) or 3 (numbers that are not finite). If the file has been written, slurm/train.sbatch does not put the job
    back into the queue.
    """
    path = os.environ.get("NARROWS_FAULT_FILE")
    if path and code in FAULTS:
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{code}\n")
        except OSError as error:
            print(f"warning: NARROWS_FAULT_FILE={path} cannot be written: {error.strerror}", file=sys.stderr)


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
