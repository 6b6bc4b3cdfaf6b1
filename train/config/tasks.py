"""The tasks. A new one is a line here and a file in ``conf/task``; see ``docs/extending.md``."""

import difflib

# name -> "module:function" that runs it, given the checked configuration. Imported when the task is run.
TASKS = {
    "pretrain": "train.tasks.pretrain:run",
    "sft": "train.tasks.pretrain:run",
    "rl": "train.tasks.rl:run",
    "distill": "train.tasks.rl:run",
    "dspark": "train.tasks.dspark:run",
    "plan": "train.tasks.plan:run",
    "check": "train.tasks.check:run",
    "chat": "train.tasks.chat:run",
    "generate": "train.tasks.generate:run",
    "convert": "train.tasks.convert:run",
    "merge": "train.tasks.merge:run",
}


def known_task(name: str) -> str:
    """The name. Raises ValueError for one that is not in ``TASKS``."""
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"Did you mean task={close[0]}?" if close else f"Tasks: {', '.join(TASKS)}"
        raise ValueError(f"{name!r} is not a task. {hint}")
    return name
