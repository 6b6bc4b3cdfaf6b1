"""Counts the tokens of a whole optimizer step that its losses are divided by, for the trainers of transformers.

A loss that is a mean must be divided by the number of tokens in the whole step, but a micro-batch alone does not know
how many tokens the other micro-batches and processes of its step have. Trainers collect the micro-batches of a step
before the first forward pass; at that point, `count_whole_steps` counts the tokens of all these micro-batches, and adds
the counts to every micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from model.training_losses import LossDenominators

KEY = "step_counts"


def count_whole_steps(trainer: Any) -> None:
    """Make the indexer loss and the balance loss exact means over the whole step under a transformers `Trainer` (or a
    trainer of TRL), also with gradient accumulation, several processes and micro-batches of unequal size.

    After this call, every micro-batch of the trainer holds `step_counts`, int64 [2, 2 + index sources]: the
    denominators of the whole step (see `LossDenominators`). Row 0 is for indexers that learn from the tokens with a
    label, and row 1 for indexers that learn from all tokens. Raises ValueError if the trainer's model is not a
    `DeepseekV41ForCausalLM`. Batches without input_ids, such as those of TRL's GRPOTrainer, are left alone.
    """
    model = next((m for m in trainer.model.modules() if hasattr(m, "denominators")), None)
    if model is None:
        raise ValueError("count_whole_steps: the trainer's model is no DeepseekV41ForCausalLM")
    collect = trainer.get_batch_samples

    def collected(*arguments: Any, **options: Any) -> tuple[list, Any]:
        batches, items = collect(*arguments, **options)
        if batches and all(isinstance(batch, dict) and "input_ids" in batch for batch in batches):
            counts = torch.stack([model.denominators(**batch) for batch in batches]).sum(0)
            if trainer.args.average_tokens_across_devices and torch.distributed.is_initialized():
                counts = counts.to(trainer.args.device)
                torch.distributed.all_reduce(counts)
            batches = [{**batch, KEY: counts} for batch in batches]
        return batches, items

    trainer.get_batch_samples = collected


def denominators_of(counts: Tensor | None, labels: Tensor | None) -> LossDenominators | None:
    """Returns the denominators for a forward pass with or without labels, or None if `counts` is None (the step was not
    counted).
    """
    return None if counts is None else LossDenominators.from_tensor(counts[int(labels is None)])
