"""``task=distill``: full-vocabulary distillation on the policy's own responses, with a teacher for every task.

The policy answers the prompts of all tasks. The teacher of each task runs a forward pass over the responses of its
task, and the step minimises KL(policy || teacher) over the whole vocabulary at every response token. Only one teacher
is in memory at a time. From each teacher, the final hidden states and the output head are kept for the loss, not the
logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model import DeepseekV41, LossDenominators, Losses, reverse_kl
from model.parallel.ranks import Parallel
from train.build import Run
from train.rl.batch import INPUTS, Batch, Scored, Shape, add_sums, batches
from train.rl.reference import check_teacher, load_teacher


class DistillationObjective:
    """Computes KL(policy || teacher) in nats, summed over the supervised positions, and adds this sum (detached) to
    ``sums``.

    Args:
        teacher_hidden: the teacher's final hidden state that predicts the token at each position, [B, S, d'].
        teacher_head: weight of the teacher's output head, [V, d'].
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
    """Loads the teachers of the tasks in ``rl.tasks``, runs them over responses, and computes the distillation loss.

    Raises:
        ConfigError: tokenizer or vocabulary size of a teacher differ from those of the policy.
    """

    NAMES = DistillationObjective.NAMES

    def __init__(self, run: Run, shape: Shape):
        self.run, self.shape = run, shape
        self.names = [str(task.teacher) for task in run.rl.tasks]
        for number, name in enumerate(self.names):
            check_teacher(run, f"rl.tasks[{number}].teacher", name, "policy")
        self.heads: dict[str, Tensor] = {}  # teacher -> weight of its output head, on the CPU
        self.hidden: list[Tensor] = []  # [B, S, d'] of each batch of the step, on the CPU
        self.current: tuple[str, Tensor] | None = None  # teacher and output head in use, on the device
        self.loaded: tuple[str, DeepseekV41] | None = None

    def batches(self, scored: Scored, version: int) -> tuple[list[Batch], dict[str, int]]:
        """Pack all responses into batches, each with the responses of one teacher, and run that teacher over them.

        The tensor ``teacher`` (int64 [2]) of a batch holds the index of a task of this teacher, and the index of the
        batch's hidden states in ``self.hidden``. The teacher that is already in memory comes first, so with a single
        teacher the checkpoint is loaded only once. Returns the batches, and the counts that ``train.rl.batch.batches``
        returns.
        """
        order = sorted(set(self.names), key=lambda name: (self.loaded is None or name != self.loaded[0], name))
        self.hidden.clear()
        made: list[Batch] = []
        counts: Counter[str] = Counter()
        for name in order:
            numbers = torch.tensor([number for number, other in enumerate(self.names) if other == name])
            found, counted = batches(scored, torch.isin(scored.tasks, numbers), self.shape, version)
            counts.update(stale_tokens=counted["stale_tokens"])
            found = self.run.world.share_rows(found)
            if self.run.world.any(bool(found)):
                self.model(name)  # all processes load a checkpoint together
            for batch in found:
                batch["teacher"] = torch.tensor([int(numbers[0]), len(self.hidden)])
                self.hidden.append(self.read(name, batch))
            made += found
        return made, {**counted, **counts}

    @torch.no_grad()
    def read(self, name: str, batch: Batch) -> Tensor:
        """Run a teacher over a batch.

        Returns its final hidden states at the supervised tokens of this rank, [B, S, d'], on the CPU.
        """
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
        """Return the model of a teacher. If another teacher is in memory, it is replaced by the requested teacher."""
        if self.loaded is None or self.loaded[0] != name:
            self.loaded = None  # release the old teacher first; memory may not hold two
            parallel = Parallel(context=self.run.world.parallel.context)  # whole on every process, rows shared
            self.loaded = name, load_teacher(self.run, name, parallel)
        return self.loaded[1]

    def head(self, name: str) -> Tensor:
        """Return the weight of a teacher's output head on the device. Only the head that was used last stays on the
        device.
        """
        if self.current is None or self.current[0] != name:
            self.current = None  # release the old head first
            self.current = name, self.heads[name].to(self.run.device)
        return self.current[1]

    def losses_of(self, sums: dict[str, Tensor]) -> Callable[[Batch, LossDenominators], Losses]:
        """Return the function that computes the losses of a micro-batch in ``train_step``.

        The returned function adds the statistics of the micro-batch to ``sums``.
        """

        def losses(batch: Batch, denominators: LossDenominators) -> Losses:
            inputs = {key: batch[key] for key in INPUTS} | {"layout": batch.get("layout")}
            if "teacher" not in batch:  # a batch of padding, added so that all processes have equally many batches
                return self.run.model.losses(**inputs, denominators=denominators)
            number, place = batch["teacher"].tolist()
            hidden = self.hidden[place].to(self.run.device)
            objective = DistillationObjective(hidden, self.head(self.names[number]))
            found = self.run.model.losses(**inputs, denominators=denominators, objective=objective)
            add_sums(sums, objective.sums)
            return found

        return losses
