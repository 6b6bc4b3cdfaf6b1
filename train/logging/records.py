"""The records of steps and evaluations: plain numbers, as ``metrics.jsonl`` stores them."""

from __future__ import annotations

import torch

from optim import load_statistics

MODALITIES = ("text", "image")


def load_record(load: torch.Tensor) -> dict[str, dict[str, list[float]]]:
    """Compute max/mean and entropy (nats) of the expert load of every layer, for each modality that had tokens.

    load: number of tokens that each expert received, [layers, 2 (text, images), experts].
    """
    worst, entropy = load_statistics(load)
    present = load.sum((0, 2)) > 0
    return {
        name: {"max_over_mean": worst[:, i].tolist(), "entropy": entropy[:, i].tolist()}
        for i, name in enumerate(MODALITIES)
        if present[i]
    }
