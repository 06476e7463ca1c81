#!/usr/bin/env bash
# Qwen3-4B on tau2-bench with exact old log-probs from the snapshot history (arXiv 2605.12070). One machine of eight
# 80 GiB accelerators: four trainer ranks, four engines. Written and planned on the CPU profile; no figure of a run on
# GPUs is claimed.
#
#   bash recipes/qwen3_4b_tau2.sh --dry-run                            # the plan, anywhere
#   MODEL=/data/Qwen3-4B USER_URL=http://host:30000/v1 bash recipes/qwen3_4b_tau2.sh
#   TRAINER_NODES=1 ENGINE_NODES=1 ... bash recipes/qwen3_4b_tau2.sh --node N   # eight ranks, eight engines
set -euo pipefail
# shellcheck source=recipes/cluster.sh
source "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"
parse_arguments "$@"
TRAINER_NODES="${TRAINER_NODES:-1}" ENGINE_NODES="${ENGINE_NODES:-0}"
require USER_URL "an OpenAI-compatible endpoint for the model that plays the user, http://host:port/v1"
cluster_flags

if (( ENGINE_NODES )); then world=$((TRAINER_NODES * 8)) engine_count=$((ENGINE_NODES * 8)); else world=4 engine_count=4; fi

run=(
  --set name=qwen3_4b_tau2
  --set "run_dir=${RUN_DIR:-runs}"
)
model=(--set "model.path=${MODEL:-model}")
layout=(
  --set "layout.world_size=$world"
  --set layout.tensor_model_parallel_size=2
)
trainer=(
  --set trainer.micro_batch_tokens=32768      # one whole trajectory
  --set trainer.recompute=true
  --set trainer.deadline_s=3600
)
engines=(
  --set "engines.count=$engine_count"
  --set engines.tensor_parallel_size=1
  --set engines.max_total_tokens=380000
  --set engines.start_deadline_s=600
)
rollout=(--set "rollout.concurrency=${CONCURRENCY:-128}")
environment=(
  --set "environment.options.domain=${DOMAIN:-retail}"
  --set "environment.options.user.endpoint.url=${USER_URL:-http://host:port/v1}"
  --set "environment.options.user.endpoint.model=${USER_MODEL:-default}"
)

launch_on_cluster recipes/configs/qwen3_tau2.yaml recipes/models/qwen3_4b "${run[@]}" "${model[@]}" \
  "${layout[@]}" "${trainer[@]}" "${engines[@]}" "${rollout[@]}" "${environment[@]}" "${cluster[@]}"
