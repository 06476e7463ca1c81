#!/usr/bin/env bash
# Qwen3-30B-A3B with single-rollout asynchronous optimisation (arXiv 2607.07508): 128 prompts x 1 trajectory, DIS on
# current/rollout, a critic beside the policy. Four machines of eight 80 GiB accelerators train, one holds engines.
# Written and planned on the CPU profile; no figure of a run on GPUs is claimed.
#
#   bash recipes/qwen3_30b_a3b_sao.sh --dry-run                        # the plan, anywhere
#   MODEL=/data/Qwen3-30B-A3B ENVIRONMENT=my_package.tool_maths:build RUN_DIR=/shared/runs \
#     bash recipes/qwen3_30b_a3b_sao.sh --node N                       # on machine N; see cluster.sh and slurm/
set -euo pipefail
# shellcheck source=recipes/cluster.sh
source "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"
parse_arguments "$@"
TRAINER_NODES="${TRAINER_NODES:-4}" ENGINE_NODES="${ENGINE_NODES:-1}"
require ENVIRONMENT "an environment of your own, package.module:factory (megatron_async/rollout/environments/base.py)"
(( ENGINE_NODES )) || fail "policy and critic leave no room for engines beside them: set ENGINE_NODES to at least 1"
cluster_flags

run=(
  --set name=qwen3_30b_a3b_sao
  --set "run_dir=${RUN_DIR:-runs}"
)
model=(--set "model.path=${MODEL:-model}")
layout=(
  --set "layout.world_size=$((TRAINER_NODES * 8))"
  --set layout.tensor_model_parallel_size=4   # also cuts the logits of a 32k micro-batch
  --set layout.expert_model_parallel_size=16  # two machines: policy and critic do not fit with eight
)
trainer=(
  --set trainer.micro_batch_tokens=32768      # one whole trajectory
  --set trainer.recompute=true
)
engines=(
  --set "engines.count=$((ENGINE_NODES * 2))"
  --set engines.tensor_parallel_size=4
  --set engines.max_total_tokens=1500000
  --set engines.start_deadline_s=900
)
rollout=(--set "rollout.concurrency=${CONCURRENCY:-256}")
environment=(--set "environment.name=${ENVIRONMENT:-package.module:factory}")

launch_on_cluster recipes/configs/qwen3_30b_a3b_sao.yaml recipes/models/qwen3_30b_a3b "${run[@]}" "${model[@]}" \
  "${layout[@]}" "${trainer[@]}" "${engines[@]}" "${rollout[@]}" "${environment[@]}" "${cluster[@]}"
