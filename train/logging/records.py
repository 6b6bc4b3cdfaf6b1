"""Computes parts of the records of steps and evaluations, which ``metrics.jsonl`` stores as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def scalars(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Flatten the nested numbers of a record to (dotted key, value) pairs; list items get their index as key."""
    found: list[tuple[str, float]] = []
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found += scalars(value, f"{name}.")
        elif isinstance(value, list):
            found += scalars({str(i): item for i, item in enumerate(value)}, f"{name}.")
        elif isinstance(value, (int, float)):
            found.append((name, value))
    return found
