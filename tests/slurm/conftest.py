"""The scripts of ``slurm/`` against Slurm commands that start real processes here (``stub.py``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]

# In the place of a virtual environment's python: what a rank does is the test's own script.
TASK = """#!/usr/bin/env bash
if [[ $1 == slurm/allreduce.py ]]; then
  if [[ " ${BAD_NODES:-} " == *" $SLURMD_NODENAME "* ]]; then
    echo "FAIL node=$SLURMD_NODENAME check=all-reduce: made up"
    exit 1
  fi
  echo "PASS node=$SLURMD_NODENAME check=all-reduce: made up"
  exit 0
fi
start=${SLURM_RESTART_COUNT:-0} rank=$SLURM_PROCID
"""


@dataclass
class Result:
    """What a job left: exit code of its last start, its log, and Slurm's state of it."""

    code: int
    log: str
    state: dict


@dataclass
class Cluster:
    """A place to submit from, with two nodes and a spare one."""

    directory: Path
    environment: dict[str, str]

    def python(self, task: str) -> None:
        """Let every rank run this Bash script instead of ``python``; it may use $start and $rank."""
        path = self.directory / "venv" / "bin" / "python"
        path.parent.mkdir(parents=True)
        path.write_text(TASK + task)
        path.chmod(0o755)
        self.environment["NARROWS_VENV"] = str(path.parent.parent)

    def submit(self, *arguments: str, nodes: int = 2, events: tuple[dict, ...] = (), **environment: str) -> Result:
        """``sbatch slurm/train.sbatch ARGUMENTS``, until the job is over."""
        options = [f"--nodes={nodes}", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1"]
        log = self.directory / "slurm-4242.log"
        command = ["sbatch", *options, f"--output={log}", "slurm/train.sbatch", *arguments]
        given = self.environment | environment | {"STUB_EVENTS": json.dumps(events)}
        done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=1800)
        assert not done.stderr, done.stderr
        state = json.loads((self.directory / "job.json").read_text())
        return Result(done.returncode, log.read_text(), state)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("sbatch", "srun", "scontrol", "nvidia-smi"):
        command = commands / name
        stub = Path(__file__).with_name("stub.py")  # which needs no package: Python starts sooner without them
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -SE "{stub}" {name} "$@"\n')
        command.chmod(0o755)
    kept = {key: os.environ[key] for key in ("HOME", "USER", "LANG", "TMPDIR") if key in os.environ}
    return Cluster(
        tmp_path,
        kept
        | {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "STUB_DIR": str(tmp_path),
            "STUB_JOB": str(free_port() - 10_000),  # which decides the port
            "STUB_NODES": "localhost,node2,node3",
            "NARROWS_HEALTH_DIRS": str(tmp_path),
            "NARROWS_MIN_FREE_GIB": "0",
            "NARROWS_STATE_DIR": str(tmp_path / "state"),
            "NARROWS_HEALTH_TIMEOUT_S": "300",
            "OMP_NUM_THREADS": "1",
        },
    )
