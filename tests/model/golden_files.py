"""Where the golden files are, and one case of them run and laid beside the oracle's numbers.

The files come from two other implementations (tests/golden/README.md). A checkout that has the full set at
`../shared/golden` uses that; otherwise the copies under `tests/golden` are used. `NARROWS_GOLDEN` names another folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from model import Output, Runtime, TextConfig, load_pretrained
from model.backbone import Trace
from model.checkpoint import released_names
from model.pack import Pack, build_pack

REPOSITORY = Path(__file__).resolve().parents[2]
COPIES = REPOSITORY / "tests" / "golden"
INPUTS = (
    "input_ids",
    "labels",
    "attention_mask",
    "seq_lens",
    "pixel_values",
    "image_grid_hws",
    "vision_token_types",
)


def golden(name: str) -> Path:
    """Path of a golden file or folder. A case too large to be copied into the repository is skipped without it."""
    roots = [Path(os.environ["NARROWS_GOLDEN"])] if "NARROWS_GOLDEN" in os.environ else []
    for root in roots or [REPOSITORY.parent / "shared" / "golden", COPIES]:
        if (root / name).exists():
            return root / name
    if name in ("detail/a_text", "detail/b_engram", "detail/f_prod_heads"):
        pytest.skip(f"{name} is only in the full golden set")
    raise FileNotFoundError(f"golden data {name} is missing")


@dataclass(frozen=True, repr=False)
class Case:
    """One golden case after a forward and a backward. `real` bool [B, S] marks positions that are no padding."""

    inputs: dict[str, Tensor]
    expected: dict[str, Tensor]
    output: Output
    trace: Trace
    pack: Pack
    gradients: dict[str, Tensor]
    aligned: Tensor
    config: TextConfig

    @property
    def real(self) -> Tensor:
        return self.pack.unflatten(torch.ones(self.pack.tokens, dtype=torch.bool))

    def streams(self) -> dict[int, Tensor]:
        """By layer: the streams that enter it (the two golden sets name them differently)."""
        names = {n: (f"streams.{n}", f"layers.{n}.streams_in") for n in range(len(self.trace.blocks))}
        return {n: self.expected[k] for n, keys in names.items() for k in keys if k in self.expected}

    def layers_with(self, name: str) -> list[int]:
        return [n for n in range(len(self.trace.blocks)) if f"layers.{n}.{name}" in self.expected]

    def of(self, layer: int, name: str) -> Tensor:
        return self.expected[f"layers.{layer}.{name}"]

    def oracle_entry(self, ratio: int) -> tuple[Tensor, Tensor]:
        """Where the oracle keeps what belongs to token t of the pack: (row, first entry of the token's document)."""
        first = self.aligned - self.pack.position
        return first // self.width, first % self.width // ratio

    @property
    def width(self) -> int:
        return self.expected["layers.0.router_indices"].shape[0] // self.pack.rows


@lru_cache(maxsize=2)
def run(name: str, attention: str) -> Case:
    """Load a case's checkpoint, run it through the public API and collect everything the oracle wrote down."""
    folder = golden(name)
    loaded = load_file(folder / "inputs.safetensors")
    inputs = {key: loaded[key] for key in INPUTS if key in loaded}
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].float()
    expected = load_file(folder / "expected.safetensors")
    model = load_pretrained(folder, runtime=Runtime(attention=attention))
    output, trace = traced(model, inputs)
    output.loss.backward()
    gradients: dict[str, Tensor] = {}
    for parameter_name, parameter in model.named_parameters():
        names = released_names(parameter_name, parameter.shape)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients.update(zip(names, gradient if len(names) > 1 else [gradient], strict=True))
    pack = build_pack(
        model.config.text, *(inputs.get(k) for k in ("input_ids", "attention_mask", "seq_lens", "vision_token_types"))
    )
    return Case(
        inputs, expected, output, trace, pack, gradients, _aligned_positions(expected, inputs, pack), model.config.text
    )


def traced(model, inputs: dict[str, Tensor]) -> tuple[Output, Trace]:
    """Run the public forward and keep the trace that it made on the way."""
    kept: list[Trace] = []
    inner = model._trace

    def keep(*args, **kwargs):
        kept.append(inner(*args, **kwargs))
        return kept[0]

    model._trace = keep
    try:
        return model(**inputs, output_hidden_states=True), kept[0]
    finally:
        del model._trace


def _aligned_positions(expected: dict[str, Tensor], inputs: dict[str, Tensor], pack: Pack) -> Tensor:
    """int64 [T]: the flat position at which the oracle keeps a token's internals.

    For packed rows it moves every document to the next multiple of the largest compression ratio (2 in all cases).
    """
    width = expected["layers.0.router_indices"].shape[0] // pack.rows
    if "seq_lens" not in inputs:
        index = torch.arange(pack.rows * pack.row_length).view(pack.rows, -1)
        return pack.flatten(index)  # width equals the row length: nothing moves
    places = []
    for row, lengths in enumerate(inputs["seq_lens"].tolist()):
        at = 0
        for length in filter(None, lengths):
            places.append(row * width + at + torch.arange(length))
            at += length + length % 2
    return torch.cat(places)
