"""Stand-ins for Slurm's commands: ``python stub.py sbatch|srun|scontrol|nvidia-smi ...``.

They start real processes on this machine: ``sbatch`` runs the script and puts a requeued job back, ``srun`` starts
every task and passes signals on, ``scontrol`` answers from the job's state in ``$STUB_DIR/job.json``. As Slurm 22.05
was seen to do: a requeue or a cancellation ends the script, nodes can be excluded of a pending job only, preemption
signals the tasks but not the script, a cancelled job can be requeued, and the script itself has ``SLURM_PROCID=0``.

``$STUB_EVENTS``: ``[{"start": 0, "seen": ["text in the log", ...], "do": "warn" | "preempt" | "cancel"}, ...]``, each
once, when all its texts are there; it leaves a file of its name in ``$STUB_DIR``. ``$STUB_JOB``: the job's number.
``$STUB_ARRAY_TASK``: the job is this task of a job array, the one that has the array's own number; under the number
alone scontrol then shows another task too, and changes all of them. ``$STUB_NODES``: the nodes there are.
``$STUB_GPUS``: ``{"node": GPUs that nvidia-smi lists}``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

JOB = os.environ["STUB_JOB"]
TASK = os.environ.get("STUB_ARRAY_TASK")
NAME = JOB if TASK is None else f"{JOB}_{TASK}"  # under which scontrol means this job alone
STATE = Path(os.environ["STUB_DIR"]) / "job.json"
TASKS = STATE.with_name("tasks.json")


def read() -> dict:
    return json.loads(STATE.read_text())


def write(**changes: object) -> None:
    state = read() if STATE.exists() else {}
    temporary = STATE.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(state | changes))
    os.replace(temporary, STATE)


def sbatch(arguments: list[str]) -> int:
    """Run the job to its end, over all its starts. The exit code is the last start's."""
    given = []
    while arguments[0].startswith("-"):
        given.append(arguments.pop(0))
    script, *arguments = arguments
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", Path(script).read_text(), re.M))
    options |= dict(re.fullmatch(r"--([\w-]+)=?(.*)", option).groups() for option in given)
    assert options["signal"].startswith("B:USR1@") and "requeue" in options and options["open-mode"] == "append"
    print(f"Submitted batch job {JOB}", flush=True)
    write(JobState="PENDING", ExcNodeList="(null)", PreemptTime="None")
    spooled = STATE.with_name("slurm_script")
    shutil.copy(script, spooled)
    start, code = 0, 0
    while start == 0 or read()["JobState"] == "PENDING":
        code = run_once(spooled, arguments, options, start)
        start += 1
    return code


def run_once(script: Path, arguments: list[str], options: dict[str, str], start: int) -> int:
    excluded = read()["ExcNodeList"].split(",")
    nodes = [node for node in os.environ["STUB_NODES"].split(",") if node not in excluded][: int(options["nodes"])]
    per_node = int(options["ntasks-per-node"])
    environment = os.environ | {
        "SLURM_JOB_ID": JOB,
        "SLURM_JOB_NODELIST": ",".join(nodes),
        "SLURM_JOB_NUM_NODES": str(len(nodes)),
        "SLURM_NTASKS": str(len(nodes) * per_node),
        "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
        "SLURM_GPUS_ON_NODE": options["gpus-per-node"],
        "SLURM_SUBMIT_DIR": os.getcwd(),
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }
    if TASK is not None:
        environment |= {"SLURM_ARRAY_JOB_ID": JOB, "SLURM_ARRAY_TASK_ID": TASK}
    if start:
        environment["SLURM_RESTART_COUNT"] = str(start)
    write(JobState="RUNNING", PreemptTime="None")
    path = Path(options["output"].replace("%j", JOB))
    before = path.stat().st_size if path.exists() else 0
    events = [event for event in json.loads(os.environ.get("STUB_EVENTS", "[]")) if event["start"] == start]
    with open(path, "a") as log:
        script_run = subprocess.Popen(["bash", script, *arguments], stdout=log, stderr=log, env=environment)
        told = False
        while script_run.poll() is None:
            time.sleep(0.01)
            text = path.read_bytes()[before:].decode()
            for event in [event for event in events if all(seen in text for seen in event["seen"])]:
                events.remove(event)
                happen(event["do"], script_run)
            if read()["JobState"] == "PENDING" and not told:
                script_run.terminate()
                told = True
    if read()["JobState"] == "RUNNING":
        write(JobState="COMPLETED" if script_run.returncode == 0 else "FAILED")
    return script_run.returncode


def happen(what: str, script: subprocess.Popen) -> None:
    if what == "warn":  # --signal=B:USR1@seconds
        script.send_signal(signal.SIGUSR1)
    if what == "preempt":
        write(PreemptTime="2026-01-01T00:00:00")
    if what == "cancel":
        write(JobState="COMPLETING")
        script.terminate()
    for task in json.loads(TASKS.read_text()) if what != "warn" else ():
        os.kill(task, signal.SIGTERM)
    STATE.with_name(what).touch()


def srun(arguments: list[str]) -> int:
    """Run a command once for every task; the highest exit code."""
    label = kill = False
    while arguments[0].startswith("-"):
        option = arguments.pop(0)
        label, kill = label or option == "--label", kill or option == "--kill-on-bad-exit=1"
        assert option in ("--label", "--kill-on-bad-exit=0", "--kill-on-bad-exit=1"), option
    nodes, total = os.environ["SLURM_JOB_NODELIST"].split(","), int(os.environ["SLURM_NTASKS"])
    per_node = total // len(nodes)
    tasks: list[subprocess.Popen] = []

    def pass_on(number: int, frame: object) -> None:
        for task in tasks:
            if task.poll() is None:
                task.send_signal(number)

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, pass_on)
    for rank in range(total):
        place = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % per_node),
            "SLURM_NODEID": str(rank // per_node),
            "SLURMD_NODENAME": nodes[rank // per_node],
        }
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        tasks.append(subprocess.Popen(arguments, env=os.environ | place, **pipe))
    TASKS.write_text(json.dumps([task.pid for task in tasks]))
    prefixes = [f"{rank}: " if label else "" for rank in range(total)]
    readers = [threading.Thread(target=copy, args=(t.stdout, p)) for t, p in zip(tasks, prefixes, strict=True)]
    for reader in readers:  # not before: what a log says is what an event may wait for
        reader.start()
    ended = 0.0
    while any(task.poll() is None for task in tasks):
        time.sleep(0.01)
        if kill and not ended and any(task.poll() for task in tasks):
            ended = time.monotonic()
            pass_on(signal.SIGTERM, None)
        if ended and time.monotonic() > ended + 300:
            pass_on(signal.SIGKILL, None)
    for reader in readers:
        reader.join()
    return max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks)


def copy(stream, prefix: str) -> None:
    for line in stream:
        os.write(1, prefix.encode() + line)


def scontrol(arguments: list[str]) -> int:
    match arguments:
        case ["show", "hostnames", nodes]:
            print(*nodes.split(","), sep="\n")
        case ["show", "job", "--oneliner", job] if job in (JOB, NAME):
            if job != NAME:
                print(f"JobId={JOB} JobName=narrows JobState=RUNNING ExcNodeList=(null) PreemptTime=None")
            print(f"JobId={JOB} JobName=narrows " + " ".join(f"{key}={value}" for key, value in read().items()))
        case ["requeue", job] if job == NAME:
            write(JobState="PENDING")
        case ["update", job, change] if job == f"JobId={NAME}" and change.startswith("ExcNodeList="):
            if read()["JobState"] != "PENDING":
                print(f"Job is no longer pending execution for job {JOB}", file=sys.stderr)
                return 1
            write(ExcNodeList=change.removeprefix("ExcNodeList="))
        case _:
            print(f"scontrol: unknown: {arguments}", file=sys.stderr)
            return 1
    return 0


def nvidia_smi(arguments: list[str]) -> int:
    assert arguments == ["--list-gpus"]
    for index in range(json.loads(os.environ["STUB_GPUS"])[os.environ["SLURMD_NODENAME"]]):
        print(f"GPU {index}: stand-in")
    return 0


if __name__ == "__main__":
    commands = {"sbatch": sbatch, "srun": srun, "scontrol": scontrol, "nvidia-smi": nvidia_smi}
    sys.exit(commands[sys.argv[1]](sys.argv[2:]))
