#!/usr/bin/env bash
# Qwen3-30B-A3B on tau2-bench, retail, airline or telecom: with exact old log-probs from the snapshot history (arXiv
# 2605.12070; two machines of eight 80 GiB accelerators train, one holds engines), or METHOD=sao (arXiv 2607.07508; a
# critic beside the policy, four machines train). A plan that does not fit is refused before anything starts. Written and
# planned on the CPU profile; no figure of a run on GPUs is claimed.
#
#   bash recipes/qwen3_30b_a3b_tau2.sh --dry-run                       # the plan, anywhere
#   MODEL=/data/Qwen3-30B-A3B USER_URL=http://host:30000/v1 RUN_DIR=/shared/runs \
#     bash recipes/qwen3_30b_a3b_tau2.sh --node N                      # on machine N; see cluster.sh and slurm/
#   DOMAIN=telecom METHOD=sao ...                                      # see tau2_cluster.sh
#   TRAINER_NODES=1 ENGINE_NODES=0 DEVICE_MEMORY_GIB=180 ...           # one machine: 4 trainer ranks, 1 engine
set -euo pipefail
# shellcheck source=recipes/cluster.sh
source "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"
# shellcheck source=recipes/tau2_cluster.sh
source "$root/recipes/tau2_cluster.sh"
parse_arguments "$@"
tau2_flags
experts=8  # ranks that share the experts: their all-to-all stays inside a machine
if [[ "$method" == sao ]]; then
  TRAINER_NODES="${TRAINER_NODES:-4}" experts=16  # two machines: policy and critic do not fit with eight ranks
fi
TRAINER_NODES="${TRAINER_NODES:-2}" ENGINE_NODES="${ENGINE_NODES:-1}"
require USER_URL "an OpenAI-compatible endpoint for the model that plays the user, http://host:port/v1"
cluster_flags

if (( ENGINE_NODES )); then world=$((TRAINER_NODES * 8)) engine_count=$((ENGINE_NODES * 2)); else world=4 engine_count=1; fi

run=(
  --set "name=qwen3_30b_a3b_tau2_${domain}_$method"
  --set "run_dir=${RUN_DIR:-runs}"
)
model=(--set "model.path=${MODEL:-model}")
layout=(
  --set "layout.world_size=$world"
  --set layout.tensor_model_parallel_size=4   # also cuts the logits of a 32k micro-batch
  --set "layout.expert_model_parallel_size=$(( world < experts ? world : experts ))"
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
launch_on_cluster "$tau2_config" recipes/models/qwen3_30b_a3b "${run[@]}" "${model[@]}" \
  "${layout[@]}" "${trainer[@]}" "${engines[@]}" "${rollout[@]}" "${environment[@]}" "${cluster[@]}"
