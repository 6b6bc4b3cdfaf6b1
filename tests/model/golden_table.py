"""Print how far the model is from the golden numbers: the figures of the table in docs/architecture.md.

    python -m tests.model.golden_table

Plain runs of the public API in fp32; nothing is taken from the oracle, as tests/model/test_golden.py does at rounding
edges.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from model import ForwardOptions, load_pretrained
from tests.model.golden_files import Oracle, load_oracle, traced

CASES = ("text", "engram", "padded", "packed", "vision", "heads512")


def errors(oracle: Oracle, attention: str) -> dict[str, float]:
    """Largest absolute differences of logits, streams and loss; largest gradient difference relative to its tensor's
    largest value.
    """
    model = load_pretrained(oracle.folder, runtime=ForwardOptions(attention=attention))
    output, _ = traced(model, oracle.inputs)
    output.loss.backward()
    streams = oracle.streams()
    return {
        "logits": _worst((output.logits - oracle.expected["logits"])[oracle.real]),
        "streams": max(_worst((output.hidden_states[n] - s)[oracle.real]) for n, s in streams.items()),
        "loss": _worst(output.loss - oracle.expected["loss"]),
        "gradients": max(_gradients(model, oracle.expected)),
    }


def _gradients(model, expected: dict[str, Tensor]) -> Iterable[float]:
    for name, parameter in model.named_parameters():
        answer = expected.get(f"grad.{name}")
        if answer is not None:
            yield _worst(parameter.grad - answer) / _worst(answer)


def _worst(x: Tensor) -> float:
    return x.abs().max().item()


def main() -> None:
    print("| case | attention | logits | streams | loss | gradients |\n|---|---|---|---|---|---|")
    for name in CASES:
        oracle = load_oracle(name)
        for attention in ("sparse", "dense"):
            row = errors(oracle, attention)
            print(f"| {name} | {attention} | " + " | ".join(f"{value:.1e}" for value in row.values()) + " |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
