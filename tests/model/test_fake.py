"""Fake tensors have shapes, dtypes and devices, but no values: what reads a value, or mixes devices, raises.

They show without a GPU that a training step decides nothing by values on the device.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_model, tokens
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from model import ForwardOptions


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["plain", "triton"])
def test_a_training_step_reads_no_values(kernels: str) -> None:
    """Of every kind of layer, with Engram, packed documents, recomputation and autocast, forward and backward."""
    built = tiny_model(ForwardOptions(recompute=True, kernels=kernels), engram=True, hc_sinkhorn_iters=2)
    ids = tokens(2, 21)
    batch = {"input_ids": ids, "labels": ids, "seq_lens": torch.tensor([[9, 12], [1, 18]])}
    batch["layout"] = built.lay_out(**batch)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16):
        losses = built.losses(**batch, denominators=built.loss_denominators(**batch))
        losses.total.backward()
        with pytest.raises(DataDependentOutputException):
            losses.total.item()
    for name, grad in gradients_of(built).items():
        parameter = built.get_parameter(name)
        assert grad == (parameter.shape, parameter.dtype), name
    assert losses.expert_load.shape == (6, 2, 4)


def gradients_of(built: torch.nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    missing = [name for name, p in built.named_parameters() if p.grad is None]
    assert not missing, f"no gradient: {missing}"
    return {name: (p.grad.shape, p.grad.dtype) for name, p in built.named_parameters()}


@pytest.mark.slow
def test_the_forward_pass_keeps_to_its_device() -> None:
    """On fake CUDA tensors, in a process of its own, since methods of tensors are replaced there."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "tests.model.fake_cuda"]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("device='cuda:0'") == 2
