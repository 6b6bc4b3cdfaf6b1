"""Counts the tokens of a whole optimizer step for the trainers of transformers; mean losses are divided by these
counts.

A loss that is a mean must be divided by the number of tokens in the whole step, but a micro-batch alone does not know
how many tokens the other micro-batches and processes of its step have. Trainers collect the micro-batches of a step
before the first forward pass; at that point, `count_whole_steps` counts the tokens of all these micro-batches, and adds
the counts to every micro-batch.
"""

from __future__ import annotations

from functools import partial
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
    label, and row 1 for indexers that learn from all tokens. TRL's `GRPOTrainer` collects prompts and writes the
    answers later, so the tokens of its steps are counted at their first forward pass. Raises ValueError if the
    trainer's model is not a `DeepseekV41ForCausalLM`, and under GRPO if a step has more micro-batches than are
    generated at once.
    """
    model = next((m for m in trainer.model.modules() if hasattr(m, "denominators")), None)
    if model is None:
        raise ValueError("count_whole_steps: the trainer's model is no DeepseekV41ForCausalLM")
    collect = trainer.get_batch_samples
    if hasattr(trainer, "_get_per_token_logps_and_entropies"):
        _count_generated(trainer, model)
        return

    def collected(*arguments: Any, **options: Any) -> tuple[list, Any]:
        batches, items = collect(*arguments, **options)
        if batches and all(isinstance(batch, dict) and "input_ids" in batch for batch in batches):
            counts = _total(trainer, [model.denominators(**batch) for batch in batches])
            batches = [{**batch, KEY: counts} for batch in batches]
        return batches, items

    trainer.get_batch_samples = collected


def _total(trainer: Any, counts: list[Tensor]) -> Tensor:
    """Returns the sum of the counts of all micro-batches of a step, and of all processes if the processes share the
    step.
    """
    total = torch.stack(counts).sum(0)
    if trainer.args.average_tokens_across_devices and torch.distributed.is_initialized():
        total = total.to(trainer.args.device)
        torch.distributed.all_reduce(total)
    return total


def _count_generated(trainer: Any, model: Any) -> None:
    """Make a `GRPOTrainer` pass the counts of the whole step, which it computes from its buffered answers, to each
    training forward pass.

    Raises:
        ValueError: a step has more micro-batches than are generated at once, so the later micro-batches cannot be
        counted.
    """
    args, plain = trainer.args, trainer._get_per_token_logps_and_entropies
    if args.steps_per_generation % args.gradient_accumulation_steps:
        raise ValueError(
            f"count_whole_steps: steps_per_generation = {args.steps_per_generation} must be a multiple of "
            f"gradient_accumulation_steps = {args.gradient_accumulation_steps}, so that all answers of a step are "
            "known when it begins"
        )

    def counted(module: Any, *arguments: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() and module.training:
            first = trainer._step - trainer._step % args.gradient_accumulation_steps
            numbers = range(first, first + trainer.current_gradient_accumulation_steps)
            batches = [trainer._buffered_inputs[number % args.steps_per_generation] for number in numbers]
            module = partial(module, **{KEY: _total(trainer, [model.denominators(**_texts(b)) for b in batches])})
        return plain(module, *arguments, **options)

    trainer._get_per_token_logps_and_entropies = counted


def _texts(batch: dict[str, Any]) -> dict[str, Tensor]:
    """Joins the prompts and answers of a `GRPOTrainer`'s micro-batch; returns their token ids and their mask."""
    parts = (("input_ids", "ids"), ("attention_mask", "mask"))
    return {key: torch.cat([batch[f"prompt_{part}"], batch[f"completion_{part}"]], 1) for key, part in parts}


def denominators_of(counts: Tensor | None, labels: Tensor | None) -> LossDenominators | None:
    """Returns the denominators for a forward pass with or without labels, or None if `counts` is None (the step was not
    counted).
    """
    return None if counts is None else LossDenominators.from_tensor(counts[int(labels is None)])
