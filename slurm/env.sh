# shellcheck shell=bash
# The environment of a job; train.sbatch and healthcheck.sh source it in the repository's root. A variable that is set
# already keeps its value: export it before sbatch, or give sbatch --export=ALL,NAME=value. Nothing here prints a value.
set +x # a trace would show the W&B key

# --- software
: "${NARROWS_MODULES:=}"          # modules to load, separated by blanks
: "${NARROWS_VENV:=$PWD/.venv}"   # what `make install` made; every node must see it under this path
# --- requeueing
: "${NARROWS_MAX_REQUEUES:=100}"  # times that a job may put itself back into the queue
: "${NARROWS_MAX_FAILURES:=3}"    # of them in a row because a rank was lost; a start that saves its state begins the count anew
: "${NARROWS_STATE_DIR:=$PWD/.slurm}"  # for small files of a job; all nodes must see it under this path
# --- health check
: "${NARROWS_GPUS_PER_NODE:=}"    # expected of nvidia-smi; empty: as many as Slurm gave to the job, 0: a job without GPUs
: "${NARROWS_HEALTH_DIRS:=$PWD ${TMPDIR:-/tmp}}"  # must be writable and have room; separated by blanks
: "${NARROWS_MIN_FREE_GIB:=20}"
: "${NARROWS_MAX_SKEW_S:=1}"      # seconds between the clocks of two nodes
: "${NARROWS_HEALTH_TIMEOUT_S:=120}"  # that a process waits for the others
export NARROWS_GPUS_PER_NODE NARROWS_HEALTH_DIRS NARROWS_MIN_FREE_GIB NARROWS_MAX_SKEW_S NARROWS_HEALTH_TIMEOUT_S
for narrows_name in NARROWS_MAX_REQUEUES NARROWS_MAX_FAILURES NARROWS_GPUS_PER_NODE NARROWS_MIN_FREE_GIB NARROWS_HEALTH_TIMEOUT_S NARROWS_MAX_SKEW_S; do
  case $narrows_name in
    NARROWS_GPUS_PER_NODE) narrows_number='^(0|[1-9][0-9]*)?$' ;;
    NARROWS_MAX_SKEW_S) narrows_number='^[0-9]+(\.[0-9]+)?$' ;;
    *) narrows_number='^(0|[1-9][0-9]*)$' ;;
  esac
  if [[ ! ${!narrows_name} =~ $narrows_number ]]; then
    echo "error: $narrows_name=${!narrows_name} is not a number that can be used here; it needs one as in slurm/env.sh" >&2
    return 1
  fi
done
unset narrows_name narrows_number
# Every process group of gloo keeps a connection to each of its ranks: as many open files as the node allows.
ulimit -S -n "$(ulimit -H -n)" 2>/dev/null || true
# --- W&B: WANDB_API_KEY, or a file that nobody else can read and that holds nothing but the key
: "${WANDB_API_KEY_FILE:=}"

if [[ -n $NARROWS_MODULES ]]; then
  if ! type module >/dev/null 2>&1; then
    echo "error: NARROWS_MODULES is set, but there is no command 'module' here; leave it empty, or source the modules' setup first" >&2
    return 1
  fi
  # shellcheck disable=SC2086  # several words are several modules
  module load $NARROWS_MODULES || return 1
fi
if [[ ! -x $NARROWS_VENV/bin/python ]]; then
  echo "error: $NARROWS_VENV/bin/python does not exist on $(uname -n); run 'make install' in the repository, or set NARROWS_VENV" >&2
  return 1
fi
export PATH="$NARROWS_VENV/bin:$PATH"
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED:-1}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"

if [[ -z ${WANDB_API_KEY:-} && -n $WANDB_API_KEY_FILE ]]; then
  if [[ ! -f $WANDB_API_KEY_FILE || ! -O $WANDB_API_KEY_FILE ]]; then
    echo "error: WANDB_API_KEY_FILE=$WANDB_API_KEY_FILE is no file of yours" >&2
    return 1
  fi
  if [[ $(stat -L -c %a "$WANDB_API_KEY_FILE") != *00 ]]; then
    echo "error: WANDB_API_KEY_FILE=$WANDB_API_KEY_FILE can be read by others; chmod 600 it, and change the key" >&2
    return 1
  fi
  read -r WANDB_API_KEY <"$WANDB_API_KEY_FILE" || true # a last line without an end
  if [[ -z $WANDB_API_KEY ]]; then
    echo "error: WANDB_API_KEY_FILE=$WANDB_API_KEY_FILE is empty" >&2
    return 1
  fi
  export WANDB_API_KEY
fi

# What is compiled or cached while a job runs stays on the node: a shared file system serves many processes badly.
narrows_cache="${TMPDIR:-/tmp}/narrows-${USER:-$(id -un)}"
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$narrows_cache/torch_extensions}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$narrows_cache/triton}"
export MPLCONFIGDIR="${MPLCONFIGDIR:-$narrows_cache/matplotlib}"
unset narrows_cache

export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# A rank whose peer is gone ends with an error instead of waiting for ever; srun then ends the rest.
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"

# Where the ranks meet. Both follow from the job, and a requeued job may have other nodes: these are not taken from outside.
mapfile -t narrows_nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?is not set: this is no Slurm job}")
export NARROWS_NODES="${narrows_nodes[*]}"
export MASTER_ADDR="${narrows_nodes[0]:?scontrol named no node of this job}"
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) # below the ports that systems give to outgoing connections
unset narrows_nodes

# srun takes these from its own variables, not from sbatch's.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
  export SRUN_CPUS_PER_TASK="${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}"
fi
export SLURM_EXPORT_ENV=ALL # also after sbatch --export=NONE
