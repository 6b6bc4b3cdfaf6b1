"""The table of all tasks. A new task needs an entry here and a file in ``conf/task``; see ``docs/extending.md``."""

import difflib

# Name of a task -> the "module:function" that runs it. The module is imported only when the task is run.
TASKS = {
    "pretrain": "train.tasks.pretrain:run",
    "sft": "train.tasks.pretrain:run",
    "rl": "train.tasks.rl:run",
    "distill": "train.tasks.rl:run",
    "distill_data": "train.tasks.distill_data:run",
    "dspark": "train.tasks.dspark:run",
    "dpo": "train.tasks.dpo:run",
    "plan": "train.tasks.plan:run",
    "check": "train.tasks.check:run",
    "chat": "train.tasks.chat:run",
    "generate": "train.tasks.generate:run",
    "eval": "train.tasks.eval:run",
    "convert": "train.tasks.convert:run",
    "merge": "train.tasks.merge:run",
}


def known_task(name: str) -> str:
    """Return ``name`` if ``TASKS`` has a task of that name; otherwise raise ValueError."""
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"Did you mean task={close[0]}?" if close else f"Tasks: {', '.join(TASKS)}"
        raise ValueError(f"{name!r} is not a task. {hint}")
    return name
