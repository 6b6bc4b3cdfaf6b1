"""The three fake quantisers: bit for bit as two other implementations, and a straight-through gradient."""

from __future__ import annotations

import pytest
import torch
from golden_files import golden
from safetensors.torch import load_file

from model.quantize import (
    KV_INDEX,
    KV_MAIN,
    KV_WINDOW,
    fake_quant_fp4,
    fake_quant_fp8,
    fake_quant_mxfp4,
    round_e2m1,
)

FORMATS = {"fp8": fake_quant_fp8, "mxfp4": fake_quant_mxfp4, "nvfp4": fake_quant_fp4}
GROUP = {"fp8": 32, "mxfp4": 32, "nvfp4": 16}
STORED = {"fp8": KV_WINDOW, "mxfp4": KV_INDEX, "nvfp4": KV_MAIN}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also tells -0 from 0."""
    kind = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[b.dtype]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@pytest.mark.parametrize("name", FORMATS)
def test_bit_exact(name: str) -> None:
    data = load_file(golden("quant") / "quant.safetensors")
    assert same_bits(FORMATS[name](data["x"]), data[f"{name}_{GROUP[name]}"])


@pytest.mark.parametrize("name", FORMATS)
def test_bit_exact_on_adversarial_inputs(name: str) -> None:
    """Ties, scale ties, subnormals, values to 3e27, partial groups; from fp32 and from bf16."""
    inputs = load_file(golden("detail/quant") / "inputs.safetensors")
    expected = load_file(golden("detail/quant") / "expected_nemo.safetensors")
    assert len(inputs) == 15
    for kind, x in inputs.items():
        assert same_bits(FORMATS[name](x), expected[f"{kind}.{name}"]), kind
        assert same_bits(FORMATS[name](x.bfloat16()), expected[f"{kind}.{name}_from_bf16"]), kind


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_passes_unchanged_also_where_clipped(name: str, dtype: torch.dtype) -> None:
    """FP4 main KV clips groups above 448 * 6 = 2688."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] *= 1e4
    x.requires_grad_()
    upstream = torch.randn(4, 64).to(dtype)
    out = FORMATS[name](x)
    assert not torch.equal(out, x)
    if name == "nvfp4":
        assert out.abs().max() == 2688 < x.abs().max()
    out.backward(upstream)
    assert torch.equal(x.grad, upstream)


@pytest.mark.parametrize("name", FORMATS)
def test_a_group_does_not_see_its_neighbours(name: str) -> None:
    size = GROUP[name]
    x = torch.randn(3, 2 * size, generator=torch.Generator().manual_seed(1))
    louder = x.clone()
    louder[:, size:] *= 100
    assert torch.equal(FORMATS[name](x)[:, :size], FORMATS[name](louder)[:, :size])


def test_e2m1_takes_the_nearest_and_ties_go_to_the_even_mantissa() -> None:
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert torch.equal(round_e2m1(levels), levels)
    middles = (levels[1:] + levels[:-1]) / 2
    assert round_e2m1(middles).tolist() == [0, 1, 1, 2, 2, 4, 4]
    for sign in (1, -1):
        x = sign * torch.linspace(0, 8, 1001)
        distance = (round_e2m1(x)[:, None] - sign * levels).abs().min(1).values
        assert distance.max() == 0
        nearest = (x[:, None] - sign * levels).abs().min(1).values
        assert torch.equal((x - round_e2m1(x)).abs(), nearest)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_storage_is_what_the_fake_quantiser_gives(name: str, dtype: torch.dtype) -> None:
    """Bit for bit, on everyday and on adversarial values; and what is rounded already packs without loss (but for FP4
    with an E4M3 scale, where it need not: main KV is packed before it is rounded).
    """
    stored = STORED[name]
    inputs = load_file(golden("detail/quant") / "inputs.safetensors")
    inputs["random"] = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 3
    for kind, x in inputs.items():
        x = x.reshape(-1, x.shape[-1]).to(dtype)
        rounded = FORMATS[name](x)
        codes, scales = stored.pack(x)
        assert (codes.shape[1], scales.shape[1]) == stored.widths(x.shape[1])
        assert (codes.dtype, scales.dtype) == (stored.codes, stored.scale)
        assert same_bits(stored.unpack(codes, scales, x.shape[1], dtype), rounded), kind
        if name != "nvfp4" or kind == "random":
            again = stored.unpack(*stored.pack(rounded), x.shape[1], dtype)
            assert same_bits(again, rounded), kind
