"""Counts what a GPU would be asked to launch, and where it would be waited for, on a CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that only allocate, or only rename memory without an alias annotation that says so.
LAUNCH_NOTHING = {
    "aten::empty.memory_format",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::_unsafe_view",
    "aten::is_same_size",
    "aten::detach",
    "aten::lift_fresh",
    "aten::set_.source_Storage_storage_offset",
}
# Operations whose result, or its size, the host must know; `lift_fresh` is a tensor made from a list.
WAIT = {
    "_local_scalar_dense",
    "bincount",
    "equal",
    "is_nonzero",
    "lift_fresh",
    "masked_select",
    "nonzero",
    "_unique",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
}


class Launches(TorchDispatchMode):
    """`launched`: operations by name that launch something. `waited`: by name, operations for which a GPU's host would
    wait, counted while `watching`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.waited: Counter[str] = Counter()
        self.watching = True

    @property
    def total(self) -> int:
        return self.launched.total()

    def __torch_dispatch__(self, function, types, args: tuple = (), kwargs: dict[str, Any] | None = None):
        name = function._schema.name + (f".{function._overloadname}" if function._overloadname != "default" else "")
        if not function.is_view and name not in LAUNCH_NOTHING:
            self.launched[name] += 1
        if self.watching and _waits(function, args, kwargs or {}):
            self.waited[name] += 1
        return function(*args, **(kwargs or {}))


def _waits(function, args: tuple, kwargs: dict[str, Any]) -> bool:
    name = function._schema.name.removeprefix("aten::")
    if name in WAIT:
        return True
    if name == "repeat_interleave" and isinstance(args[0], torch.Tensor):
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return False
