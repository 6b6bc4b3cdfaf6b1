"""The whole model with every kernel against the plain one; the golden case is in tests/model/test_golden.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import assert_same, gradients, no_rounding, tiny_model, tokens  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

from model import ForwardOptions

pytest.importorskip("triton", reason="the package triton is not installed: pip install 'narrows[kernels]'")

# What a step of a model with every mechanism runs, forward and backward.
OPERATORS = {
    "mhc_coefficients",
    "mhc_coefficients_backward",
    "mhc_collapse",
    "mhc_collapse_backward",
    "mhc_expand",
    "mhc_expand_backward",
    "rotate_and_round",
    "sparse_attention",
    "sparse_attention_backward",
    "index_peaks",
    "index_candidate_scores",
    "indexer_loss",
    "rms_norm",
    "rms_norm_backward",
    "clamped_swiglu",
    "clamped_swiglu_backward",
    "engram_gate",
    "engram_gate_backward",
}


class Names(TorchDispatchMode):
    """The names of the project's operators that run."""

    def __init__(self):
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "narrows":
            self.seen.add(function.name().removeprefix("narrows::"))
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_losses_and_gradients(recompute: bool, no_rounding, device: str) -> None:  # noqa: F811
    """Without rounding, whose edges fp32 noise may cross. A recomputed block runs the kernels again."""
    length = 7
    batch = {"input_ids": tokens(1, length).to(device), "seq_lens": torch.tensor([[5, 2]])}
    batch["labels"] = batch["input_ids"]
    found = {}
    for kernels in ("plain", "triton"):
        model = tiny_model(ForwardOptions(kernels=kernels, recompute=recompute), engram=True).to(device)
        if model.token_map is not None:
            model.token_map = model.token_map.to(device)
        denominators = model.loss_denominators(**batch)
        with Names() as names:
            loss = model.losses(**batch, denominators=denominators).total
            loss.backward()
        assert names.seen == (OPERATORS if kernels == "triton" else set())
        found[kernels] = (loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(found["triton"][0], found["plain"][0], atol=1e-5, rtol=1e-5)
    assert_same(found["triton"][1], found["plain"][1], 1e-4)


def test_unknown_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="runtime.kernels: 'fast' is unknown, allowed are 'auto', 'plain', 'triton'"):
        replace(ForwardOptions(), kernels="fast")
