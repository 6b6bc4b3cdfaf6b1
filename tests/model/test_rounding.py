"""Weights rounded in training as the released checkpoint stores them: the values of the file, the gradient of a copy,
and logits that the export has too, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import gradients, tiny_model, tokens

from model import ForwardOptions, load_pretrained, save_pretrained
from model.build import build_model
from model.checkpoint.load import parameter_packing
from model.quantize import FP4_ROWS, FP8_ROWS, FP8_TILES, Packing, pack, round_weight, unpack

ALL = {"expert_quant": True, "dense_quant": True, "engram_quant": True}


def batch() -> dict[str, torch.Tensor]:
    ids = tokens(2, 24)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("packing", [FP4_ROWS, FP8_TILES, FP8_ROWS])
def test_the_values_are_those_of_the_file_and_the_gradient_passes_unchanged(packing: Packing) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(45, 70, generator=draw) * torch.logspace(-6, 4, 45)[:, None]  # partial tiles, tiny and large
    weight.requires_grad_()
    rounded = round_weight(weight, packing)
    assert torch.equal(rounded, unpack(*pack(weight.detach(), packing), packing))
    assert not torch.equal(rounded, weight) and torch.equal(round_weight(rounded, packing), rounded)
    slope = torch.randn(45, 70, generator=draw)
    (rounded * slope).sum().backward()
    assert torch.equal(weight.grad, slope)


def test_a_stack_is_rounded_matrix_by_matrix() -> None:
    stack = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(0))
    each = torch.stack([unpack(*pack(matrix, FP4_ROWS), FP4_ROWS) for matrix in stack])
    assert torch.equal(round_weight(stack, FP4_ROWS), each)
    with pytest.raises(ValueError, match=r"stack \[3, 5, 40\]"):
        round_weight(stack, FP8_TILES)


def test_the_export_has_the_logits_of_the_model_bit_for_bit(tmp_path: Path, monkeypatch) -> None:
    """With all three roundings, of which each is needed; the export is read unpacked and packed."""
    data, built = batch(), tiny_model(ForwardOptions(**ALL), engram=True)
    save_pretrained(built, tmp_path / "export", format="released")
    monkeypatch.setattr("model.checkpoint.load.read_token_map", lambda *_: built.token_map)
    with torch.no_grad():
        logits = built(**data).logits
        for packed in (False, True):
            assert torch.equal(logits, load_pretrained(tmp_path / "export", packed=packed)(**data).logits)
        for left_out in ALL:
            other = tiny_model(ForwardOptions(**{**ALL, left_out: False}), engram=True)
            assert not torch.equal(logits, other(**data).logits), left_out


def test_each_option_rounds_the_weights_of_its_kind() -> None:
    """Every weight that the released layout stores quantised, and no other: a model whose weights were rounded before
    gives the same as one that rounds them.
    """
    kinds = {"expert_quant": FP4_ROWS, "dense_quant": FP8_TILES, "engram_quant": FP8_ROWS}
    for option, packing in kinds.items():
        rounds = tiny_model(ForwardOptions(**{option: True}), engram=True)
        before = tiny_model(engram=True)
        found = 0
        with torch.no_grad():
            for name, parameter in before.named_parameters():
                if parameter_packing(name) == packing:
                    parameter.copy_(round_weight(parameter, packing))
                    found += 1
            assert found and torch.equal(rounds(**batch()).logits, before(**batch()).logits), option


@pytest.mark.parametrize("autocast", [False, True])
def test_recomputation_gives_the_gradients_of_the_rounded_weights(autocast: bool) -> None:
    """Those that a model with weights rounded before has, for the weights of the rounding model; all equal in bits."""
    data, found = batch(), []
    before = tiny_model(engram=True)
    with torch.no_grad():
        for name, parameter in before.named_parameters():
            if packing := parameter_packing(name):
                parameter.copy_(round_weight(parameter, packing))
    models = [tiny_model(ForwardOptions(recompute=recompute, **ALL), engram=True) for recompute in (False, True)]
    for built in (before, *models):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            total = built.losses(**data, denominators=built.loss_denominators(**data)).total
        total.backward()
        found.append((total.detach(), gradients(built)))
    for total, grads in found[1:]:
        assert torch.equal(total, found[0][0])
        assert all(torch.equal(gradient, found[0][1][name]) for name, gradient in grads.items())


def test_a_teacher_has_no_rounding() -> None:
    options = ForwardOptions(recompute=True, **ALL)
    assert options.without_weight_rounding() == ForwardOptions(recompute=True)
    built = build_model(tiny_model().config, runtime=options.without_weight_rounding(), device="meta")
    assert not any(getattr(module, "rounding", False) for module in built.modules())
