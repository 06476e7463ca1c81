#!/usr/bin/env bash
# Everything that only a GPU can show, in one command: stopped after eight minutes at most, without the internet. Tests
# marked `gpu` first (the engine against transformers in bf16 and fp32, objectives, checkpoints, the history), then the
# history of the weights on the device against copies to page-locked host memory; its figures go to
# docs/benchmarks/snapshot_device.json.
#
#   bash tests/gpu.sh                       # PYTHON=... for another interpreter than the set-up's
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
python="${PYTHON:-${VENV:-$root/.venv}/bin/python}"
export PYTHONPATH="$root" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

timeout 180 "$python" -m pytest -m gpu tests/gpu/test_engine_and_objectives.py tests/unit/test_snapshot_gpu.py -rs
timeout 290 "$python" -m tools.benchmark_snapshot_codec --device cuda --parameters 512e6
