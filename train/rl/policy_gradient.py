"""``task=rl``: policy-gradient training on graded responses. Groups whose rewards are all equal are left out."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from model import LossDenominators, Losses
from train.build import Run
from train.rl.batch import INPUTS, Batch, Scored, Shape, add_sums, batches
from train.rl.loss import PolicyObjective
from train.rl.reference import Reference, log_probs_under


class PolicyGradient:
    """Selects the responses of a step that are trained on, and computes their losses.

    reference: the initial policy, which is needed if ``rl.loss.kl`` is not 0.
    """

    NAMES = PolicyObjective.NAMES

    def __init__(self, run: Run, shape: Shape, reference: Reference | None):
        self.run, self.shape, self.reference = run, shape, reference

    def batches(self, scored: Scored, version: int) -> tuple[list[Batch], dict[str, int]]:
        """Pack into batches all responses of the groups in which not all rewards are equal. Under context parallelism
        the batches of all ranks that share rows are returned.

        Returns the batches, and the counts of ``train.rl.batch.batches`` plus the number of groups with equal rewards.
        """
        made, counts = batches(scored, scored.informative, self.shape, version)
        return self.run.world.share_rows(made), {**counts, "zero_variance": scored.zero_variance}

    def losses_of(self, sums: dict[str, Tensor]) -> Callable[[Batch, LossDenominators], Losses]:
        """Return the function that computes the losses of a micro-batch in ``train_step``.

        The returned function adds the statistics of the micro-batch to ``sums``.
        """
        settings, loss = self.run.rl, self.run.rl.loss
        assert loss is not None  # the rules for task=rl require the section rl.loss

        def losses(batch: Batch, denominators: LossDenominators) -> Losses:
            tensors = {name: batch[name] for name in ("old_log_probs", "advantage", "response")}
            if self.reference is not None:
                with self.reference.model() as model:
                    tensors["reference"] = log_probs_under(model, batch, settings.temperature)
            context = self.run.world.parallel.context
            objective = PolicyObjective(loss, settings.temperature, **tensors, context=context)
            inputs = {name: batch[name] for name in INPUTS} | {"layout": batch.get("layout")}
            found = self.run.model.losses(**inputs, denominators=denominators, objective=objective)
            add_sums(sums, objective.sums)
            return found

        return losses
