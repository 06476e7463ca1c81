#!/usr/bin/env bash
# Qwen3-30B-A3B on tau2-bench with exact old log-probs from the snapshot history (arXiv 2605.12070). Two machines of
# eight 80 GiB accelerators train, one holds engines; a plan that does not fit is refused before anything starts.
# Written and planned on the CPU profile; no figure of a run on GPUs is claimed.
#
#   bash recipes/qwen3_30b_a3b_tau2.sh --dry-run                       # the plan, anywhere
#   MODEL=/data/Qwen3-30B-A3B USER_URL=http://host:30000/v1 RUN_DIR=/shared/runs \
#     bash recipes/qwen3_30b_a3b_tau2.sh --node N                      # on machine N; see cluster.sh and slurm/
#   TRAINER_NODES=1 ENGINE_NODES=0 DEVICE_MEMORY_GIB=180 ...           # one machine: 4 trainer ranks, 1 engine
set -euo pipefail
# shellcheck source=recipes/cluster.sh
source "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"
parse_arguments "$@"
TRAINER_NODES="${TRAINER_NODES:-2}" ENGINE_NODES="${ENGINE_NODES:-1}"
require USER_URL "an OpenAI-compatible endpoint for the model that plays the user, http://host:port/v1"
cluster_flags

if (( ENGINE_NODES )); then world=$((TRAINER_NODES * 8)) engine_count=$((ENGINE_NODES * 2)); else world=4 engine_count=1; fi

run=(
  --set name=qwen3_30b_a3b_tau2
  --set "run_dir=${RUN_DIR:-runs}"
)
model=(--set "model.path=${MODEL:-model}")
layout=(
  --set "layout.world_size=$world"
  --set layout.tensor_model_parallel_size=4   # also cuts the logits of a 32k micro-batch
  --set "layout.expert_model_parallel_size=$(( world < 8 ? world : 8 ))"   # all-to-all stays inside a machine
)
trainer=(
  --set trainer.micro_batch_tokens=32768      # one whole trajectory
  --set trainer.recompute=true
  --set trainer.deadline_s=3600
)
engines=(
  --set "engines.count=$engine_count"
  --set engines.tensor_parallel_size=4
  --set engines.max_total_tokens=1500000
  --set engines.start_deadline_s=900
)
rollout=(--set "rollout.concurrency=${CONCURRENCY:-256}")
environment=(
  --set "environment.options.domain=${DOMAIN:-retail}"
  --set "environment.options.user.endpoint.url=${USER_URL:-http://host:port/v1}"
  --set "environment.options.user.endpoint.model=${USER_MODEL:-default}"
)

launch_on_cluster recipes/configs/qwen3_tau2.yaml recipes/models/qwen3_30b_a3b "${run[@]}" "${model[@]}" \
  "${layout[@]}" "${trainer[@]}" "${engines[@]}" "${rollout[@]}" "${environment[@]}" "${cluster[@]}"
