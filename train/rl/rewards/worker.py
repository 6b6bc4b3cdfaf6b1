"""The process that calls reward functions: ``pool.py`` starts this file, which needs only the standard library.

One JSON line in, one out. Line 1: {"path": [...], "functions": ["module:function", ...]}, answered by {"ready": true}
or {"error": "..."}. Then {"function": 0, "record": {...}, "answer": "...", "reasoning": "..."}, answered by {"reward":
1.0} or {"error": "..."}. What a function prints goes to the standard error stream.

These are two processes: the first only watches whether the trainer is alive, its child calls the functions.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    trainer = os.getppid()
    child = os.fork()
    if child:
        watch(trainer, child)
    else:
        serve()


def watch(trainer: int, child: int) -> None:
    """Wait for the child to end. If the trainer is killed, and so cannot clean up itself, kill the process group,
    because the child, or what it has started, may hang.
    """
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0), os.dup2(null, 1)  # only the child keeps them, so that its end is noticed
    while not os.waitpid(child, os.WNOHANG)[0]:
        if os.getppid() != trainer:
            os.killpg(0, signal.SIGKILL)
        time.sleep(0.5)


def serve() -> None:
    """Answer requests until there are no more."""
    own = os.getpid()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def answer(**fields: Any) -> None:
        if os.getpid() != own:
            os._exit(0)  # a fork that a function let return: its answer would be taken for the next request's
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    setting = json.loads(requests.readline())
    sys.path[:] = setting["path"]
    functions = []
    for name in setting["functions"]:
        try:
            functions.append(load(name))
            check_arguments(functions[-1])
        except BaseException as error:  # a user's module can raise anything
            answer(error=f"{name}: {type(error).__name__}: {error}")
            return
    answer(ready=True)
    for line in requests:
        request = json.loads(line)
        try:
            function = functions[request["function"]]
            reward = function(request["record"], request["answer"], request["reasoning"])
            if inspect.isawaitable(reward):
                reward = asyncio.run(_awaited(reward))
            answer(reward=number(reward))
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}"[:500])


async def _awaited(reward: Any) -> Any:
    return await reward


def load(name: str) -> Callable[..., Any]:
    """The function named "package.module:function" or "path/to/file.py:function"."""
    place, _, attribute = name.rpartition(":")
    if not place:
        raise ValueError(f"{name!r} must look like package.module:function or path/to/file.py:function")
    if place.endswith(".py"):
        place = os.path.expanduser(place)
        spec = importlib.util.spec_from_file_location(place, place)
        assert spec is not None and spec.loader is not None, "the name ends in .py"
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look up their module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, attribute)
    if not callable(function):
        raise TypeError(f"{name} is no function")
    return function


def check_arguments(function: Callable[..., Any]) -> None:
    """Raise TypeError if a reward function does not take the arguments it will be called with."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind({}, "", "")
    except TypeError as error:
        raise TypeError(f"it is called as (record, answer, reasoning), but {error}") from None


def number(reward: Any) -> float:
    """A reward as a finite float: a number, or one number of NumPy or torch. Raises for anything else."""
    if hasattr(reward, "item") and getattr(reward, "ndim", 0) == 0:
        reward = reward.item()
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise ValueError(f"the reward is {reward!r}, it must be a finite number")
    return float(reward)


if __name__ == "__main__":
    main()
