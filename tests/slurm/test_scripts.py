"""What the job scripts do, with ranks that are small Bash scripts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [ROOT / "slurm" / name for name in ("env.sh", "healthcheck.sh", "train.sbatch")]
UNTIL_SIGNAL = "trap 'sleep 0.2; echo saved; exit 75' USR1 TERM\necho ready\nfor i in {1..12000}; do sleep 0.05; done\n"
BOTH_READY = ["0: ready", "1: ready"]
FIRST_START = "if ((start)); then echo resumed; exit 0; fi\n"


def test_shellcheck() -> None:
    command = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([command, "--external-sources", *SCRIPTS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def when(seen: list[str], event: str) -> dict:
    """An event of the job's first start, once its log holds all these texts."""
    return {"start": 0, "seen": seen, "do": event}


# --- env.sh


def source(cluster, script: str, trace: bool = False, **environment: str) -> subprocess.CompletedProcess:
    given = cluster.environment | {"SLURM_JOB_ID": "25001", "SLURM_JOB_NODELIST": "node7,node8"} | environment
    command = ["bash", *(["-x"] if trace else []), "-euo", "pipefail", "-c", f"source slurm/env.sh\n{script}"]
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)


def test_the_first_node_and_the_job_decide_where_ranks_meet(cluster) -> None:
    cluster.python("")
    done = source(cluster, 'echo "$MASTER_ADDR $MASTER_PORT $NARROWS_NODES"', MASTER_ADDR="stale", MASTER_PORT="1")
    assert done.stdout == "node7 15001 node7 node8\n", done.stderr


def test_settings_can_be_given_from_outside(cluster) -> None:
    cluster.python("")
    names = ("OMP_NUM_THREADS", "NCCL_DEBUG", "TRITON_CACHE_DIR", "NARROWS_MAX_REQUEUES", "SRUN_CPUS_PER_TASK")
    show = 'echo "' + " ".join(f"${name}" for name in names) + '"'
    del cluster.environment["OMP_NUM_THREADS"]
    default = source(cluster, show, SLURM_CPUS_PER_TASK="6", TMPDIR="/x", USER="me").stdout
    assert default == "6 WARN /x/narrows-me/triton 100 6\n"
    given = dict.fromkeys(names, "7")
    assert source(cluster, show, SLURM_CPUS_PER_TASK="6", **given).stdout == "7 7 7 7 7\n"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NARROWS_VENV": "/nowhere"}, "error: /nowhere/bin/python does not exist"),
        ({"NARROWS_MODULES": "cuda/13"}, "error: NARROWS_MODULES is set, but there is no command 'module'"),
        ({"SLURM_JOB_NODELIST": ""}, "this is no Slurm job"),
        ({"NARROWS_MAX_REQUEUES": "many"}, "error: NARROWS_MAX_REQUEUES=many is not a number"),
        ({"NARROWS_MAX_FAILURES": "08"}, "error: NARROWS_MAX_FAILURES=08 is not a number"),
        ({"NARROWS_GPUS_PER_NODE": "-1"}, "error: NARROWS_GPUS_PER_NODE=-1 is not a number"),
        ({"NARROWS_MAX_SKEW_S": "1s"}, "error: NARROWS_MAX_SKEW_S=1s is not a number"),
    ],
)
def test_what_is_missing_is_said(cluster, environment: dict[str, str], message: str) -> None:
    cluster.python("")
    done = source(cluster, "echo went on", **environment)
    assert done.returncode != 0 and message in done.stderr and "went on" not in done.stdout


def test_modules_are_loaded(cluster) -> None:
    cluster.python("")
    module = {"BASH_FUNC_module%%": '() { echo "module $*"; }', "NARROWS_MODULES": "cuda/13 nccl"}
    assert source(cluster, "", **module).stdout == "module load cuda/13 nccl\n"


def test_the_key_comes_from_a_file_that_only_its_owner_reads(cluster, tmp_path: Path) -> None:
    cluster.python("")
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    expected = "s3cret"
    for mode, accepted in ((0o600, True), (0o400, True), (0o640, False), (0o604, False)):
        key.chmod(mode)
        done = source(cluster, 'printf %s "$(env | grep ^WANDB_API_KEY=)"', WANDB_API_KEY_FILE=str(key))
        assert (done.returncode == 0) == accepted, oct(mode)
        assert done.stdout == (f"WANDB_API_KEY={expected}" if accepted else ""), "exported to the ranks"
        assert accepted or ("can be read by others" in done.stderr and expected not in done.stderr)
    key.chmod(0o600)
    key.write_text("")
    assert "is empty" in source(cluster, "", WANDB_API_KEY_FILE=str(key)).stderr
    assert "is no file of yours" in source(cluster, "", WANDB_API_KEY_FILE="/nowhere").stderr
    same = source(cluster, 'printf %s "$WANDB_API_KEY"', WANDB_API_KEY="from outside", WANDB_API_KEY_FILE="/nowhere")
    assert same.stdout == "from outside"


def test_a_trace_does_not_show_the_key(cluster, tmp_path: Path) -> None:
    cluster.python("")
    key = tmp_path / "key"
    key.write_text("s3cret")
    key.chmod(0o600)
    done = source(cluster, "", trace=True, WANDB_API_KEY_FILE=str(key))
    assert done.returncode == 0 and "set +x" in done.stderr and "s3cret" not in done.stderr
    for script in SCRIPTS:
        lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
        assert lines[0].startswith("set +x"), script
        assert not re.search(r"set -\w*x|xtrace|set -o\s+verbose", script.read_text()), script


# --- train.sbatch


def test_arguments_reach_every_rank_unchanged(cluster) -> None:
    cluster.python('printf \'<%s>\' "$rank of $SLURM_NTASKS" "$@"; echo\n')
    result = cluster.submit("task=pretrain", "task.sample_prompt=two  words $HOME *", "data.paths=[a,b]")
    assert result.code == 0 and result.state["JobState"] == "COMPLETED"
    for rank in (0, 1):
        passed = "<-m><train><task=pretrain><task.sample_prompt=two  words $HOME *><data.paths=[a,b]>"
        assert f"{rank}: <{rank} of 2>{passed}\n" in result.log


@pytest.mark.parametrize("event", ["warn", "preempt"])
def test_a_run_that_saved_is_requeued_with_the_same_arguments(cluster, event: str) -> None:
    cluster.python('echo "$3 start $start"\n' + FIRST_START + UNTIL_SIGNAL)
    result = cluster.submit("name=mine", events=(when(BOTH_READY, event),))
    assert result.code == 0 and result.state["JobState"] == "COMPLETED", result.log
    for line in ("0: name=mine start 0", "1: saved", "requeueing", "0: name=mine start 1", "1: resumed"):
        assert line in result.log, result.log
    assert result.log.index("1: saved") < result.log.index("requeueing"), "not before the ranks are done"
    assert "without" not in result.log


@pytest.mark.parametrize("event", ["warn", "preempt"])
def test_a_signal_before_the_first_step_requeues_too(cluster, event: str) -> None:
    cluster.python(FIRST_START + "echo loading\nexec sleep 600\n")
    result = cluster.submit(events=(when(["0: loading", "1: loading"], event),))
    assert result.code == 0 and "1: resumed" in result.log, result.log


def test_a_signal_during_the_health_check_requeues(cluster) -> None:
    cluster.python(FIRST_START)
    python = cluster.directory / "venv" / "bin" / "python"
    slow = 'if ((${SLURM_RESTART_COUNT:-0} == 0)); then echo "$SLURM_PROCID checks" >>"$STUB_DIR/slurm-4242.log"; '
    slow += "until [[ -e $STUB_DIR/warn ]]; do sleep 0.1; done; fi\n"
    head = "#!/usr/bin/env bash\n"
    python.write_text(python.read_text().replace(head, head + slow))
    result = cluster.submit(events=(when(["0 checks", "1 checks"], "warn"),))
    assert result.code == 0 and "1: resumed" in result.log and "without" not in result.log, result.log


def test_a_signal_before_the_health_check_requeues(cluster) -> None:
    cluster.python(FIRST_START + "echo went on\n")
    command = cluster.directory / "bin" / "mktemp"  # which the script calls before that
    wait = 'until [ -e "$STUB_DIR/warn" ]; do sleep 0.1; done'
    command.write_text(f'#!/bin/sh\n{wait}\nexec {shutil.which("mktemp")} "$@"\n')
    command.chmod(0o755)
    result = cluster.submit(events=(when(["start 0 on"], "warn"),))
    assert result.code == 0 and "1: resumed" in result.log and "went on" not in result.log, result.log


def test_a_cancelled_job_stays_cancelled(cluster) -> None:
    cluster.python(FIRST_START + UNTIL_SIGNAL)
    result = cluster.submit(events=(when(BOTH_READY, "cancel"),))
    assert result.code == 75 and "0: saved" in result.log
    assert "not requeued here: the job's state is COMPLETING" in result.log and "resumed" not in result.log


@pytest.mark.parametrize("code", [1, 2, 3])
def test_a_failed_run_is_not_requeued(cluster, code: int) -> None:
    cluster.python(FIRST_START + f"exit {code}\n")
    result = cluster.submit()
    assert result.code == code and result.state["JobState"] == "FAILED" and "requeueing" not in result.log


@pytest.mark.parametrize("end", ["kill -9 $$", "exit 4", "exit 5", "kill -6 $$"])
def test_a_job_that_lost_a_rank_is_requeued(cluster, end: str) -> None:
    """One rank ends, srun ends the other, and the job continues on its next start. The log names the reason."""
    cluster.python(FIRST_START + f"if ((rank)); then {end}; fi\nexec sleep 600\n")
    result = cluster.submit()
    assert result.code == 0 and "1: resumed" in result.log, result.log
    assert "failure 1 of at most 3 in a row" in result.log and "requeueing" in result.log
    reason = {"exit 4": "a rank was lost", "exit 5": "did not answer a rank"}.get(end, "ended a rank")
    assert reason in result.log or "signal 15" in result.log
    assert not list((cluster.directory / "state").iterdir()), "nothing is left when the job is complete"


def test_a_job_that_always_loses_a_rank_ends(cluster) -> None:
    cluster.python('echo "start $start"; if ((rank)); then kill -9 $$; fi\nexec sleep 600\n')
    result = cluster.submit(NARROWS_MAX_FAILURES="2")
    assert result.code in (137, 143) and result.state["JobState"] == "FAILED"
    assert "0: start 2" in result.log and "start 3 " not in result.log
    assert "not requeued: NARROWS_MAX_FAILURES=2 is reached" in result.log
    assert "start 0 on localhost node2: exit code" in result.log, "every failure is listed at the end"


def test_a_saved_state_begins_the_count_of_failures_anew(cluster) -> None:
    """Starts 0 and 2 lose a rank, start 1 saves its state: never two failures in a row."""
    cluster.python(
        "trap '' TERM USR1\n"
        "if ((start == 3)); then exit 0; fi\n"
        'touch "$STUB_DIR/$start.$rank"\n'
        "until [[ -e $STUB_DIR/$start.0 && -e $STUB_DIR/$start.1 ]]; do sleep 0.05; done\n"
        "if ((start == 1)); then exit 75; fi\n"
        "exit 4\n"
    )
    result = cluster.submit(NARROWS_MAX_FAILURES="1")
    assert result.code == 0 and result.log.count("failure 1 of at most 1 in a row") == 2, result.log


def test_a_fault_of_one_rank_is_not_requeued_though_others_miss_it(cluster) -> None:
    """The job ends with the exit code of the fault, not with the larger one of the ranks that it was lost to."""
    cluster.python(
        "trap '' TERM\n"
        'if ((rank)); then echo 2 >>"$NARROWS_FAULT_FILE"; exit 2; fi\n'
        "until [[ -s $NARROWS_FAULT_FILE ]]; do sleep 0.05; done; exit 4\n"
    )
    result = cluster.submit()
    assert result.code == 2 and "ended with exit code 2" in result.log and "requeueing" not in result.log, result.log


def test_requeueing_has_an_end(cluster) -> None:
    cluster.python(
        "trap '' TERM USR1\n"  # as the ranks of a run that has ended do, for srun ends those later than the first
        'echo "start $start"; touch "$STUB_DIR/$start.$rank"\n'
        "until [[ -e $STUB_DIR/$start.0 && -e $STUB_DIR/$start.1 ]]; do sleep 0.05; done; exit 75\n"
    )
    result = cluster.submit(NARROWS_MAX_REQUEUES="2")
    assert result.code == 75 and "0: start 2" in result.log and "start 3" not in result.log
    assert "NARROWS_MAX_REQUEUES=2 is reached" in result.log


def test_outside_of_the_repository(cluster) -> None:
    cluster.python("")
    given = cluster.environment | {"SLURM_SUBMIT_DIR": str(cluster.directory)}
    done = subprocess.run(["bash", SCRIPTS[2]], env=given, capture_output=True, text=True)
    assert done.returncode == 2 and "is not the repository's root" in done.stderr


def test_a_task_of_a_job_array_requeues_itself_alone(cluster) -> None:
    """The task whose number is that of the whole array: Slurm shows all tasks under it, and would requeue them all."""
    cluster.python(FIRST_START)
    result = cluster.submit(BAD_NODES="node2", STUB_ARRAY_TASK="3")
    name = f"{cluster.environment['STUB_JOB']}_3"
    assert f"job {name}] requeueing, without node2" in result.log and result.state["ExcNodeList"] == "node2"
    assert result.log.count("requeueing") == 1 and "0: resumed" in result.log and result.code == 0


# --- healthcheck.sh


def test_an_unhealthy_node_is_excluded_and_the_job_runs_on_another(cluster) -> None:
    cluster.python("echo trains on $SLURMD_NODENAME\n")
    result = cluster.submit(BAD_NODES="node2")
    assert "healthcheck: FAIL (node2)" in result.log and "requeueing, without node2" in result.log
    assert "received" not in result.log, "the signal that follows the requeue is nothing to pass on"
    assert "start 1 on localhost node3" in result.log and result.state["ExcNodeList"] == "node2"
    assert result.code == 0 and "1: trains on node3" in result.log and "on node2\n" not in result.log


def test_nodes_excluded_before_stay_excluded(cluster) -> None:
    cluster.python("echo trains on $SLURMD_NODENAME\n")
    result = cluster.submit(nodes=1, BAD_NODES="localhost node2")
    assert result.state["ExcNodeList"] == "localhost,node2"
    assert result.code == 0 and "0: trains on node3" in result.log


def test_a_failure_of_every_node_is_not_the_nodes_fault(cluster) -> None:
    cluster.python("echo trains\n")
    result = cluster.submit(BAD_NODES="localhost node2")
    assert result.code == 1 and "failed on no node in particular" in result.log
    assert "requeueing" not in result.log and "trains" not in result.log


def test_a_silent_node_is_named(cluster) -> None:
    cluster.python("")
    python = cluster.directory / "venv" / "bin" / "python"
    python.write_text("#!/bin/bash\n[[ $SLURMD_NODENAME != node2 ]] || exit 1\n" + python.read_text())
    result = cluster.submit(NARROWS_MAX_REQUEUES="0")
    assert "FAIL node=node2 check=all-reduce: nothing was heard of it\n" in result.log
    assert "healthcheck: FAIL (node2)" in result.log


def test_gpus_and_disks_are_counted_by_node(cluster) -> None:
    cluster.python("")
    wanted = {"NARROWS_GPUS_PER_NODE": "8", "STUB_GPUS": '{"localhost": 8, "node2": 7}', "NARROWS_MAX_REQUEUES": "0"}
    result = cluster.submit(**wanted)
    assert "PASS node=localhost check=gpus: 8 of 8\n" in result.log
    assert re.search(r"PASS node=localhost check=files: \w+ open files are allowed, 261 are wanted", result.log)
    assert "FAIL node=node2 check=gpus: 7 of 8\n" in result.log and "healthcheck: FAIL (node2)" in result.log
    for setting, message in (
        ({"NARROWS_MIN_FREE_GIB": "99999999"}, "GiB free, 99999999 are wanted"),
        ({"NARROWS_HEALTH_DIRS": "/nowhere"}, "/nowhere cannot be written"),
    ):
        result = cluster.submit(**setting)
        assert f"{message}" in result.log and "healthcheck: FAIL (localhost,node2)" in result.log
