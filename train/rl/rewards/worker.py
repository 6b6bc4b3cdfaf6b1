"""The program of a worker process, which calls reward functions. ``pool.py`` starts it; it imports no project code.

The worker reads JSON lines from standard input, and answers each line with one JSON line on standard output. The first
line is {"path": [...], "functions": ["module:function", ...]}; the answer is {"ready": true} or {"error": "..."}. Each
further line is {"function": 0, "record": {...}, "answer": "...", "reasoning": "..."}; the answer is {"reward": 1.0} or
{"error": "..."}. Text that a reward function prints goes to standard error.

The program forks into two processes: the parent only watches whether the trainer is alive, and the child calls the
functions.
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
    """Wait until the child process ends. If the trainer has died, kill the process group.

    A killed trainer cannot end the worker itself, and the child or a process that it has started may hang.
    """
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0), os.dup2(null, 1)  # close the pipes here, so that the trainer notices the child's end
    while not os.waitpid(child, os.WNOHANG)[0]:
        if os.getppid() != trainer:
            os.killpg(0, signal.SIGKILL)
        time.sleep(0.5)


def serve() -> None:
    """Load the reward functions and answer requests until standard input ends."""
    own = os.getpid()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def answer(**fields: Any) -> None:
        if os.getpid() != own:
            os._exit(0)  # a process that the function forked; its answer must not reach the trainer
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
    """Import the function that is named as "package.module:function" or "path/to/file.py:function"."""
    place, _, attribute = name.rpartition(":")
    if not place:
        raise ValueError(f"{name!r} must look like package.module:function or path/to/file.py:function")
    if place.endswith(".py"):
        place = os.path.expanduser(place)
        spec = importlib.util.spec_from_file_location(place, place)
        assert spec is not None and spec.loader is not None, "a name that ends in .py must have a loader"
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look up their module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, attribute)
    if not callable(function):
        raise TypeError(f"{name} is not a function")
    return function


def check_arguments(function: Callable[..., Any]) -> None:
    """Raise TypeError if a reward function cannot be called with the arguments (record, answer, reasoning)."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind({}, "", "")
    except TypeError as error:
        raise TypeError(f"a reward function is called with (record, answer, reasoning), but {error}") from None


def number(reward: Any) -> float:
    """Convert a reward (a number, or a scalar of NumPy or torch) to a float.

    Raises:
        ValueError: the reward is not a finite number.
    """
    if hasattr(reward, "item") and getattr(reward, "ndim", 0) == 0:
        reward = reward.item()
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise ValueError(f"the reward is {reward!r}, but must be a finite number")
    return float(reward)


if __name__ == "__main__":
    main()
