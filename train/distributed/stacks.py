"""Finds out what the threads of this process are executing (whether a thread waits in a collective call, and in which
layer), and writes the stack traces of all threads into a file.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).parents[2]
COLLECTIVES = f"{Path(dist.__file__).parent}/"
WRAPPERS = ("wrapper", "_wrap", "decorate_context")  # names of functions in torch that call a collective
IGNORED = ("failure detector", "heartbeats")  # names of threads that are never waited for


@dataclass(frozen=True)
class Whereabouts:
    """What a process is executing.

    Attributes:
        place: the innermost function of this project on the stack, with file and line, and with the layer number if the
            function belongs to a layer.
        collective: the name of the collective call in which the process waits, or None.
        calls: the number of collective calls that this process has begun, which distinguishes two calls from the same
            line of code.
    """

    place: str
    collective: str | None = None
    calls: int = 0


def whereabouts() -> Whereabouts:
    """Find out what this process is executing: the collective call in which one of its threads waits, if there is one,
    otherwise the function that its main thread executes.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if names.get(ident) not in IGNORED}
    waiting = [(name, frame) for frame in frames.values() if (name := _collective(frame)) is not None]
    if waiting:
        name, frame = waiting[0]
        return Whereabouts(_place(frame), name, _calls())
    main = frames.get(threading.main_thread().ident or 0)
    return Whereabouts("the end of the program" if main is None else _place(main))


def _calls() -> int:
    """The number of collective calls that this process has begun, over all its process groups."""
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    try:
        return sum(group._get_sequence_number_for_group() for group in groups)
    except (AttributeError, RuntimeError):  # a backend that does not count
        return 0


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _collective(frame: FrameType) -> str | None:
    """Return the name of the collective call that a thread is executing: the outermost torch.distributed function at
    the inner end of its stack. None if its innermost function is not in torch.distributed.
    """
    name = None
    for one in _outwards(frame):
        if not one.f_code.co_filename.startswith(COLLECTIVES):
            break
        if one.f_code.co_name not in WRAPPERS:
            name = one.f_code.co_name
    return name


def _place(frame: FrameType) -> str:
    """Describe the innermost function of this project on a stack, such as "exchange in model/moe.py:87, layer 3"."""
    place = f"{frame.f_code.co_name} in {frame.f_code.co_filename}:{frame.f_lineno}"
    found = False
    for one in _outwards(frame):
        file = Path(one.f_code.co_filename).absolute()
        if not file.is_relative_to(ROOT) or ".venv" in file.parts:
            continue
        if not found:
            place, found = f"{one.f_code.co_name} in {file.relative_to(ROOT)}:{one.f_lineno}", True
        layer = getattr(one.f_locals.get("self"), "layer", one.f_locals.get("layer"))
        if isinstance(layer, int):
            return f"{place}, layer {layer}"
    return place


def write_stacks(path: Path, title: str) -> None:
    """Write a line of text and the stack traces of all threads of this process into a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write(f"{title}\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
