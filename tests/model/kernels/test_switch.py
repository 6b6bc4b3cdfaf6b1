"""Which implementation runs, and that nothing needs Triton before a kernel is wanted."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from model.kernels.switch import in_triton, kernels_problem, using


def test_setting_decides() -> None:
    on_cpu = torch.ones(1)
    for setting, expected in (("auto", False), ("plain", False), ("triton", True)):
        with using(setting):
            assert in_triton(on_cpu) is expected
            with using("plain"):
                assert not in_triton(on_cpu)
            assert in_triton(on_cpu) is expected


def test_setting_is_restored_after_an_error() -> None:
    with using("plain"):
        with pytest.raises(RuntimeError), using("triton"):
            raise RuntimeError
        assert not in_triton(torch.ones(1))


def test_problems_are_named(monkeypatch) -> None:
    assert "'fast' is unknown" in kernels_problem("fast")
    assert kernels_problem("auto") is None and kernels_problem("plain") is None
    monkeypatch.setattr("model.kernels.switch.installed", lambda: False)
    assert "narrows[kernels]" in kernels_problem("triton")
    assert kernels_problem("auto") is None


def test_the_model_needs_no_triton() -> None:
    program = "import sys; sys.modules['triton'] = None; import model; print(model.build_model.__name__)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
