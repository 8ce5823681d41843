#!/usr/bin/env bash
# Measures what protection costs on one CUDA machine, in under ten minutes, downloading nothing.
#
#   bash benchmarks/cuda.sh [OUT]
#
# OUT (default: overhead-cuda) receives one folder a workload, each with raw slices, a signed statement and
# report.html, and summary.json. `glasshouse verify OUT/lora-7b` recomputes every number anywhere.
#
# Needs Python 3.11 or newer with torch, transformers, peft, numpy, scipy and matplotlib. What else Glasshouse
# needs (cryptography, fastapi, psutil, sqlalchemy, uvicorn, typer, rich) is taken from the machine or, without a network, from
# wheels in the folder that WHEELS names; fill it where there is a network:
#   pip download --only-binary :all: --python-version 3.12 -d wheels cryptography fastapi psutil sqlalchemy uvicorn typer rich
#
#   PYTHON=python3   the interpreter that has torch
#   WHEELS=wheels    a folder of wheels, if the machine lacks any
#   SMALL=1          a few seconds of each on the CPU: tries this script out, measures nothing
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${1:-overhead-cuda}
python=${PYTHON:-python3}
wheels=${WHEELS:-}
small=${SMALL:-}

say() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

if [ -e "$out" ]; then
  echo "$out is there already: name another folder, or move it away" >&2
  exit 2
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)

# An environment of its own, that sees the packages of the given interpreter and changes none of them.
say "installing Glasshouse beside $("$python" -c 'import sys; print(sys.version.split()[0])')"
venv=$out/.venv
"$python" -m venv --without-pip "$venv"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" - "$site" "$here" <<'PY'
import pathlib, site, sys, sysconfig
target, source = map(pathlib.Path, sys.argv[1:])
paths = [str(source / "src"), str(source), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
(target / "glasshouse-bench.pth").write_text("\n".join(dict.fromkeys(paths)) + "\n")
PY
if ! "$venv/bin/python" -c 'import cryptography, fastapi, psutil, sqlalchemy, uvicorn, typer, rich' 2>/dev/null; then
  if [ -z "$wheels" ]; then
    echo "this machine lacks what Glasshouse needs: fill a folder of wheels as this script's head says, and name it: WHEELS=DIR" >&2
    exit 2
  fi
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$wheels" --target "$site" \
    'cryptography>=50,<51' fastapi psutil sqlalchemy uvicorn typer rich
fi
gh() { "$venv/bin/glasshouse-bench" "$@"; }
cat > "$venv/bin/glasshouse-bench" <<SH
#!/bin/sh
exec "$venv/bin/python" -I -m glasshouse.cli "\$@"
SH
chmod 755 "$venv/bin/glasshouse-bench"
export GLASSHOUSE_HOME=$out/home
gh init >/dev/null

if [ -n "$small" ]; then
  device=cpu
  subjects=("mlp|--workload mlp|0" "lora-tiny|--workload lora|0")
  runs=1
else
  device=cuda
  subjects=(
    "mlp|--workload mlp|130"
    "lora-0.5b|--workload lora --model config:qwen2.5-0.5b|160"
    "lora-7b|--workload lora --model config:qwen2.5-7b|210"
  )
  runs=2
fi

# What the GPU holds when nothing of ours runs; after a run it has to be the same again.
gpu_memory() {
  command -v nvidia-smi >/dev/null || { echo null; return; }
  nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1 | tr -dc '0-9'
}

status=0
gpu=
for subject in "${subjects[@]}"; do
  IFS='|' read -r name words time_s <<<"$subject"
  if [ -n "$small" ]; then
    length=(--sessions 1 --blocks 2 --steps 200 --warmup 1s)
    time_s=240
  else
    length=(--time "${time_s}s" --warmup 5s)
  fi
  say "$name: interleaved, null and sequential, phases"
  before=$(gpu_memory)
  # A machine that is slower than it looked is stopped as by Ctrl-C: what is complete by then is kept, signed and drawn.
  # shellcheck disable=SC2086
  timeout --signal=INT --kill-after=60 "$((time_s + 40))" "$venv/bin/glasshouse-bench" \
    bench overhead $words --mode all --phases "${length[@]}" --device "$device" -o "$out/$name" --json >"$out/$name.json" ||
    { code=$?; echo "$name: exit status $code" >&2; status=1; }
  after=$(gpu_memory)
  gpu="$gpu{\"name\":\"$name\",\"used_mib_before\":$before,\"used_mib_after\":$after},"
  if [ -f "$out/$name/statement.json" ]; then
    gh verify "$out/$name" --owner "$out/$name/owner.pub" || true
  fi
done

say "lifecycle"
"$venv/bin/python" -I -m benchmarks.lifecycle --runs "$runs" --train-seconds 0 -o "$out/lifecycle.json" || status=1

say "summary"
"$venv/bin/python" -I - "$out" "[${gpu%,}]" "$SECONDS" <<'PY'
import json, pathlib, sys
out, gpu, seconds = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])

def read(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None

names = [one["name"] for one in gpu]
summary = {
    "seconds": seconds,
    "gpu_memory_after_zeroization": gpu,
    "overhead": {name: read(out / f"{name}.json") for name in names},
    "lifecycle": read(out / "lifecycle.json"),
}
(out / "summary.json").write_text(json.dumps(summary, indent=1, sort_keys=True) + "\n")
for one in gpu:
    left = "not looked at" if one["used_mib_before"] is None else f'{one["used_mib_after"] - one["used_mib_before"]:+d} MiB'
    print(f'{one["name"]:<12} GPU memory after zeroization against before: {left}')
print(f"{out}/summary.json, {seconds} s in all")
PY
exit "$status"
