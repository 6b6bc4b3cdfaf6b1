"""Counts on the CPU what a GPU would be asked to launch, and what its host would wait for."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that only allocate, or only rename memory without an alias annotation that says so.
LAUNCH_NOTHING = {
    "aten::_unsafe_view",
    "aten::detach",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::is_same_size",
    "aten::lift_fresh",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::set_",
    "prim::device",
}
# Operations whose result, or its size, the host must know; `lift_fresh` is a tensor made from a list.
WAIT = {
    "aten::_local_scalar_dense",
    "aten::_unique",
    "aten::_unique2",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::lift_fresh",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
# The same of methods that reach no operation on the CPU.
WAITING_METHODS = ("tolist", "numpy", "cpu")


class Launches:
    """launched: operations by name that launch something. launched_in: the same by (module, name), where layers have
    no numbers; the module is that whose forward or recomputation runs, or "" (`name_modules`). waited: by name, what
    would wait, while `watching`; with `blocks_only` only inside the forward of a block.
    """

    def __init__(self) -> None:
        self.launched: Counter[str] = Counter()
        self.launched_in: Counter[tuple[str, str]] = Counter()
        self._modules = [""]
        self.waited: Counter[str] = Counter()
        self.blocks_only, self._inside = False, 0

    @property
    def watching(self) -> bool:
        return not self.blocks_only or self._inside > 0

    @property
    def total(self) -> int:
        return self.launched.total()

    @contextmanager
    def counting(self) -> Iterator[Launches]:
        with pytest.MonkeyPatch.context() as patch, _Operations(self):
            for name in WAITING_METHODS:
                patch.setattr(torch.Tensor, name, self._noting(name, getattr(torch.Tensor, name)))
            yield self

    def _noting(self, name: str, method: Callable) -> Callable:
        def noted(*args, **kwargs):
            if self.watching:
                self.waited[name] += 1
            return method(*args, **kwargs)

        return noted

    def watch_blocks_only(self, blocks: nn.ModuleList) -> None:
        """Set `blocks_only`, of these blocks."""
        self.blocks_only = True
        for block in blocks:
            block.register_forward_pre_hook(lambda *_: self._enter(1))
            block.register_forward_hook(lambda *_: self._enter(-1))

    def _enter(self, by: int) -> None:
        self._inside += by

    def name_modules(self, model: nn.Module) -> None:
        """Fill `launched_in`. Hooks run also where a recomputation is cut short by an exception."""
        for name, module in model.named_modules():
            plain = re.sub(r"\.\d+", "", name)
            module.register_forward_pre_hook(lambda *_, plain=plain: self._modules.append(plain))
            module.register_forward_hook(lambda *_: self._modules.pop() and None, always_call=True)

    def note(self, name: str) -> None:
        self.launched[name] += 1
        self.launched_in[self._modules[-1], name] += 1


KERNELS = ("engram", "hyper", "indexer", "moe", "norm", "rope", "sparse", "sums")


class _Zeros:
    """The module torch, whose empty tensors are zero."""

    empty, empty_like = staticmethod(torch.zeros), staticmethod(torch.zeros_like)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def kernels_give_zeros(patch: pytest.MonkeyPatch) -> None:
    """Let Triton kernels run nothing and their operators return zeros, so that code with kernels runs on real tensors
    anywhere; each operator is still one operation.
    """
    for name in KERNELS:
        module = importlib.import_module(f"model.kernels.{name}")
        patch.setattr(module, "launch", lambda *_, **__: None)
        patch.setattr(module, "torch", _Zeros())
    patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)


class _Operations(TorchDispatchMode):
    def __init__(self, launches: Launches):
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(self, function, types, args: tuple = (), kwargs: dict[str, Any] | None = None):
        name, launches = function._schema.name, self.launches
        if not function.is_view and name not in LAUNCH_NOTHING:
            launches.note(name)
        if launches.watching and _waits(name, args, kwargs or {}):
            launches.waited[name] += 1
        return function(*args, **(kwargs or {}))


def _waits(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    if name == "aten::repeat_interleave" and isinstance(args[0], torch.Tensor):
        return kwargs.get("output_size") is None
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return name in WAIT
