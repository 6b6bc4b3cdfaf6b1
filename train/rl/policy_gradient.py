"""``task=rl``: the policy gradient on graded responses whose rewards differ inside their group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from model import DeepseekV41, LossDenominators, Losses, token_log_probs
from train.build import Run
from train.rl.batch import INPUTS, Batch, Scored, Shape, batches
from train.rl.loss import PolicyObjective


class PolicyGradient:
    """Which of a step's responses are trained on, and by which losses.

    reference: the initial policy, if ``rl.loss.kl`` needs it.
    """

    NAMES = PolicyObjective.NAMES

    def __init__(self, run: Run, shape: Shape, reference: DeepseekV41 | None):
        self.run, self.shape, self.reference = run, shape, reference

    def batches(self, scored: Scored, version: int) -> tuple[list[Batch], dict[str, int]]:
        """The informative responses as packed batches. Counts: those of ``train.rl.batch.batches``, and the groups
        without variance.
        """
        made, counts = batches(scored, scored.informative, self.shape, version)
        return made, {**counts, "zero_variance": scored.zero_variance}

    def losses_of(self, met: Counter[str]) -> Callable[[Batch, LossDenominators], Losses]:
        """The losses of a micro-batch, for ``train_step``; the objective's sums are added to ``met``."""
        settings = self.run.config.rl

        def losses(batch: Batch, denominators: LossDenominators) -> Losses:
            tensors = {name: batch[name] for name in ("old_log_probs", "advantage", "response")}
            if self.reference is not None:
                tensors["reference"] = log_probs_under(self.reference, batch, settings.temperature)
            objective = PolicyObjective(settings.loss, settings.temperature, **tensors)
            inputs = {name: batch[name] for name in INPUTS} | {"layout": batch.get("layout")}
            found = self.run.model.losses(**inputs, denominators=denominators, objective=objective)
            met.update({name: float(value) for name, value in objective.sums.items()})
            return found

        return losses


@torch.no_grad()
def log_probs_under(model: DeepseekV41, batch: Batch, temperature: float, routing_replay: bool = False) -> Tensor:
    """fp32 [B, S]: log-probability of every supervised token under ``model``; with ``routing_replay`` through the
    recorded experts.
    """
    inputs = {name: batch[name] for name in INPUTS if routing_replay or name != "routing"}
    found = torch.zeros(batch["labels"].shape, device=batch["labels"].device)

    def objective(hidden: Tensor, weight: Tensor, targets: Tensor, places: Tensor) -> Tensor:
        log_probs, _ = token_log_probs(hidden / temperature, weight, targets)
        found.view(-1)[places] = log_probs.float()
        return log_probs.sum()

    model.losses(**inputs, denominators=model.loss_denominators(**inputs), objective=objective)
    return found
