"""Likelihoods and greedy answers of one model, in any layout: run by every rank of a test, and by the test alone.

python tests/distributed/asked.py FOLDER PARTS...   (PARTS: into how many the experts and tables are split)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import steps

from train.build import build
from train.distributed.launch import launch
from train.distributed.launchers import find_process, run_to_the_end
from train.distributed.world import World
from train.evaluation.scorer import Question, Scorer, Stopped

PROMPTS = [[0, *range(30, 30 + n)] for n in (3, 40, 1, 12, 7)]  # not a multiple of the ranks


def asked(world: World, parts: int, corpus: Path) -> tuple[list[tuple[float, bool]], list[str]]:
    """(likelihoods, answers) of the untrained model. One rank alone asks to stop before, and all of them do."""
    run = build(steps.configure("plain", world.size, parts, corpus), world)
    pairs = [(prompt, [50 + n, 60, 70][: 1 + n % 3]) for n, prompt in enumerate(PROMPTS)]
    for stopping in (lambda: world.rank == world.size - 1, lambda: False):
        scorer = Scorer(run.model, run.tokenizer, world, batch=2, stop=stopping)
        try:
            likelihoods = scorer.likelihoods(pairs, "test")
        except Stopped:
            assert stopping() or world.size > 1
            continue
        return likelihoods, scorer.answers([Question(prompt, 6) for prompt in PROMPTS], "test")
    raise AssertionError("stopped twice")


def main(folder: Path, layouts: list[int]) -> None:
    size = find_process().size
    world = launch(steps.configure("passes", size, 1, folder).parallel)
    with world.collective_guard():
        for parts in layouts:
            found = asked(steps.at(world, parts), parts, folder)
            # Every rank has all results.
            assert all(other == found for other in world.gather(found))
            if world.first:
                steps.torch.save(found, folder / f"asked-{size}-{parts}.pt")


if __name__ == "__main__":
    run_to_the_end(lambda: main(Path(sys.argv[1]), list(map(int, sys.argv[2:]))))
