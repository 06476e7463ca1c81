#!/usr/bin/env bash
# Qwen3-30B-A3B-Base on maths with the staleness-adaptive trust region (arXiv 2607.18722): 256 prompts x 16 responses of
# up to 32k tokens. LAG=1 or 8 is the paper's lag: trainer steps per broadcast of weights. Written and planned on the CPU
# profile; no figure of a run on GPUs is claimed.
#
#   bash recipes/qwen3_30b_a3b_base_math_sat.sh --dry-run              # the plan, anywhere
#   MODEL=/data/Qwen3-30B-A3B-Base ENVIRONMENT=my_package.maths:build LAG=8 RUN_DIR=/shared/runs \
#     bash recipes/qwen3_30b_a3b_base_math_sat.sh --node N             # on machine N; see cluster.sh and slurm/
#
# A base model's tokenizer may have no chat template with tools; it needs one, also where no tool is used.
set -euo pipefail
# shellcheck source=recipes/cluster.sh
source "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"
parse_arguments "$@"
TRAINER_NODES="${TRAINER_NODES:-2}" ENGINE_NODES="${ENGINE_NODES:-2}" LAG="${LAG:-1}"
require ENVIRONMENT "the maths environment, package.module:factory (megatron_async/rollout/environments/base.py)"
(( ENGINE_NODES )) || fail "a step of 4,096 responses needs machines for engines: set ENGINE_NODES to at least 1"
cluster_flags

run=(
  --set "name=qwen3_30b_a3b_base_math_sat_lag$LAG"
  --set "run_dir=${RUN_DIR:-runs}"
)
model=(--set "model.path=${MODEL:-model}")
layout=(
  --set "layout.world_size=$((TRAINER_NODES * 8))"
  --set layout.tensor_model_parallel_size=4   # also cuts the logits of a 32k micro-batch
  --set layout.expert_model_parallel_size=8   # all-to-all stays inside a machine
)
trainer=(
  --set trainer.micro_batch_tokens=32768      # one whole response
  --set trainer.recompute=true
)
engines=(
  --set "engines.count=$((ENGINE_NODES * 2))"
  --set engines.tensor_parallel_size=4
  --set engines.max_total_tokens=1500000
  --set engines.start_deadline_s=900
)
staleness=(
  --set "publish.every=$LAG"
  --set "rollout.max_staleness=$LAG"          # engines lag LAG - 1 versions, and one step trains meanwhile
)
rollout=(--set "rollout.concurrency=${CONCURRENCY:-1024}")
environment=(--set "environment.name=${ENVIRONMENT:-package.module:factory}")

launch_on_cluster recipes/configs/qwen3_30b_a3b_base_math_sat.yaml recipes/models/qwen3_30b_a3b_base "${run[@]}" \
  "${model[@]}" "${layout[@]}" "${trainer[@]}" "${engines[@]}" "${staleness[@]}" "${rollout[@]}" "${environment[@]}" \
  "${cluster[@]}"
