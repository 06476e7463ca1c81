#!/usr/bin/env bash
# Qwen3-4B on tau2-bench, retail, airline or telecom: with exact old log-probs from the snapshot history (arXiv
# 2605.12070; one machine of eight 80 GiB accelerators, four trainer ranks and four engines), or METHOD=sao (arXiv
# 2607.07508; a critic beside the policy). Written and planned on the CPU profile; no figure of a run on GPUs is claimed.
#
#   bash recipes/qwen3_4b_tau2.sh --dry-run                            # the plan, anywhere
#   MODEL=/data/Qwen3-4B USER_URL=http://host:30000/v1 bash recipes/qwen3_4b_tau2.sh
#   DOMAIN=telecom METHOD=sao ... bash recipes/qwen3_4b_tau2.sh                 # see tau2_cluster.sh
#   TRAINER_NODES=1 ENGINE_NODES=1 ... bash recipes/qwen3_4b_tau2.sh --node N   # eight ranks, eight engines
set -euo pipefail
# shellcheck source=recipes/cluster.sh
source "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"
# shellcheck source=recipes/tau2_cluster.sh
source "$root/recipes/tau2_cluster.sh"
parse_arguments "$@"
tau2_flags
TRAINER_NODES="${TRAINER_NODES:-1}" ENGINE_NODES="${ENGINE_NODES:-0}"
require USER_URL "an OpenAI-compatible endpoint for the model that plays the user, http://host:port/v1"
cluster_flags

if (( ENGINE_NODES )); then world=$((TRAINER_NODES * 8)) engine_count=$((ENGINE_NODES * 8)); else world=4 engine_count=4; fi

run=(
  --set "name=qwen3_4b_tau2_${domain}_$method"
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
launch_on_cluster "$tau2_config" recipes/models/qwen3_4b "${run[@]}" "${model[@]}" \
  "${layout[@]}" "${trainer[@]}" "${engines[@]}" "${rollout[@]}" "${environment[@]}" "${cluster[@]}"
