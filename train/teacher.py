"""The frozen teacher of a ``task=distill_data`` run, and the loss of a student on given text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from model import DeepseekV41, cross_entropy_sum, forward_kl
from train.build import Batch, Run
from train.config.distill_data import DistillDataConfig
from train.rl.reference import check_teacher, load_teacher


class TextObjective:
    """Computes (1 - weight) * cross-entropy + weight * KL(teacher || student), summed over the supervised tokens of a
    micro-batch, in the form that ``model.losses`` takes.

    Args:
        teacher: the teacher's final hidden states [R, d'] at the supervised tokens, and the weight [V, d'] of its
            output head; None if the weight of the KL term is 0.

    Attributes:
        sums: sums over the supervised tokens (detached, fp64): cross-entropy and KL, in nats.
    """

    NAMES = ("ce", "kl")

    def __init__(self, settings: DistillDataConfig, teacher: tuple[Tensor, Tensor] | None):
        self.settings, self.teacher = settings, teacher
        self.sums: dict[str, Tensor] = {}

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, places: Tensor) -> Tensor:
        ce = cross_entropy_sum(hidden, weight, targets)
        kl = torch.zeros_like(ce)
        if self.teacher is not None:
            kl = forward_kl(hidden, weight, *self.teacher, self.settings.top_k).sum()
        self.sums = {"ce": ce.detach().double(), "kl": kl.detach().double()}
        return (1 - self.settings.weight) * ce + self.settings.weight * kl


class Teacher:
    """The teacher of ``distill_data.teacher``. Every process has the whole teacher in memory; the weights stay packed
    if the teacher's checkpoint stores them quantised.

    Raises:
        ConfigError: the tokenizer or the vocabulary size of the teacher differs from the student's.
    """

    def __init__(self, run: Run):
        assert run.config.distill_data is not None
        self.run, self.settings = run, run.config.distill_data
        self.model: DeepseekV41 | None = None
        check_teacher(run, "distill_data.teacher", self.settings.teacher, "student")
        if self.settings.weight:
            self.model = load_teacher(run, self.settings.teacher).eval()

    def prepared(self, batch: Batch) -> dict[str, Any]:
        """Prepare a CPU batch for both models; the entry ``for_teacher`` has the inputs of the teacher, whose sequence
        layout differs from the student's.
        """
        found = self.run.prepare(batch)
        if self.model is not None:
            given = {name: value for name, value in batch.items() if name != "layout"}
            layout = self.model.lay_out(**given).to(self.run.device)
            found["for_teacher"] = {**found, "layout": layout}
        return found

    def objective(self, batch: dict[str, Any]) -> TextObjective:
        """Run the teacher on a prepared batch and return the student's objective. Call this method under
        ``run.autocast``.
        """
        if self.model is None:
            return TextObjective(self.settings, None)
        kept: list[tuple[Tensor, Tensor]] = []

        def keep(hidden: Tensor, weight: Tensor, targets: Tensor, places: Tensor) -> Tensor:
            kept.append((hidden, weight))
            return hidden.new_zeros(())

        inputs = batch["for_teacher"]
        with torch.no_grad():
            self.model.losses(**inputs, denominators=self.model.loss_denominators(**inputs), objective=keep)
        return TextObjective(self.settings, kept[0])
