"""The trainer: run it with ``python -m train``. ``train`` imports ``model``, ``optim`` and ``data``, never the other
way round.

Read loop.py first (``train_step`` is a whole optimizer step), then build.py and session.py, then the task you are
interested in, in ``tasks``. The modules at the top of this package are used by every run; everything else lies in
subpackages. Each module or subpackage imports only those listed above it:

    errors                      the exceptions that end a run with a message, and their exit codes
    signals, start              signals: requests to stop a run; start: how long each part of its start-up takes
    checkpoint, lora.targets    the run state on disk and the checkpoints a run starts from; module names for LoRA
    config                      the typed configuration
    distributed                 the processes of a run, sums over them, and DeepSpeed
    lora, param_groups          LoRA adapters; the table that assigns an optimizer method to every parameter
    answers                     replaces the answers in conversations by a model's own, to train its drafter on them
    report_optimizer            the V4.1 report's optimizer for the `Trainer` classes of transformers and TRL
    build                       builds all objects of a run (``Run``) from the configuration
    logging                     log lines, metrics and plots
    evaluation                  held-out loss, exact match, recall of the indexers
    loop                        one optimizer step, and the loop over steps
    origin                      records which other checkpoints and files a run was started from
    session                     start-up and shutdown of a run, the same for all tasks
    dspark, rl, dpo             one package for each kind of task: drafter training, RL (and distillation), DPO
    teacher                     the teacher of task=distill_data, and the student's loss on given text
    planning                    estimates memory, traffic and time of a job on a layout of GPUs
    tasks                       one file for each task
    studies                     comparisons of many training runs, started by ``python -m train.studies``
    __main__                    the command line
"""

import sys
from importlib.util import find_spec
from pathlib import Path


def _hidden() -> str | None:
    """Return an error message if ``import data``, ``model`` or ``optim`` would find a module outside this project."""
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
