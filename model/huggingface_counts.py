"""Under transformers' trainers: the counts of a whole optimizer step, which its losses are divided by.

A micro-batch alone does not know how many tokens the other micro-batches and processes of its step have. Trainers
collect the micro-batches of a step before the first forward pass; `count_whole_steps` counts them there, and puts the
counts into every micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from model.training_losses import LossDenominators

KEY = "step_counts"


def count_whole_steps(trainer: Any) -> None:
    """Make the added losses of a transformers `Trainer` (or one of TRL's) exact under gradient accumulation and with
    several processes, however unequal the micro-batches are.

    From now on every micro-batch of the trainer holds `step_counts`, int64 [2, 2 + index sources]: the denominators of
    its whole step (see `LossDenominators`), for indexers that learn from the tokens with a label, and for indexers that
    learn from all tokens. Raises ValueError if the trainer's model is none of this project. Batches without input_ids,
    such as those of TRL's GRPOTrainer, are left alone.
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
    """The denominators for a forward pass with or without labels; None if the step was not counted."""
    return None if counts is None else LossDenominators.from_tensor(counts[int(labels is None)])
