"""Decides whether Triton kernels or plain functions run: `runtime.kernels` = auto | plain | triton."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = ("auto", "plain", "triton")
_setting = "auto"


@contextmanager
def using(setting: str) -> Iterator[None]:
    """A context manager that runs its body with `setting` as the choice of kernels (auto, plain or triton). With
    activation checkpointing, the recomputed block enters this context again, so that both passes use the same
    implementation.
    """
    global _setting
    before, _setting = _setting, setting
    try:
        yield
    finally:
        _setting = before


def in_triton(x: Tensor) -> bool:
    """Returns whether Triton kernels process `x`. With the setting "auto", Triton kernels run on CUDA devices if Triton
    is installed. With the setting "triton", Triton kernels always run; on a CPU, Triton kernels need Triton's slow
    interpreter, which is meant for tests (set TRITON_INTERPRET=1 before the first import of a kernel).
    """
    if _setting == "auto":
        return x.is_cuda and installed()
    return _setting == "triton"


@cache
def installed() -> bool:
    """Returns whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def kernels_problem(setting: str) -> str | None:
    """Returns a text that says why a value of `runtime.kernels` cannot be used, or None if the value is valid."""
    if setting not in SETTINGS:
        return f"{setting!r} is unknown, allowed are {', '.join(map(repr, SETTINGS))}"
    if setting == "triton" and not installed():
        return "'triton' needs the package triton (pip install 'narrows[kernels]', Linux only); use 'auto' or 'plain'"
    return None
