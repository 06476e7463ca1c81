#!/usr/bin/env bash
# The main job on a machine without a GPU: set-up, a tiny Qwen3 mixture of experts, a supervised warm start on
# demonstrations of mixed quality, then asynchronous RL on the service desk, with success on held-out tasks before and
# after. Two cores, 8 GiB of memory. Everything lands in runs/.
#
#   bash recipes/quickstart.sh                              # arguments go to `megatron-async launch`
#   bash recipes/quickstart.sh --set steps=20
#   SEED=1 NAME=second bash recipes/quickstart.sh           # another model, other tasks, another folder
#   TRAIN_CONFIG=my.yaml bash recipes/quickstart.sh         # the same start, your own training
#   bash recipes/quickstart.sh --resume                     # go on with a run that was stopped; else it is replaced
#
# The model and its warm start are kept and reused; delete runs/<name>_warm_start to make them anew.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
seed="${SEED:-0}"
name="${NAME:-quickstart}"
train_config="${TRAIN_CONFIG:-recipes/configs/quickstart.yaml}"
model="runs/${name}_model"
warm_start="runs/${name}_warm_start"

bash recipes/setup.sh
python="${VENV:-$root/.venv}/bin/python"

# One thread per process: several OpenMP pools on few cores slow each other down by an order of magnitude.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

if [[ ! -f "$warm_start/checkpoint/config.json" ]]; then
  rm -rf -- "$model"  # an interrupted warm start leaves one
  "$python" tools/make_tiny_checkpoint.py --out "$model" --seed "$seed"
  warm_arguments=(
    --config recipes/configs/quickstart_warm_start.yaml
    --set "name=${name}_warm_start" --set "model.path=$model" --set "seed=$seed"
  )
  "$python" -m megatron_async sft --fresh "${warm_arguments[@]}"  # what an interrupted one left is of no use
fi

fresh=(--fresh)
for argument in "$@"; do
  if [[ "$argument" == --resume ]]; then fresh=(); fi
done
exec "$python" -m megatron_async launch "${fresh[@]}" \
  --config "$train_config" \
  --set "name=$name" --set "model.path=$warm_start/checkpoint" --set "seed=$seed" "$@"
