"""Compose every experiment, and check those that begin with no checkpoint, by what needs no torch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it fails

from hydra import compose, initialize_config_dir  # noqa: E402

from train.config.compose import CONF_DIR, open_overrides  # noqa: E402
from train.config.parse import parse  # noqa: E402
from train.config.problems import ConfigError  # noqa: E402

BROUGHT = ("init_from = ", "data.paths=[]: must name")  # what the user names, or an earlier run makes

checked = 0
for file in sorted((CONF_DIR / "experiment").glob("*.yaml")):
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        raw = compose("train", overrides=open_overrides([f"experiment={file.stem}"]))
    if raw.init_from is not None or raw.distill_data is not None:  # looking into a checkpoint takes torch
        continue
    checked += 1
    try:
        parse(raw)
    except ConfigError as error:
        assert all(problem.startswith(BROUGHT) for problem in error.problems), f"{file.stem}: {error}"
assert checked
