"""What `parallel.precision=auto` becomes, and that runs saved before it existed continue."""

from __future__ import annotations

import pytest
import torch

from train.build import build
from train.config.problems import ConfigError
from train.config.resume import check_resumable
from train.config.schema import to_dict
from train.distributed.world import settle_precision


@pytest.mark.parametrize("has_bf16", [True, False])
def test_auto_is_bf16_on_a_gpu_that_has_it(make_config, monkeypatch, has_bf16: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bf16)
    on_gpu = "bf16" if has_bf16 else "fp32"
    for device, given, wanted in (
        ("cpu", "auto", "fp32"),
        ("cuda", "auto", on_gpu),
        ("cpu", "bf16", "bf16"),
        ("cuda", "fp32", "fp32"),
    ):
        config = make_config(f"parallel.precision={given}")
        settled = settle_precision(config, torch.device(device))
        assert settled.parallel.precision == wanted
        assert settled.with_precision("bf16") == settled


def test_a_run_computes_in_what_it_saves(make_config) -> None:
    run = build(make_config())
    assert make_config().parallel.precision == "auto" and run.config.parallel.precision == "fp32"
    with run.autocast():
        assert not torch.is_autocast_enabled("cpu")
    with build(make_config("parallel.precision=bf16")).autocast():
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16 and torch.is_autocast_enabled("cpu")


def test_a_run_saved_in_fp32_continues_with_auto_on_a_cpu(make_config) -> None:
    config = make_config()
    saved = to_dict(config.with_precision("fp32"))
    assert check_resumable(saved, settle_precision(config, torch.device("cpu"))) == []
    with pytest.raises(ConfigError, match="parallel.precision"):
        check_resumable(saved, config.with_precision("bf16"))
