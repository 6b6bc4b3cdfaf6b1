"""``task=distill``: full-vocabulary distillation on the policy's own responses, with a teacher for every task.

The policy answers the prompts of all tasks, each task's teacher reads the responses, and the step reduces KL(policy ||
teacher) over the whole vocabulary at every response token. Only one teacher is in memory at a time. Of the others, only
the final hidden states and the head are kept, not the logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model import DeepseekV41, LossDenominators, Losses, ModelConfig, reverse_kl
from train.build import Run
from train.checkpoint.init_from import find_pretrained
from train.config.problems import ConfigError, problem
from train.rl.batch import INPUTS, Batch, Scored, Shape, add_sums, batches
from train.rl.reference import load_frozen


class DistillationObjective:
    """KL(policy || teacher) in nats, summed over the supervised positions; a detached copy is added to ``sums``.

    teacher_hidden [B, S, d']: what the teacher's head reads to predict the token at each position; teacher_head [V,
    d'].
    """

    NAMES = ("kl",)

    def __init__(self, teacher_hidden: Tensor, teacher_head: Tensor):
        self.hidden, self.head = teacher_hidden, teacher_head
        self.sums = {"kl": torch.zeros((), dtype=torch.float64)}

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, places: Tensor) -> Tensor:
        divergence = reverse_kl(hidden, weight, self.hidden.flatten(0, 1)[places], self.head)
        self.sums["kl"] = self.sums["kl"] + divergence.detach().double().sum()
        return divergence.sum()


class Teachers:
    """The teachers of a run's tasks, found by a task's number in ``rl.tasks``.

    Raises:
        ConfigError: a teacher's tokenizer or vocabulary differs from the policy's.
    """

    NAMES = DistillationObjective.NAMES

    def __init__(self, run: Run, shape: Shape):
        self.run, self.shape = run, shape
        self.names = [str(task.teacher) for task in run.rl.tasks]
        for number, name in enumerate(self.names):
            _check_vocabulary(run, number, name)
        self.heads: dict[str, Tensor] = {}  # on the CPU
        self.hidden: list[Tensor] = []  # [B, S, d'] of each batch of the step, on the CPU
        self.current: tuple[str, Tensor] | None = None  # the head in use, on the device
        self.loaded: tuple[str, DeepseekV41] | None = None

    def batches(self, scored: Scored, version: int) -> tuple[list[Batch], dict[str, int]]:
        """All responses as packed batches, each for one teacher (``teacher``, int64 [2]: the number of its first
        task, and where its hidden states are in ``hidden``). Counts: see ``train.rl.batch.batches``.

        The teacher already in memory comes first, so a single teacher is loaded once.
        """
        order = sorted(set(self.names), key=lambda name: (self.loaded is None or name != self.loaded[0], name))
        self.hidden.clear()
        made: list[Batch] = []
        counts: Counter[str] = Counter()
        for name in order:
            numbers = torch.tensor([number for number, other in enumerate(self.names) if other == name])
            found, counted = batches(scored, torch.isin(scored.tasks, numbers), self.shape, version)
            counts.update(stale_tokens=counted["stale_tokens"])
            if self.run.world.any(bool(found)):
                self.model(name)  # all processes must load a checkpoint together
            for batch in found:
                batch["teacher"] = torch.tensor([int(numbers[0]), len(self.hidden)])
                self.hidden.append(self.read(name, batch))
            made += found
        return made, {**counted, **counts}

    @torch.no_grad()
    def read(self, name: str, batch: Batch) -> Tensor:
        """[B, S, d']: the hidden states from which a teacher predicts the supervised tokens of a batch, on the CPU."""
        model, kept = self.model(name), {}

        def keep(hidden: Tensor, weight: Tensor, targets: Tensor, places: Tensor) -> Tensor:
            if name not in self.heads:
                self.heads[name] = weight.detach().to("cpu", copy=True)
            found = hidden.new_zeros(*batch["labels"].shape, hidden.shape[1])
            found.flatten(0, 1)[places] = hidden
            kept["hidden"] = found.cpu()
            return hidden.new_zeros(())

        own = {key: batch[key] for key in INPUTS if key != "routing"}  # a teacher chooses its own experts
        inputs: dict[str, Any] = self.run.to_device(own)
        with self.run.autocast():
            model.losses(**inputs, denominators=model.loss_denominators(**inputs), objective=keep)
        return kept["hidden"]

    def model(self, name: str) -> DeepseekV41:
        """Load a teacher in place of the previous one."""
        if self.loaded is None or self.loaded[0] != name:
            self.loaded = None  # release the old one first: two do not fit
            self.loaded = name, load_frozen(self.run, name)
        return self.loaded[1]

    def head(self, name: str) -> Tensor:
        """A teacher's head on the device; the batches of a step come teacher by teacher."""
        if self.current is None or self.current[0] != name:
            self.current = None  # release the old one first
            self.current = name, self.heads[name].to(self.run.device)
        return self.current[1]

    def losses_of(self, sums: dict[str, Tensor]) -> Callable[[Batch, LossDenominators], Losses]:
        """The losses of a micro-batch, for ``train_step``; the objective's sums are added to ``sums``."""

        def losses(batch: Batch, denominators: LossDenominators) -> Losses:
            inputs = {key: batch[key] for key in INPUTS} | {"layout": batch.get("layout")}
            if "teacher" not in batch:  # padding, so that all processes have equally many
                return self.run.model.losses(**inputs, denominators=denominators)
            number, place = batch["teacher"].tolist()
            hidden = self.hidden[place].to(self.run.device)
            objective = DistillationObjective(hidden, self.head(self.names[number]))
            found = self.run.model.losses(**inputs, denominators=denominators, objective=objective)
            add_sums(sums, objective.sums)
            return found

        return losses


def _check_vocabulary(run: Run, number: int, name: str) -> None:
    origin, rule = find_pretrained(name), None
    size, own = ModelConfig.from_dict(origin.model).text.vocab_size, run.model_config.text.vocab_size
    if origin.tokens() != find_pretrained(run.config.initial_checkpoint).tokens():
        rule = f"its tokenizer, {origin.tokenizer}, is not the policy's: their vocabularies cannot be compared"
    elif size != own:
        rule = f"its vocabulary has {size} entries, the policy's {own}: they cannot be compared"
    if rule:
        raise ConfigError([problem(f"rl.tasks[{number}].teacher", name, rule, "Use models of one family")])
