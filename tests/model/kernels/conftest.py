"""Kernels run where there is a GPU, else in Triton's interpreter, which tests/conftest.py has switched on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from model.kernels.switch import using

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for `compare`


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def plain_reference():
    """What kernels are compared with is the plain code on any device."""
    with using("plain"):
        yield
