"""Where the golden files are, and one case of them run and laid beside the oracle's numbers.

The files come from two other implementations (tests/golden/README.md). A checkout that has the full set at
`../shared/golden` uses that; otherwise the copies under `tests/golden` are used. `NARROWS_GOLDEN` names another folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import model.attention as attention_module
import model.indexer as indexer_module
from model import ForwardOptions, ModelConfig, Output, TextConfig, load_pretrained
from model.attention import CrossLayerState
from model.backbone import BackboneOutput, BlockState
from model.checkpoint.names import released_names
from model.engram import engram_rows
from model.layout import SequenceLayout, build_layout
from model.quantize import KV_MAIN, fake_quant_fp4, fake_quant_fp8

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
class Oracle:
    """A golden case's inputs and expected numbers, and how the oracle's layout maps to the layout's."""

    folder: Path
    inputs: dict[str, Tensor]
    expected: dict[str, Tensor]
    config: TextConfig
    layout: SequenceLayout
    aligned: Tensor  # int64 [T]: flat position at which the oracle keeps a token's internals

    @property
    def real(self) -> Tensor:
        """bool [B, S]: no padding."""
        return self.layout.unflatten(torch.ones(self.layout.tokens, dtype=torch.bool))

    def of(self, layer: int, name: str) -> Tensor:
        return self.expected[f"layers.{layer}.{name}"]

    def layers_with(self, name: str) -> list[int]:
        return [n for n in range(self.config.num_hidden_layers) if f"layers.{n}.{name}" in self.expected]

    def streams(self) -> dict[int, Tensor]:
        """By layer: the streams that enter it (the two golden sets name them differently)."""
        names = {n: (f"streams.{n}", f"layers.{n}.streams_in") for n in range(self.config.num_hidden_layers)}
        return {n: self.expected[k] for n, keys in names.items() for k in keys if k in self.expected}

    def first_entry(self, ratio: int) -> tuple[Tensor, Tensor]:
        """Of each token's document: (row, number in the row) of its first entry, as the oracle counts."""
        width = _width(self.expected, self.layout)
        start = self.aligned - self.layout.position
        return start // width, start % width // ratio

    def entries(self, layer: int, name: str) -> tuple[Tensor, Tensor]:
        """`compressed_kv` or `index_keys` of a Full layer: (our slots of all entries, the oracle's values there)."""
        ratio, layout = self.config.ratio(layer), self.layout
        row, first = self.first_entry(ratio)
        closing = ((layout.position + 1) % ratio == 0).nonzero().flatten()  # the token that completes an entry
        number = layout.position[closing] // ratio
        slots = layout.entries[ratio].visible_from[closing] + number
        return slots, self.of(layer, name)[row[closing], first[closing] + number].float()


@dataclass(frozen=True, repr=False)
class Case:
    """An oracle's case after our forward and backward. `flips`: (tensor, layer, slot, channel, distance to the edge)
    of the rounded values that fell on the other side of an edge than the oracle's.
    """

    oracle: Oracle
    output: Output
    trace: BackboneOutput
    gradients: dict[str, Tensor]
    flips: list[tuple]

    @property
    def expected(self) -> dict[str, Tensor]:
        return self.oracle.expected


def load_oracle(name: str) -> Oracle:
    folder = golden(name)
    loaded, expected = load_file(folder / "inputs.safetensors"), load_file(folder / "expected.safetensors")
    inputs = {key: loaded[key] for key in INPUTS if key in loaded}
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].float()
    config = ModelConfig.load(folder).text
    layout = (inputs.get(k) for k in ("input_ids", "attention_mask", "seq_lens", "vision_token_types"))
    layout = build_layout(config, *layout)
    return Oracle(folder, inputs, expected, config, layout, _aligned_positions(expected, inputs, layout))


@lru_cache(maxsize=2)
def run(name: str, attention: str) -> Case:
    """Run a case's checkpoint through the public API, forward and backward, taking the oracle's side at rounding edges.
    `attention`: dense, sparse, or kernels, which is sparse with everything that model.kernels has.

    A cache value within fp32 noise of the middle between two FP4 or FP8 values may become either, and that single
    value can move a later selection. So where a rounded value differs from the oracle's, the oracle's is used and the
    difference is listed in `flips`, for a test to show that they are few and lie on an edge.
    """
    oracle = load_oracle(name)
    runtime = ForwardOptions(kernels="triton") if attention == "kernels" else ForwardOptions(attention=attention)
    model = load_pretrained(oracle.folder, runtime=runtime)
    with oracle_rounding(oracle, model) as flips:
        output, trace = traced(model, oracle.inputs)
    output.loss.backward()
    gradients: dict[str, Tensor] = {}
    for parameter_name, parameter in model.named_parameters():
        names = released_names(parameter_name, parameter.shape)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients.update(zip(names, gradient if len(names) > 1 else [gradient], strict=True))
    return Case(oracle, output, trace, gradients, flips)


@contextmanager
def oracle_rounding(oracle: Oracle, model) -> Iterator[list[tuple]]:
    """For one forward: rounded values are the oracle's. The list gets those that differed."""
    every = torch.arange(oracle.layout.tokens)
    known = {
        **{
            what: {n: oracle.entries(n, what) for n in oracle.layers_with(what)}
            for what in ("compressed_kv", "index_keys")
        },
        "window_kv": {n: (every, kv) for n, kv in window_kv(oracle, model).items()},
    }
    flips: list[tuple] = []
    with pytest.MonkeyPatch.context() as patch:
        for module, function, what in ROUNDERS:
            patch.setattr(module, function, _with_oracle(getattr(module, function), what, known[what], flips))
        rounded = _with_oracle(fake_quant_fp4, "compressed_kv", known["compressed_kv"], flips)
        main_kv = KV_MAIN._replace(fake_quant=rounded)
        patch.setattr(attention_module, "main_kv_format", lambda kv_quant: main_kv if kv_quant else None)
        yield flips


ROUNDERS = (
    (indexer_module, "fake_quant_mxfp4", "index_keys"),
    (attention_module, "fake_quant_fp8", "window_kv"),
)


@torch.no_grad()
def window_kv(oracle: Oracle, model) -> dict[int, Tensor]:
    """By layer: the rounded window KV [T, D] that follows from the streams the oracle lists (it does not list this).

    Every block is fed the oracle's streams, so that no noise adds up over layers. Where a token does not come out as
    the oracle lists it and a value of its window KV lies on an edge, the value gets the side on which it does.
    """
    found: dict[int, Tensor] = {}
    streams, layout, config = oracle.streams(), oracle.layout, oracle.config
    pre_mix, shared = torch.eye(config.hc_mult)[:1].expand(layout.tokens, -1), CrossLayerState()
    for layer, block in enumerate(model.layers):
        if layer not in streams:  # the input of layer 0 is the embedding itself
            assert layer == 0
            entering = model.embed(layout.flatten(oracle.inputs["input_ids"]))[:, None].repeat(1, config.hc_mult, 1)
        else:
            entering = layout.flatten(streams[layer])
        lookup = None
        if block.engram is not None:
            rows = engram_rows(config, layer, model.token_map, layout.flatten(oracle.inputs["input_ids"]), layout)
            lookup = block.engram.embed.look_up(rows)
        state, runtime = BlockState(entering, pre_mix, shared), replace(model.runtime, attention="dense")
        wanted = layout.flatten(streams[layer + 1]) if layer + 1 in streams else None
        result, found[layer] = _on_the_right_sides(lambda: block(state, lookup, layout, runtime), wanted)  # noqa: B023
        pre_mix, shared = result.state.pre_mix, result.shared
    return found


def _on_the_right_sides(run_block: Callable[[], Any], wanted: Tensor | None) -> tuple[Any, Tensor]:
    """What a block gives, and its rounded window KV. ``wanted``: its streams."""
    seen: list[Tensor] = []

    def attempt(sides: dict[tuple[int, int], Tensor]) -> tuple[Any, Tensor, Tensor]:
        def keep(x: Tensor) -> Tensor:
            out = fake_quant_fp8(x).clone()
            for place, value in sides.items():
                out[place] = value
            seen[:] = [x, out]
            return out

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention_module, "fake_quant_fp8", keep)
            result = run_block()
        x, rounded = seen
        off = torch.zeros(0) if wanted is None else (result.state.streams - wanted).abs().flatten(1).amax(1)
        return result, rounded, off > 1e-4

    sides: dict[tuple[int, int], Tensor] = {}
    result, rounded, wrong = attempt(sides)
    while wrong.any():
        token, x = int(wrong.nonzero()[0]), seen[0]
        below, above = fake_quant_fp8(x - 3e-5)[token], fake_quant_fp8(x + 3e-5)[token]
        for channel in (below != above).nonzero().flatten().tolist():
            other = below[channel] if rounded[token, channel] == above[channel] else above[channel]
            tried = attempt({**sides, (token, channel): other})
            if not tried[2][: token + 1].any():
                sides[token, channel] = other
                result, rounded, wrong = tried
                break
        else:
            break
    return result, rounded


def _with_oracle(rounder, what: str, known: dict[int, tuple[Tensor, Tensor]], flips: list[tuple]):
    layers = iter(known.items())

    def rounded(x: Tensor) -> Tensor:
        out = rounder(x)
        if x.dim() != 2:  # index queries, which the oracle does not list
            return out
        layer, (slots, answers) = next(layers)
        correction = torch.zeros_like(out)
        differs = (out[slots] - answers).abs() > 1e-6 + 1e-6 * answers.abs()
        for n, channel in differs.nonzero().tolist():
            slot = int(slots[n])
            middle = (out[slot, channel] + answers[n, channel]) / 2
            flips.append((what, layer, slot, channel, abs(x[slot, channel] - middle).item()))
            correction[slot, channel] = (answers[n, channel] - out[slot, channel]).detach()
        return out + correction

    return rounded


def traced(model, inputs: dict[str, Tensor]) -> tuple[Output, BackboneOutput]:
    """Run the public forward and keep the trace that it made on the way."""
    kept: list[BackboneOutput] = []
    inner = model.run_backbone

    def keep(*args, **kwargs):
        kept.append(inner(*args, **kwargs))
        return kept[0]

    model.run_backbone = keep
    try:
        return model(**inputs, output_hidden_states=True), kept[0]
    finally:
        del model.run_backbone


def _width(expected: dict[str, Tensor], layout: SequenceLayout) -> int:
    """Positions that the oracle keeps per row."""
    return expected["layers.0.router_indices"].shape[0] // layout.rows


def _aligned_positions(expected: dict[str, Tensor], inputs: dict[str, Tensor], layout: SequenceLayout) -> Tensor:
    """For packed rows the oracle moves every document to the next multiple of the largest ratio (2 in all cases)."""
    if "seq_lens" not in inputs:
        return layout.flatten(torch.arange(layout.rows * layout.row_length).view(layout.rows, -1))
    places, width = [], _width(expected, layout)
    for row, lengths in enumerate(inputs["seq_lens"].tolist()):
        at = 0
        for length in filter(None, lengths):
            places.append(row * width + at + torch.arange(length))
            at += length + length % 2
    return torch.cat(places)
