#!/usr/bin/env bash
# Are the nodes of this job fit to train? Run it in the repository's root inside a job (train.sbatch does, salloc works):
#   slurm/healthcheck.sh [FILE]
# Starts one task for every task of the job and prints a line for each node and check: number of GPUs, room on the disks,
# open files that a task may have,
# an all-reduce over all tasks (NCCL on GPUs), clocks. Exit code 0: all passed; 1: not, and FILE gets the nodes at
# fault, comma-separated, or nothing where none can be named.
set +x # a trace would show the W&B key
set -euo pipefail

report() { # PASS|FAIL CHECK TEXT; a FAIL makes this task fail
  echo "$1 node=$node check=$2: $3"
  [[ $1 == PASS ]] || failed=1
}

check_gpus() {
  local wanted=${NARROWS_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}} found
  if ((wanted == 0)); then
    report PASS gpus "none asked for"
  elif ! found=$(timeout 60 nvidia-smi --list-gpus 2>&1); then
    report FAIL gpus "nvidia-smi: ${found:-no answer within a minute}"
  else
    found=$(grep -c '^GPU ' <<<"$found" || true)
    report "$( ((found >= wanted)) && echo PASS || echo FAIL)" gpus "$found of $wanted"
  fi
}

check_disks() {
  local directory free probe
  for directory in $NARROWS_HEALTH_DIRS; do
    if ! probe=$(mktemp "$directory/.narrows-health-XXXXXX" 2>&1); then
      report FAIL disk "$directory cannot be written: $probe"
      continue
    fi
    rm -f "$probe"
    free=$(df -Pk "$directory" | awk 'NR == 2 { print int($4 / 1048576) }')
    report "$( ((free >= NARROWS_MIN_FREE_GIB)) && echo PASS || echo FAIL)" disk \
      "$directory has $free GiB free, $NARROWS_MIN_FREE_GIB are wanted"
  done
}

check_files() { # five groups may hold all tasks: the run, its gradients, its checkpoints, experts, and tables
  local limit wanted=$((5 * (SLURM_NTASKS - 1) + 256))
  limit=$(ulimit -S -n)
  report "$([[ $limit == unlimited ]] || ((limit >= wanted)) && echo PASS || echo FAIL)" files \
    "$limit open files are allowed, $wanted are wanted: 5 connections to each other task, and 256"
}

if [[ ${1:-} == --task ]]; then
  node=${SLURMD_NODENAME:-$(uname -n)} failed=0
  if ((SLURM_LOCALID == 0)); then
    check_gpus
    check_disks
    check_files
  fi
  python slurm/allreduce.py || failed=1
  exit "$failed"
fi

# shellcheck source=slurm/env.sh
source slurm/env.sh
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
trap '[[ -z ${job:-} ]] || kill "$job" 2>/dev/null; exit 75' USR1 TERM
status=0
# Every task is let finish its own checks, so that all that is wrong shows at once. The outer limit is for a srun that hangs.
timeout $((5 * NARROWS_HEALTH_TIMEOUT_S)) srun --kill-on-bad-exit=0 slurm/healthcheck.sh --task >"$lines" 2>&1 &
job=$!
wait "$job" || status=$?
if ((status != 0)); then
  for node in $NARROWS_NODES; do
    grep -q "^[A-Z]* node=$node check=all-reduce:" "$lines" ||
      echo "FAIL node=$node check=all-reduce: nothing was heard of it" >>"$lines"
  done
fi
sort -s -k 2,2 "$lines"
bad=$(sed -n 's/^FAIL node=\([^ ]*\) .*/\1/p' "$lines" | sort -u)
if ((status == 0)); then
  echo "healthcheck: PASS ($NARROWS_NODES)"
  exit 0
fi
bad=$(paste -sd, <<<"$bad")
echo "healthcheck: FAIL (${bad:-no node in particular})"
[[ -z ${1:-} ]] || echo "$bad" >"$1"
exit 1
