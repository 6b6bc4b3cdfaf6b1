"""Helpers for code that must control the dtypes of matrix products."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def without_autocast(function: Callable) -> Callable:
    """Decorate `function` so that it runs with autocast off on the device of its first tensor argument.

    Under autocast, a matrix product of fp32 tensors would silently be computed in bf16.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        tensor = next(a for a in _flat(args) if isinstance(a, Tensor))
        with torch.autocast(tensor.device.type, enabled=False):
            return function(*args, **kwargs)

    return run


def for_products(x: Tensor, weight: Tensor) -> Tensor:
    """Cast x to the dtype of `weight` for a matrix product. Under autocast x is returned unchanged, because autocast
    casts the operands of matrix products itself.
    """
    return x if torch.is_autocast_enabled(x.device.type) else x.to(weight.dtype)


def _flat(args: tuple[Any, ...]):
    for a in args:
        yield from a if isinstance(a, tuple) else (a,)
