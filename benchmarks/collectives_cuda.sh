#!/usr/bin/env bash
# Measures the GPU side of sealed collectives on one CUDA machine, in under ten minutes, downloading nothing.
#
#   bash benchmarks/collectives_cuda.sh [OUT.json]
#
# Kernel throughput by size against a plain copy and against the ceiling of the arithmetic, many messages in one launch,
# correctness on fresh random bytes of many sizes, and sealed weights opened on the GPU.
# OUT (default: benchmarks/results/kernels_MACHINE_DATE.json) names the machine. The exit status is 1 when a
# bar of docs/collectives.md is missed.
#
# Needs Python 3.11 or newer with torch for CUDA, triton, numpy, safetensors, blake3 and cryptography 50. A machine without the last
# two takes them from wheels in the folder that WHEELS names; fill it where there is a network:
#   pip download --only-binary :all: --python-version 3.12 -d wheels 'cryptography>=50,<51' blake3
#
#   PYTHON=python3   the interpreter that has torch
#   WHEELS=wheels    a folder of wheels, if the machine lacks any
#   SMALL=1          a few hundred bytes under Triton's interpreter on the CPU: tries this script out, measures nothing
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
wheels=${WHEELS:-}
small=${SMALL:-}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

if [ -n "$small" ]; then
  card=interpreter
else
  card=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr -cs 'A-Za-z0-9\n' '-' | tr 'A-Z' 'a-z')
fi
out=${1:-$here/benchmarks/results/kernels_${card}_$(date -u +%F).json}
if [ -e "$out" ]; then
  echo "$out is there already: name another file, or move it away" >&2
  exit 2
fi

path=$here/src:$here
if ! "$python" -c 'import blake3, cryptography, sys; sys.exit(int(cryptography.__version__.split(".")[0]) != 50)' 2>/dev/null; then
  if [ -z "$wheels" ]; then
    echo "this machine lacks blake3 or cryptography 50: fill a folder of wheels as this script's head says, and name it: WHEELS=DIR" >&2
    exit 2
  fi
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$wheels" --target "$scratch/wheels" \
    'cryptography>=50,<51' blake3
  path=$path:$scratch/wheels
fi

export PYTHONPATH=$path TRITON_CACHE_DIR=$scratch/triton
if [ -n "$small" ]; then
  TRITON_INTERPRET=1 "$python" -m benchmarks.collectives.gpu -o "$out" --small
else
  # A machine that is slower than it looked is stopped: nothing half measured is kept.
  timeout --signal=INT --kill-after=30 570 "$python" -m benchmarks.collectives.gpu -o "$out"
fi
echo "$out, $SECONDS s in all"
