"""The trainer. Run it with ``python -m train``. Imports ``model``, ``optim`` and ``data``, which know nothing of it.

Read loop.py first (``train_step`` is a whole optimizer step), then build.py and run.py, then the task of interest in
``tasks``. What every run passes through is here at the top; the rest is in packages. From the bottom to the top, each
imports only what is listed before it:

    errors                      what ends a run with a message, and with which exit code
    checkpoint, lora.targets    the run state on disk, other checkpoints to begin from; names of what LoRA can be given
    config                      the typed configuration
    distributed                 the processes of a run; sums over them; DeepSpeed
    lora, param_groups          adapters; which parameter is trained how
    build                       configuration to objects: ``Run``
    logging, signals            where numbers go; what asks a run to stop
    evaluation                  held-out loss, exact match, recall of the indexers
    loop                        one step, and the loop over steps
    origin                      which other checkpoints a run reads again when it is continued
    run                         what a run of every task begins and ends with
    dspark, rl                  what these tasks add: drafters; reinforcement learning and distillation
    tasks                       one file for each kind of task
    studies                     comparisons of many runs, a program of their own
    __main__                    the command line
"""

import sys
from importlib.util import find_spec
from pathlib import Path


def _hidden() -> str | None:
    """What stands in the way of importing the packages beside this one: a module of such a name that is found first."""
    root = Path(__file__).resolve().parents[1]
    for name in ("data", "model", "optim"):
        found = find_spec(name)
        origin = Path(found.origin).resolve() if found and found.origin else None
        if origin != root / name / "__init__.py":
            where = origin or next(iter(found.submodule_search_locations or ()), "?") if found else "nowhere"
            return f"`{name}` is found at {where}, not in {root}. Start from another folder, or by the command narrows"
    return None


if problem := _hidden():
    if sys.argv[:1] == ["-m"]:  # python -m train
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(problem)
