"""Quantisation-aware training of weights: the forward pass uses weights rounded as the released checkpoint stores them,
and the gradient of a rounded weight goes unchanged to the weight itself, which stays fp32.

Three options of `ForwardOptions` switch the rounding on, each for one kind of weight: `expert_quant` for routed experts
(MXFP4), `dense_quant` for dense projections (FP8) and `engram_quant` for the rows of Engram tables (FP8). With all
three, the export of a model in the released format gives the same logits as the model, bit for bit in fp32, because the
export keeps all other parameters in fp32.
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ForwardOptions
from model.packed import PackedWeight
from model.quantize import FP8_TILES, Packing, round_weight


class Rounds:
    """Base class of modules that have weights which the released checkpoint stores quantised.

    packing: the quantised format of the weights; option: the field of `ForwardOptions` that switches their rounding on;
    rounding: whether their rounding is on.
    """

    packing: ClassVar[Packing] = FP8_TILES
    option: ClassVar[str] = "dense_quant"
    rounding = False

    def rounded(self, weight: Tensor) -> Tensor:
        """The values of `weight` that the forward pass uses. A packed weight is returned unchanged, because its values
        are already rounded.
        """
        if not self.rounding or isinstance(weight, PackedWeight):
            return weight
        return round_weight(weight, self.packing)


class Linear(nn.Linear, Rounds):
    """A linear layer whose weight the released checkpoint stores as FP8."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.rounded(self.weight), self.bias)


def set_rounding(model: nn.Module, runtime: ForwardOptions) -> None:
    """Switch the rounding of every weight in `model` on or off, as `runtime` says."""
    for module in model.modules():
        if isinstance(module, Rounds):
            module.rounding = getattr(runtime, module.option)
