#!/usr/bin/env bash
# How far the simulator may be trusted on this machine: six short runs of the quickstart under different settings, three
# of which it is calibrated on and three of which it predicts. Needs the quickstart's warm start (bash
# recipes/quickstart.sh) and about 15 minutes of a machine that does nothing else. Arguments go to the comparison,
# e.g. --write.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python="${VENV:-.venv}/bin/python"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

# A policy that learns changes the work itself, which the simulator leaves out: it is held still.
run() {
  "$python" -m megatron_async launch --fresh --config recipes/configs/quickstart.yaml \
    --set steps=24 --set optimizer.lr=1.0e-9 --set evaluation.tasks=8 --set "name=simulated_$1" "${@:2}"
}

run asynchronous --set rollout.max_staleness=2 --set rollout.concurrency=64
run synchronous --set rollout.max_staleness=0 --set rollout.concurrency=64
run few --set rollout.max_staleness=0 --set rollout.concurrency=24
run one_step --set rollout.max_staleness=1 --set rollout.concurrency=32
run small_batch --set rollout.max_staleness=2 --set rollout.concurrency=24 --set batch.groups=6
run far --set rollout.max_staleness=4 --set rollout.concurrency=96 --set batch.groups=16

exec "$python" -m tools.simulate_async runs/simulated_asynchronous runs/simulated_synchronous runs/simulated_few --halves \
  --predict runs/simulated_one_step runs/simulated_small_batch runs/simulated_far "$@"
