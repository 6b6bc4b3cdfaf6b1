"""Write the table of GPUs in ``docs/sizes.md`` from ``plan.search``: ``python docs/sizes.py [SIZE ...]``. Minutes.

For every size of the model, for LoRA, fine-tuning of all weights and pre-training, and for three lengths of rows: the
fewest GPUs of 80 and of 139 GiB on which ``task=plan`` says FITS, and how many of them share a row.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hydra import compose, initialize_config_dir

from train.config.compose import CONF_DIR, open_overrides
from train.config.parse import parse_run
from train.planning.job import job_of
from train.planning.search import fitting

PAGE = Path(__file__).resolve().parent / "sizes.md"
BEGIN, END = "<!-- made by docs/sizes.py -->", "<!-- end -->"
SIZES = ("v41_100m", "v41_1b", "v41_8b", "v41_40b", "v41_flash")
JOBS = {"LoRA": ["lora=all"], "all weights": ["optim=adamw"], "pre-training": ["optim=report"]}
ROWS = {"8K": 8192, "64K": 65536, "1M": 1048576}
TOKENS = 96 * 2**20  # a step's, the report's batch
MEMORY = (80, 139)  # GiB


def cells(size: str, job: str) -> list[str]:
    """The entries of one line: for each length, the fewest GPUs of each memory."""
    found = []
    for length in ROWS.values():
        rows = [f"task.seq_len={length}", f"task.global_batch_rows={TOKENS // length}"]
        given = ["task=plan", f"model={size}", *JOBS[job], "parallel.precision=bf16", *rows]
        known = None
        for memory in MEMORY:
            with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
                raw = compose("train", overrides=open_overrides([*given, f"parallel.gpu_memory_gib={memory}"]))
            config = parse_run(raw)
            known = known or job_of(config)
            layout = next((layout for layout, _ in fitting(config, known)), None)
            shared = f" ({layout.context})" if layout and layout.context > 1 else ""
            found.append(f"{layout.gpus}{shared}" if layout else "-")
    return found


def line(size: str, job: str) -> str:
    return f"| `{size}` | {job} | {' | '.join(cells(size, job))} |"


def main(sizes: list[str]) -> None:
    titles = [f"{name}, {memory} GiB" for name in ROWS for memory in MEMORY]
    lines = [f"| model | training | {' | '.join(titles)} |", "|---" * (2 + len(titles)) + "|"]
    for size in sizes:
        for job in JOBS:
            lines.append(line(size, job))
            print(lines[-1], flush=True)
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table = "\n".join(lines)
    PAGE.write_text(f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or list(SIZES))
