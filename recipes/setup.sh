#!/usr/bin/env bash
# Creates .venv at the root of the repository with the pinned CPU stack. Safe to run again: when nothing that decides
# its content has changed it returns at once. About 3 GB, two to four minutes the first time.
#
#   PYTHON=python3.11 bash recipes/setup.sh          # which interpreter to build on
#   VENV=/elsewhere   bash recipes/setup.sh          # another place than .venv
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${VENV:-$root/.venv}"
python="${PYTHON:-}"

fail() { printf 'setup: %s\n' "$*" >&2; exit 2; }

if [[ -z "$python" ]]; then
  for candidate in python3.11 python3.12 python3; do
    if command -v "$candidate" >/dev/null; then python="$candidate"; break; fi
  done
fi
[[ -n "$python" ]] || fail "no Python found; install Python 3.11 or set PYTHON=/path/to/python3.11"
command -v "$python" >/dev/null || fail "PYTHON=$python is not there; give the path of a Python 3.11 or 3.12"
version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
case "$version" in
  3.11 | 3.12) ;;
  *) fail "$python is Python $version; the pinned stack needs 3.11 or 3.12: set PYTHON=/path/to/python3.11" ;;
esac

# The stamp covers everything that decides what is installed, and the place: an environment cannot be moved.
stamp="$( { cat "$root"/requirements/*.txt "$root"/setup.py "$root"/recipes/setup.sh; echo "$version $venv $root"; } |
  sha256sum | cut -d' ' -f1)"
if [[ -f "$venv/.stamp" && "$(cat "$venv/.stamp")" == "$stamp" ]]; then
  exit 0
fi

started=$SECONDS
step() {  # step NAME COMMAND...: run quietly, show the name and the time; show the output when it fails
  local name="$1" begin=$SECONDS log; shift
  printf '  %-46s' "$name"
  log="$(mktemp)"
  if "$@" >"$log" 2>&1; then
    printf '%4d s\n' $((SECONDS - begin)); rm -f "$log"
  else
    printf 'failed\n'; tail -n 30 "$log" >&2; rm -f "$log"
    fail "$name failed (see above); check the network and the free space of $venv, then run this again"
  fi
}

free_gib="$(df -Pk "$(dirname "$venv")" | awk 'NR==2 {print int($4/1048576)}')"
(( free_gib >= 5 )) || fail "$(dirname "$venv") has $free_gib GiB free, the environment needs 5"

if [[ -d "$venv" && ! -f "$venv/pyvenv.cfg" && -n "$(ls -A "$venv")" ]]; then
  fail "$venv exists and is no Python environment; it would be emptied: move it away or set VENV to another place"
fi

printf 'Setting up %s on Python %s\n' "$venv" "$version"
# --no-compile: of tens of thousands of modules a few thousand are ever imported; Python compiles those at first use.
pip=("$venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check --no-input
  --root-user-action ignore)
rm -f "$venv/.stamp"
step "environment" "$python" -m venv --clear "$venv"
# torch with its dependencies, so that a CUDA build, where that is what the index offers, can be imported.
torch="$(grep -h '^torch==' "$root/requirements/cpu.txt")"
step "$torch" "${pip[@]}" "$torch"
# The rest is a complete closure of pins: nothing is left to resolve.
step "engines: sglang, megatron-core" "${pip[@]}" --no-deps -r "$root/requirements/cpu-nodeps.txt"
step "libraries" "${pip[@]}" --no-deps -r "$root/requirements/cpu.txt"
# Without their dependencies' own pins, which contradict each other and sglang's; the list is complete.
step "benchmarks: tau2-bench, BFCL" "${pip[@]}" --no-deps -r "$root/requirements/tau2.txt"
step "tests, linters, build tools" "${pip[@]}" --no-deps -r "$root/requirements/dev.txt" -r "$root/requirements/build.txt"
step "megatron-async itself" "${pip[@]}" --no-deps --no-build-isolation -e "$root"
printf '%s' "$stamp" > "$venv/.stamp"
printf 'Ready after %d s\n' $((SECONDS - started))
