#!/usr/bin/env bash
# tau2-bench on a machine without a GPU: telecom tickets in solo mode, a tiny Qwen3 mixture of experts with a compact
# prompt (no leaderboard number: the benchmark's manual does not fit it), demonstrations by a scripted technician that
# sees what the policy sees, a warm start, asynchronous RL, and the official evaluator on the tasks of both splits before
# and after. Two cores, 8 GiB of memory, well under an hour. Everything lands in runs/.
#
#   bash recipes/tau2_telecom_cpu.sh                        # arguments go to `megatron-async launch`
#   SEED=1 NAME=second bash recipes/tau2_telecom_cpu.sh     # another model, another order of tasks, another folder
#   RUN_DIR=/elsewhere SAMPLES=1 bash recipes/tau2_telecom_cpu.sh --set steps=10
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
seed="${SEED:-0}"
name="${NAME:-tau2_telecom_cpu}"
runs="${RUN_DIR:-runs}"
samples="${SAMPLES:-4}"       # episodes per task in the official evaluations
config=recipes/configs/tau2_telecom_cpu.yaml
warm_config=recipes/configs/tau2_telecom_cpu_warm_start.yaml
model="$runs/${name}_model"
warm_start="$runs/${name}_warm_start"

bash recipes/setup.sh
python="${VENV:-$root/.venv}/bin/python"

# One thread per process: several OpenMP pools on few cores slow each other down by an order of magnitude.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
common=(--set "run_dir=$runs" --set "seed=$seed")

official() {  # official LABEL CHECKPOINT SPLIT TASKS: success by the benchmark's own evaluator
  "$python" -m megatron_async evaluate --config "$config" "${common[@]}" --set "name=$name" \
    --set "environment.options.heldout_split=$3" --set "evaluation.tasks=$4" --set environment.options.evaluator=official \
    --set environment.options.official_processes=1 --set "evaluation.samples_per_task=$samples" \
    --checkpoint "$2" --folder "$runs/${name}_official/$1_$3"
}

if [[ ! -f "$warm_start/checkpoint/config.json" ]]; then
  rm -rf -- "$model"  # an interrupted warm start leaves one
  "$python" tools/make_tiny_checkpoint.py --out "$model" --seed "$seed" --config "$warm_config"
  "$python" -m megatron_async sft --fresh --config "$warm_config" "${common[@]}" \
    --set "name=${name}_warm_start" --set "model.path=$model"
fi

official before "$warm_start/checkpoint" train 74
official before "$warm_start/checkpoint" test 40
"$python" -m megatron_async launch --fresh --config "$config" "${common[@]}" --set "name=$name" \
  --set "model.path=$warm_start/checkpoint" "$@"
official after "$runs/$name/checkpoint" train 74
official after "$runs/$name/checkpoint" test 40
