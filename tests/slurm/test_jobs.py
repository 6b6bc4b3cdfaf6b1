"""Whole jobs on this machine: the real health check and a real toy run, two ranks each, started by the stub."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
KEY = "0123456789abcdef" * 2 + "89abcdef"
STEP_TOKENS = 4 * 64
STOPS = ((0, 3, "warn"), (1, 7, "preempt"))
WAITING = """#!/bin/bash
case "$1 $2 ${{SLURM_RESTART_COUNT:-0}}" in
  "-m train 0") shift 2; set -- tests/at_step.py 4 wait "$@" ;;
  "-m train 1") shift 2; set -- tests/at_step.py 8 wait "$@" ;;
esac
exec {python} "$@"
"""


@pytest.fixture
def real(cluster):
    """Ranks that run this environment's own Python."""
    cluster.environment["NARROWS_VENV"] = sys.prefix
    return cluster


@pytest.fixture
def toy(tmp_path: Path) -> list[str]:
    """Twelve steps of the tiny model by two ranks."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name in ("abc", "bisect", "copy", "glob", "heapq", "queue", "shlex", "string", "textwrap", "token"):
        text = Path(os.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        (corpus / f"{name}.txt").write_text(text, encoding="utf-8")
    return [
        "model=tiny",
        "data.source=text",
        f"data.paths=[{corpus}]",
        f"data.validation_paths=[{corpus}/token.txt]",
        f"data.cache_dir={tmp_path}/cache",
        "data.validation_rows=4",
        f"task.tokens={12 * STEP_TOKENS - 64}",
        "task.seq_len=64",
        "task.micro_batch=2",
        "task.global_batch_rows=4",
        "task.eval_every=100",
        "task.sample_tokens=0",
        "optim.schedule.warmup_steps=2",
        "checkpoint.every=1000",
        "logger=wandb",
        "parallel.device=cpu",
        "parallel.world_size=2",
        "parallel.expert_parallel=2",
        "parallel.table_shards=2",
        f"output={tmp_path}/runs",
    ]


def losses(directory: Path) -> list[tuple]:
    records = map(json.loads, (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(record["kind"], record["step"], record["tokens"], record["loss"]) for record in records]


def test_a_preempted_run_ends_like_one_that_was_not(real, toy: list[str], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    environment = {"WANDB_API_KEY_FILE": str(key), "WANDB_MODE": "offline", "HOME": str(tmp_path)}
    whole = real.submit("name=whole", *toy, **environment)
    assert whole.code == 0, whole.log
    (tmp_path / "slurm-4242.log").unlink()
    python = tmp_path / "venv" / "bin" / "python"  # where the runs of the first two starts wait for their signal
    python.parent.mkdir(parents=True)
    python.write_text(WAITING.format(python=sys.executable))
    python.chmod(0o755)
    events = [{"start": start, "seen": [f"\n0: step={step} "], "do": what} for start, step, what in STOPS]
    parts = real.submit("name=parts", *toy, events=events, NARROWS_VENV=str(tmp_path / "venv"), **environment)
    assert parts.code == 0, parts.log
    for text in ("Stopped by SIGUSR1 after step 4", "Stopped by SIGTERM after step 8", "start 2 on localhost node2"):
        assert text in parts.log, parts.log
    assert parts.log.count("requeueing") == 2 and parts.log.count("continuing from") == 2
    assert losses(tmp_path / "runs" / "parts") == losses(tmp_path / "runs" / "whole")
    run = tmp_path / "runs" / "parts"
    identity = (run / "wandb_id").read_text().strip()
    assert [path.name.rsplit("-", 1)[1] for path in (run / "wandb").glob("offline-run-*")] == [identity] * 3
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != key]
    assert not [path for path in written if KEY.encode() in path.read_bytes()], "a secret was written"


def test_the_health_check_passes_on_healthy_nodes(real) -> None:
    log = real.submit(health_only(real)).log
    for node in ("localhost", "node2"):
        assert f"PASS node={node} check=all-reduce: 4 MiB over 2 tasks in " in log, log
        assert f"PASS node={node} check=clock: " in log
    assert "healthcheck: PASS (localhost node2)" in log


def test_a_clock_that_is_wrong_is_named(real, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "if os.environ.get('SLURMD_NODENAME') == 'node2':\n"
        "    now = time.time\n"
        "    time.time = lambda: now() + 5\n"
    )
    log = real.submit(health_only(real), PYTHONPATH=str(tmp_path)).log
    for said, seconds in (("PASS node=localhost", 0), ("FAIL node=node2", 5)):
        found = re.search(rf"{said} check=clock: (\S+) s", log)
        assert found and float(found[1]) == pytest.approx(seconds, abs=0.5), log
    assert "healthcheck: FAIL (node2)" in log


def test_a_node_that_does_not_answer_is_named(real, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nif os.environ.get('SLURMD_NODENAME') == 'node2':\n    time.sleep(30)\n    os._exit(1)\n"
    )
    log = real.submit(health_only(real), PYTHONPATH=str(tmp_path), NARROWS_HEALTH_TIMEOUT_S="30").log
    assert "FAIL node=node2 check=all-reduce: 0 of its tasks reported within 30 s" in log, log
    assert "SKIP node=localhost check=all-reduce: not tried" in log and "healthcheck: FAIL (node2)" in log


def test_gpus_that_cannot_be_used_are_named(real) -> None:
    if __import__("torch").cuda.is_available():
        pytest.skip("this machine has GPUs")
    gpus = {"NARROWS_GPUS_PER_NODE": "2", "STUB_GPUS": '{"localhost": 2, "node2": 2}'}
    log = real.submit(health_only(real), **gpus).log
    for node in ("localhost", "node2"):
        assert f"PASS node={node} check=gpus: 2 of 2" in log
        assert f"FAIL node={node} check=all-reduce: rank {int(node == 'node2')}: no usable GPU for local task 0" in log
    assert "failed on no node in particular" in log


def health_only(cluster) -> str:
    """An argument with which the training itself ends at once; a node at fault is not replaced."""
    cluster.environment["NARROWS_MAX_REQUEUES"] = "0"
    return "--help"
