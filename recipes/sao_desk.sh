#!/usr/bin/env bash
# SAO on a machine without a GPU: the quickstart's tiny model and warm start, then single rollouts, DIS and a critic with
# frozen attention. By default the critic first learns values from the trajectories of a short run that is recorded for
# it. Two cores, 8 GiB of memory. Everything lands in runs/.
#
#   bash recipes/sao_desk.sh                                   # arguments go to `megatron-async launch`
#   CONFIG=recipes/configs/sao/grpo_dis.yaml bash recipes/sao_desk.sh   # a baseline of the paper
#   PRETRAIN_STEPS=0 bash recipes/sao_desk.sh                  # a critic that starts at 0
#   CONFIG=recipes/configs/sao/online.yaml bash recipes/sao_desk.sh     # a desk that changes its mind
#
# Model, warm start and recorded run are kept and reused; delete runs/sao_desk_* to make them anew.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
seed="${SEED:-0}"
config="${CONFIG:-recipes/configs/sao_desk.yaml}"
pretrain_steps="${PRETRAIN_STEPS:-30}"
prefix="runs/sao_desk_seed${seed}"

bash recipes/setup.sh
python="${VENV:-$root/.venv}/bin/python"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
run() { "$python" -m megatron_async "$@"; }

warm="${prefix}_warm_start"
if [[ ! -f "$warm/checkpoint/config.json" ]]; then
  "$python" tools/make_tiny_checkpoint.py --out "${prefix}_model" --seed "$seed"
  run sft --fresh --config recipes/configs/quickstart_warm_start.yaml \
    --set "name=$(basename "$warm")" --set "model.path=${prefix}_model" --set "seed=$seed"
fi
common=(--set "model.path=$warm/checkpoint" --set "seed=$seed")

critic=()
if ((pretrain_steps > 0)) && ! grep -qE 'advantage: *\{name: (grpo|running_mean|latest_mean)' "$config"; then
  recorded="${prefix}_recorded"
  values="${recorded}_values"
  if [[ ! -f "$values/critic/config.json" ]]; then
    # All steps but the last train the critic alone: these are the warm-started policy's own trajectories.
    run launch --fresh --config recipes/configs/sao_desk.yaml "${common[@]}" --set "name=$(basename "$recorded")" \
      --set steps=11 --set critic.warmup_steps=10 --set evaluation.tasks=1
    run pretrain-critic --fresh --config recipes/configs/sao_desk.yaml "${common[@]}" --set "name=$(basename "$values")" \
      --set "steps=$pretrain_steps" --set "critic.pretrain_runs=[$recorded]"
  fi
  critic=(--set "critic.path=$values/critic")
fi

run launch --fresh --config "$config" "${common[@]}" "${critic[@]}" "$@"
