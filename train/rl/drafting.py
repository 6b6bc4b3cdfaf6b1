"""``rl.drafter``: a drafter that is trained along with the policy and speeds up its responses.

After every optimizer step of the policy, the drafter takes an optimizer step of its own, in which it learns to predict
the new policy on all responses of the step. The drafter does not influence the policy: the gradients of the drafter end
at the policy's hidden states, and speculative decoding draws from the policy's distribution whatever the drafter
proposes.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch

from model.dspark import DraftDenominators, DraftLosses
from optim import Optimizer
from train.build import Batch, Run, build_optimizer, find_drafter, whole_size
from train.checkpoint import run_state
from train.checkpoint.run_state import TrainerState
from train.config.schema import Config
from train.distributed.engine import Engine
from train.dspark.anchors import with_anchors
from train.dspark.evaluate import loss_of, measures
from train.loop import train_step
from train.rl.batch import Scored, Shape, batches, empty_batch

TOKENS_PER_ANCHOR = 8
INPUTS = ("input_ids", "labels", "seq_lens")  # tensors of a response batch that the drafter takes
ROWS = 2**20  # more rows than a process has in a step, so that row numbers, which seed the anchors, do not repeat


class PolicyDrafter:
    """The drafter of a policy in training, with an optimizer of its own."""

    def __init__(self, run: Run, shape: Shape):
        assert run.config.init_from is not None
        self.drafter, note = find_drafter(run.config, run.model)
        self.shape = shape
        size = sum(map(whole_size, self.drafter.parameters()))
        run.notes.append(f"{note}; {size:,} parameters, trained along with the policy")
        self.drafter.eval()
        config = _with_its_rate(run)
        optimizer = build_optimizer(config, run.model_config, self.drafter, run.world)
        engine = Engine(run.world, self.drafter, optimizer)
        self.run = dataclasses.replace(run, config=config, model=self.drafter, optimizer=optimizer, engine=engine)

    @property
    def optimizer(self) -> Optimizer:
        return self.run.optimizer

    def step(self, scored: Scored, state: TrainerState) -> dict[str, Any] | None:
        """Take one optimizer step of the drafter on all responses of the current step of the policy. All processes call
        this method together. state: the counters of the policy. Returns the ``measures`` of the drafter before its
        update, or None if no process has a position at which drafts can start.
        """
        run, world = self.run, self.run.world
        everything = torch.ones(len(scored.responses), dtype=torch.bool)
        mine, _ = batches(scored, everything, self.shape, state.step)
        dummy_batches = max(world.gather(len(mine))) - len(mine)
        mine = [*mine, *[empty_batch(self.shape)] * dummy_batches]
        prepared = [self._prepare(batch, state.step, number) for number, batch in enumerate(mine)]
        places = sum(int((batch["anchors"] >= 0).sum()) for batch in prepared)
        if not sum(world.gather(places)):
            return None
        numbers = train_step(run, prepared, state.step, state.tokens, self._losses, dummy_batches)
        found = measures(numbers)
        return {"loss": loss_of(found, run.rl.draft_objective), **found, "grad_norm": float(numbers["grad_norm"])}

    def save(self, state: TrainerState) -> Path:
        """Write a checkpoint of the drafter and its optimizer. The run keeps one more checkpoint of the drafter than of
        the policy, because the drafter's is written first.
        """
        return run_state.save(
            self.folder,
            state,
            model=self.drafter,
            optimizer=self.optimizer,
            data={},
            model_config=self.run.model_config.to_dict(),
            keep=self.run.config.checkpoint.keep + 1,
        )

    def resume(self, state: TrainerState) -> None:
        """Load the checkpoint that ``save`` wrote when the counters were ``state``. Later checkpoints are deleted,
        because the resumed run repeats their steps.
        """
        run_state.load(
            self.folder / f"step-{state.step:08d}",
            model=self.drafter,
            optimizer=self.optimizer,
            set_data=lambda data: None,
            model_config=self.run.model_config.to_dict(),
        )
        if self.run.world.first:
            for path in self.folder.glob("step-*"):
                if int(path.name[5:]) > state.step:
                    shutil.rmtree(path)
        self.run.world.barrier()

    @property
    def folder(self) -> Path:
        return self.run.config.run_dir / "drafter"

    def _prepare(self, batch: Batch, step: int, number: int) -> Batch:
        """Add anchors (the start positions of draft blocks) to a batch of responses, and prepare it for the drafter.
        number: index of the batch in this step.
        """
        first = (step * self.run.world.size + self.run.world.rank) * ROWS + number * self.shape.rows
        kept = {name: batch[name] for name in INPUTS}
        return self.run.prepare(with_anchors(kept, self.run.config.seed, first, TOKENS_PER_ANCHOR))

    def _losses(self, batch: Batch, denominators: DraftDenominators) -> DraftLosses:
        return self.drafter.losses(**batch, denominators=denominators, objective=self.run.rl.draft_objective)


def _with_its_rate(run: Run) -> Config:
    """Return the run's configuration with the learning rate of the drafter in place of the policy's learning rate."""
    schedule, factor = run.config.optim.schedule, run.rl.drafter_lr_factor
    own = dataclasses.replace(schedule, peak=schedule.peak * factor, floor=schedule.floor * factor)
    return dataclasses.replace(run.config, optim=dataclasses.replace(run.config.optim, schedule=own))


def accepted(scored: Scored) -> dict[str, int]:
    """Count, over this process's responses, the forward passes with drafts (``draft_passes``) and the accepted draft
    tokens (``drafts_accepted``).
    """
    lists = [response.sample.accepted for response in scored.responses]
    return {"draft_passes": sum(map(len, lists)), "drafts_accepted": sum(map(sum, lists))}
