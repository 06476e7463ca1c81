#!/usr/bin/env bash
# Set-up, ruff, mypy and the tests, in one command. Arguments go to pytest:
#
#   bash tests/run.sh                        # everything but slow and gpu
#   bash tests/run.sh tests/unit -x          # a part
#   bash tests/run.sh -m slow                # the long ones
#
# The bank's tests also run on PostgreSQL, which the set-up does not install (Debian, Ubuntu: apt-get install postgresql).
# Where there is none they are left out and named at the end; MEGATRON_ASYNC_TESTS_REQUIRE_POSTGRESQL=1 lets them fail.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
bash recipes/setup.sh
python="${VENV:-$root/.venv}/bin/python"

# One thread per process: several OpenMP pools on few cores slow each other down by an order of magnitude.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

"$python" -m ruff check .
"$python" -m mypy
# Cheap tests first: a broken formula should show before a server has started.
if [[ $# -eq 0 ]]; then
  ordered=()
  for part in unit numerics distributed faults live gpu; do
    [[ -d "tests/$part" ]] && ordered+=("tests/$part")
  done
  set -- "${ordered[@]}"
fi
exec "$python" -m pytest "$@"
