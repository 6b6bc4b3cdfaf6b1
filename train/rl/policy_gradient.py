"""``task=rl``: the policy gradient on graded responses whose rewards differ inside their group."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from model import LossDenominators, Losses
from train.build import Run
from train.rl.batch import INPUTS, Batch, Scored, Shape, add_sums, batches
from train.rl.loss import PolicyObjective
from train.rl.reference import Reference, log_probs_under


class PolicyGradient:
    """Which of a step's responses are trained on, and by which losses.

    reference: the initial policy, if ``rl.loss.kl`` needs it.
    """

    NAMES = PolicyObjective.NAMES

    def __init__(self, run: Run, shape: Shape, reference: Reference | None):
        self.run, self.shape, self.reference = run, shape, reference

    def batches(self, scored: Scored, version: int) -> tuple[list[Batch], dict[str, int]]:
        """The informative responses as packed batches. Counts: those of ``train.rl.batch.batches``, and the groups
        without variance.
        """
        made, counts = batches(scored, scored.informative, self.shape, version)
        return made, {**counts, "zero_variance": scored.zero_variance}

    def losses_of(self, sums: dict[str, Tensor]) -> Callable[[Batch, LossDenominators], Losses]:
        """The losses of a micro-batch, for ``train_step``; the objective's sums are added to ``sums``."""
        settings, loss = self.run.rl, self.run.rl.loss
        assert loss is not None  # as task=rl requires

        def losses(batch: Batch, denominators: LossDenominators) -> Losses:
            tensors = {name: batch[name] for name in ("old_log_probs", "advantage", "response")}
            if self.reference is not None:
                with self.reference.model() as model:
                    tensors["reference"] = log_probs_under(model, batch, settings.temperature)
            objective = PolicyObjective(loss, settings.temperature, **tensors)
            inputs = {name: batch[name] for name in INPUTS} | {"layout": batch.get("layout")}
            found = self.run.model.losses(**inputs, denominators=denominators, objective=objective)
            add_sums(sums, objective.sums)
            return found

        return losses
