"""Rotation and rounding in one kernel: rounding bit for bit, also on the golden data; rotation as the plain one."""

from __future__ import annotations

import pytest
import torch
from compare import assert_equal, leaves
from golden_files import golden
from safetensors.torch import load_file

from model.quantize import fake_quant_fp4, fake_quant_fp8, fake_quant_mxfp4
from model.rope import rotate, rotations

pytest.importorskip("triton", reason="the package triton is not installed: pip install 'narrows[kernels]'")
from model.kernels import rope as fast  # noqa: E402

PLAIN = {"fp8": fake_quant_fp8, "mxfp4": fake_quant_mxfp4, "fp4": fake_quant_fp4}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also tells -0 from 0."""
    kind = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[b.dtype]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def phasors(tokens: int, width: int, device: str) -> torch.Tensor:
    frequencies = torch.logspace(0, -4, width // 2)
    return rotations(torch.arange(tokens) * 37, frequencies).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 16), (5, 3, 20), (40, 2, 64), (3, 512)], ids=str)
def test_rotation(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    (x,) = leaves(shape, device=device)
    turns = phasors(shape[0], 8, device)
    for inverse in (False, True):
        ours, theirs = fast.rotate(x.to(dtype), turns, inverse), rotate(x.to(dtype), turns, inverse)
        if dtype == torch.float32:
            assert_equal((ours,), (theirs,), [x])
        else:  # a rounding edge may lie between them
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PLAIN)
def test_fused_rounding_is_that_of_what_was_rotated(name: str, dtype: torch.dtype, device: str) -> None:
    for shape in ((1, 32), (7, 2, 72), (9, 12)):
        (x,) = leaves(shape, device=device, seed=3)
        x, turns = (30 * x.detach()).to(dtype), phasors(shape[0], 8, device)
        assert same_bits(fast.rotate(x, turns, rounding=name), PLAIN[name](fast.rotate(x, turns)))


@pytest.mark.parametrize("name", PLAIN)
def test_rounding_of_adversarial_inputs(name: str, device: str) -> None:
    """Ties, scale ties, subnormals, values to 3e27, partial groups: the golden inputs, fp32 and bf16."""
    for kind, x in load_file(golden("detail/quant") / "inputs.safetensors").items():
        for wide in (x.to(device), x.to(device).bfloat16()):
            assert same_bits(fast.rotate(wide, None, rounding=name), PLAIN[name](wide)), kind


@pytest.mark.parametrize("name", PLAIN)
def test_rounding_of_all_magnitudes(name: str, device: str) -> None:
    """Every exponent, and neighbours of every tie of both grids."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=generator) * torch.exp2(torch.randint(-40, 40, (64, 64), generator=generator))
    grid = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 448.0, 17.0, 2**-10, 3 * 2**-10, 0.0])
    ties = torch.stack([grid, torch.nextafter(grid, grid + 1), torch.nextafter(grid, grid - 1), -grid]).flatten()
    edges = torch.cat([ties, torch.zeros(64 - len(ties))])[None].repeat(2, 1)
    edges[:, 31::32] = torch.tensor([[6.0], [448.0]])  # the peaks set the scales
    for values in (x, edges):
        assert same_bits(fast.rotate(values.to(device), None, rounding=name).cpu(), PLAIN[name](values))


def test_gradient_passes_the_rounding(device: str) -> None:
    (x,) = leaves((6, 2, 64), device=device)
    turns = phasors(6, 16, device)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(device)
    (ours,) = torch.autograd.grad(fast.rotate(x, turns, rounding="fp8"), x, upstream)
    (theirs,) = torch.autograd.grad(fake_quant_fp8(rotate(x, turns)), x, upstream)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    (alone,) = torch.autograd.grad(fast.rotate(x, None, rounding="fp8"), x, upstream)
    assert torch.equal(alone, upstream)


def test_operator_holds_what_pytorch_asks_of_it(device: str) -> None:
    (x,) = leaves((3, 2, 16), device=device)
    turns = phasors(3, 8, device)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(fast._rotate, (x, turns, False, "fp4"), test_utils=checks)
