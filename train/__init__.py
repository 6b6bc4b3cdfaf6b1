"""The trainer: configuration, the training loop, metrics and checkpoints. Run it with ``python -m train``."""

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
