"""``task=rl``: the policy gradient on graded responses whose rewards differ inside their group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from model import DeepseekV41, LossDenominators, Losses, token_log_probs
from train.build import Run
from train.rl.batch import INPUTS, Batch, Scored, Shape, add_sums, batches
from train.rl.loss import PolicyObjective


class Copy:
    """A reference policy in a model of its own."""

    def __init__(self, model: DeepseekV41):
        self._model = model

    @contextmanager
    def model(self) -> Iterator[DeepseekV41]:
        yield self._model


class BaseModel:
    """The reference policy of a model with a new adapter: its own weights without the adapter. Training an adapter also
    moves the router biases, so their initial values are kept here.
    """

    def __init__(self, model: DeepseekV41):
        self._model = model
        self._biases = [bias.clone() for pair in model.router_biases() for bias in pair]

    @contextmanager
    def model(self) -> Iterator[DeepseekV41]:
        from train.lora import inject  # takes seconds to import

        biases = [bias for pair in self._model.router_biases() for bias in pair]
        now = [bias.clone() for bias in biases]
        training = self._model.training
        self._model.eval()
        with inject.without_adapter(self._model):
            self._set(biases, self._biases)
            try:
                yield self._model
            finally:
                self._set(biases, now)
                self._model.train(training)

    @staticmethod
    def _set(biases: list[Tensor], values: list[Tensor]) -> None:
        for bias, value in zip(biases, values, strict=True):
            bias.copy_(value)


Reference = Copy | BaseModel


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


@torch.no_grad()
def log_probs_under(model: DeepseekV41, batch: Batch, temperature: float, routing_replay: bool = False) -> Tensor:
    """fp32 [B, S]: log-probability of every supervised token under ``model``; with ``routing_replay`` through the
    recorded experts.
    """
    inputs: dict[str, Any] = {name: batch[name] for name in INPUTS if routing_replay or name != "routing"}
    found = torch.zeros(batch["labels"].shape, device=batch["labels"].device)

    def objective(hidden: Tensor, weight: Tensor, targets: Tensor, places: Tensor) -> Tensor:
        log_probs, _ = token_log_probs(hidden / temperature, weight, targets)
        found.view(-1)[places] = log_probs.float()
        return log_probs.sum()

    model.losses(**inputs, denominators=model.loss_denominators(**inputs), objective=objective)
    return found
