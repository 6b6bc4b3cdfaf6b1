"""``python -m train.studies NAME``: trains the arms (variants) of ``conf/study/NAME.yaml`` and compares their results.

For every arm and seed, ``python -m train`` is run in a separate process with one thread. A run is named after the
settings that differ from the study's experiment, so studies of the same experiment share identical runs. Finished runs
are not trained again; after an interruption, the same command continues. The tables are printed and written to
``<output>/NAME.md``; all metrics are written to ``<output>/NAME.json``.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from train.checkpoint.run_state import write_text
from train.errors import REFUSED
from train.studies.runner import Runner
from train.studies.settings import read_study
from train.studies.tables import markdown, show


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one study. Returns the exit code: 0, or 2 after printing an error message."""
    parser = argparse.ArgumentParser(prog="python -m train.studies", description=__doc__.splitlines()[0])
    parser.add_argument("name", help="name of a file in conf/study, without .yaml")
    parser.add_argument("overrides", nargs="*", help="settings key=value for every run, for example task.tokens=20000")
    parser.add_argument(
        "--jobs", type=positive, default=2, help="number of runs at the same time, one thread each (default 2)"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/study"), help="folder for runs and tables")
    options = parser.parse_args(arguments)
    path = options.output / options.name
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        study = read_study(options.name)
        result = Runner(study, options.output, options.overrides, options.jobs).run()
        write_text(path.with_suffix(".json"), json.dumps(result, indent=1))
        write_text(path.with_suffix(".md"), markdown(study, result))
    except REFUSED as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped. Run the same command to continue.", file=sys.stderr)
        return 130
    show(study, result, Console())
    print(f"results written to {path}.md and {path}.json")
    return 0


def positive(text: str) -> int:
    """Parse a whole number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
