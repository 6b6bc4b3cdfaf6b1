"""What the usual ways of writing it would make a GPU's host wait for: constants from lists, counts, checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Constant:
    """Numbers that are needed as a tensor on the devices of other tensors; made once a device."""

    def __init__(self, values: Sequence[Any], dtype: torch.dtype):
        self._values, self._dtype = values, dtype
        self._made: dict[torch.device, Tensor] = {}

    def on_device_of(self, x: Tensor) -> Tensor:
        """The tensor, which nobody may write to, on the device of x."""
        if type(x) not in (Tensor, nn.Parameter):  # a fake tensor, of which none may outlive its mode
            return self._make(x.device)
        if x.device not in self._made:
            self._made[x.device] = self._make(x.device)
        return self._made[x.device]

    def _make(self, device: torch.device) -> Tensor:
        return torch.tensor(self._values, dtype=self._dtype, device=device)


def count_ids(ids: Tensor, size: int) -> Tensor:
    """int64 [size]: how often each of 0..size-1 occurs in ids. Exact, since integers add up in any order."""
    ids = ids.flatten()
    return ids.new_zeros(size).scatter_add_(0, ids, torch.ones_like(ids))


class Watched(nn.Module):
    """A module that checks what other ranks send. What it finds stays on the device until `raise_faults` reads it.

    fault int64 [5]: of the first check that failed since then, wrong rows, rows, and three numbers that `complain` puts
    into words; None: nothing was checked.
    """

    fault: Tensor | None = None

    def note(self, wrong: Tensor, *evidence: Tensor) -> None:
        """wrong bool [R], evidence: up to three int64 [R], of which the first wrong row is kept."""
        if not len(wrong):
            return
        at = wrong.int().argmax().reshape(1)  # the first, if there is any
        rest = [wrong.new_zeros(3 - len(evidence), dtype=torch.int64)] if len(evidence) < 3 else []
        size = torch.full_like(at, len(wrong))
        found = torch.cat([wrong.sum().reshape(1), size, *(x.index_select(0, at) for x in evidence), *rest])
        self.fault = found if self.fault is None else torch.where(self.fault[:1] > 0, self.fault, found)

    def complain(self, wrong: int, rows: int, evidence: list[int]) -> str:
        raise NotImplementedError


def raise_faults(model: nn.Module) -> None:
    """Raise RuntimeError if what other ranks sent since the last call was not what they had announced. Waits for the
    device: once a step.
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
