#!/usr/bin/env bash
# What the cluster recipes share: sourced by them, does nothing by itself. The same command runs on every machine:
#
#   --node N     this machine's number; Slurm's own by default. 0 leads; the trainer's machines come first, then the
#                engines'. Every machine needs the repository, the environment, MODEL and RUN_DIR under the same paths.
#   --dry-run    print the plan (ranks, memory, every rank's model, the commands) and start nothing; needs no GPU
#   --fresh      delete what an earlier run of the same name left; --resume goes on with it
#   --set K=V    override any option (docs/configuration.md); given last, so it wins
#
# Environment: MODEL, RUN_DIR, TRAINER_NODES, ENGINE_NODES, DEVICES_PER_NODE, DEVICE_MEMORY_GIB, HOST_MEMORY_GIB, ADDRESS
# (of this machine), BANK_URL, VENV. Only processes that `launch` started are ever stopped, by it, on the machine it
# runs on.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"

fail() { printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2; exit 2; }

find_python() {  # the environment's Python; in the image there is one on the path
  local candidate="${VENV:-$root/.venv}/bin/python"
  if [[ -x "$candidate" ]]; then printf '%s' "$candidate"; else command -v python || command -v python3; fi
}

parse_arguments() {  # sets dry_run, node, launch_arguments, overrides
  dry_run=0 node="${SLURM_NODEID:-0}" launch_arguments=() overrides=()
  while (( $# )); do
    case "$1" in
      --dry-run) dry_run=1 ;;
      --fresh | --resume) launch_arguments+=("$1") ;;
      --node) node="${2:?--node needs a number}"; shift ;;
      --set) overrides+=(--set "${2:?--set needs KEY=VALUE}"); shift ;;
      *) fail "unknown argument $1; known: --node N, --dry-run, --fresh, --resume, --set KEY=VALUE" ;;
    esac
    shift
  done
}

require() {  # require NAME WHY: a variable that must be set before anything starts (a dry run does without)
  if [[ -z "${!1:-}" ]] && (( ! dry_run )); then fail "$1 is not set: $2"; fi
}

# cluster: the machines. TRAINER_NODES and ENGINE_NODES have the recipe's defaults by now.
cluster_flags() {
  # shellcheck disable=SC2034  # the recipes read it
  cluster=(
    --set "trainer.nodes=$TRAINER_NODES"
    --set "cluster.engine_nodes=$ENGINE_NODES"
    --set "cluster.devices_per_node=${DEVICES_PER_NODE:-8}"
    --set "cluster.device_memory_gib=${DEVICE_MEMORY_GIB:-80}"
    --set "cluster.host_memory_gib=${HOST_MEMORY_GIB:-0}"
  )
  # Without it, an SQLite file in the run's folder: all that open it run on the first machine.
  [[ -z "${BANK_URL:-}" ]] || cluster+=(--set "bank.url=$BANK_URL")
  local machines=$((TRAINER_NODES + ENGINE_NODES))
  if [[ -n "${SLURM_JOB_NUM_NODES:-}" ]] && (( SLURM_JOB_NUM_NODES != machines )); then
    fail "the job has $SLURM_JOB_NUM_NODES machines, but TRAINER_NODES=$TRAINER_NODES + ENGINE_NODES=$ENGINE_NODES" \
      "makes $machines; submit with --nodes=$machines"
  fi
}

print_commands() {  # what each machine runs
  local machine
  printf 'Commands\n'
  for (( machine = 0; machine < TRAINER_NODES + ENGINE_NODES; machine++ )); do
    printf '  machine %d:' "$machine"
    printf ' %q' "$python" -m megatron_async launch --node "$machine" "$@"
    printf '\n'
  done
}

# launch_on_cluster CONFIG SHAPE FLAGS...: the plan, then this machine's part of the run. SHAPE: a folder of
# recipes/models that a dry run reads when MODEL is not there.
launch_on_cluster() {
  local config="$1" shape="$2"; shift 2
  local flags=(--config "$config" "$@" "${overrides[@]}") python
  python="$(find_python)"
  if (( dry_run )); then
    local model=()
    [[ -f "${MODEL:-}/config.json" ]] || model=(--model "$shape")
    "$python" -m tools.plan_cluster "${flags[@]}" "${model[@]}"
    print_commands "${launch_arguments[@]}" "${flags[@]}"
    return
  fi
  require MODEL "the directory of the Hugging Face checkpoint, the same on every machine"
  if (( node == 0 )); then "$python" -m tools.plan_cluster --ranks none "${flags[@]}"; fi
  [[ -z "${ADDRESS:-}" ]] || launch_arguments+=(--address "$ADDRESS")
  exec "$python" -m megatron_async launch --node "$node" "${launch_arguments[@]}" "${flags[@]}"
}
