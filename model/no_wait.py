"""Constants, counts and checks that avoid the host-device synchronisation of the usual PyTorch functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Constant:
    """A constant tensor that is created once on each device where it is needed."""

    def __init__(self, values: Sequence[Any], dtype: torch.dtype):
        self._values, self._dtype = values, dtype
        self._made: dict[torch.device, Tensor] = {}

    def on_device_of(self, x: Tensor) -> Tensor:
        """The constant on the device of x; the returned tensor must not be modified."""
        if type(x) not in (Tensor, nn.Parameter):  # a fake tensor, which must not be kept after its mode ends
            return self._make(x.device)
        if x.device not in self._made:
            self._made[x.device] = self._make(x.device)
        return self._made[x.device]

    def _make(self, device: torch.device) -> Tensor:
        return torch.tensor(self._values, dtype=self._dtype, device=device)


def count_ids(ids: Tensor, size: int) -> Tensor:
    """The number of occurrences of each of 0..size-1 in ids, int64 [size]. The result is deterministic, because integer
    sums do not depend on the order.
    """
    ids = ids.flatten()
    return ids.new_zeros(size).scatter_add_(0, ids, torch.ones_like(ids))


class Watched(nn.Module):
    """A module that checks the data received from other ranks. The result of a check stays on the device until
    `raise_faults` reads it.

    fault int64 [5]: the first failed check since the last `raise_faults`, described by the number of wrong rows, the
    number of all rows, and three values that `complain` turns into a message. fault is None if nothing was checked.
    """

    fault: Tensor | None = None

    def note(self, wrong: Tensor, *evidence: Tensor) -> None:
        """Record the result of a check: wrong bool [R] marks the wrong rows. evidence: up to three tensors int64 [R],
        whose values at the first wrong row are recorded for the error message.
        """
        if not len(wrong):
            return
        at = wrong.int().argmax().reshape(1)  # the first wrong row, if there is one
        rest = [wrong.new_zeros(3 - len(evidence), dtype=torch.int64)] if len(evidence) < 3 else []
        size = torch.full_like(at, len(wrong))
        found = torch.cat([wrong.sum().reshape(1), size, *(x.index_select(0, at) for x in evidence), *rest])
        self.fault = found if self.fault is None else torch.where(self.fault[:1] > 0, self.fault, found)

    def complain(self, wrong: int, rows: int, evidence: list[int]) -> str:
        raise NotImplementedError


def raise_faults(model: nn.Module) -> None:
    """Raise RuntimeError if data received from other ranks since the last call did not match the announced counts. The
    function waits for the device, so call it only once per step.
    """
    found = [(m, m.fault) for m in model.modules() if isinstance(m, Watched) and m.fault is not None]
    if not found:
        return
    faults = torch.stack([fault for _, fault in found]).tolist()
    for module, _ in found:
        module.fault = None
    for (module, _), (wrong, rows, *evidence) in zip(found, faults, strict=True):
        if wrong:
            raise RuntimeError(module.complain(wrong, rows, evidence))
