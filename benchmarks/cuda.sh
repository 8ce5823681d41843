#!/usr/bin/env bash
# Measures what protection costs on one CUDA machine, in about a quarter of an hour, downloading nothing.
#
#   bash benchmarks/cuda.sh [OUT]
#
# OUT (default: overhead-cuda) receives one folder a workload, each with step records, a signed statement and
# report.html, and summary.json. `glasshouse verify OUT/lora-7b` computes every number again anywhere.
#
# Needs Python 3.11 or newer with torch, transformers, peft, numpy, scipy, matplotlib and jinja2. What else Glasshouse needs
# (blake3, cryptography, h11, pathspec, platformdirs, psutil, rich, sqlalchemy, starlette, typer, uvicorn) is taken from the machine or,
# without a network, from wheels in the folder that WHEELS names; fill it where there is a network:
#   pip download --only-binary :all: --python-version 3.12 -d wheels 'cryptography>=50,<51' blake3 h11 pathspec platformdirs psutil \
#     rich sqlalchemy starlette typer uvicorn
#
#   PYTHON=python3   the interpreter that has torch
#   WHEELS=wheels    a folder of wheels, if the machine lacks any
#   SMALL=1          some minutes on the CPU: tries this script out, measures nothing
#   SUBJECTS=        other lines of NAME|OPTIONS|SECONDS than the three below
#   LIMIT=           seconds for all of it: what runs then is stopped as by Ctrl-C, what is complete is kept and signed, and the same
#                    command with the same OUT goes on on the same machine
#   QUICK=1          one protected run of `mlp` and one raw one after it, and nothing else: some four minutes at the most. It shows that
#                    protected training runs on this GPU, and what one pair of processes shows of its cost, which is little
#
# A machine that is there for ten minutes: the first, and with what is left the second, as often as it has minutes. Ten pairs of processes
# take 20 × (start + 14 s), which is more than four minutes on any machine; each pair that is complete is kept, and the one that runs
# when the time is over is lost: a measurement that went on after stops ends with fewer than ten, and says so.
#   QUICK=1 bash benchmarks/cuda.sh quick
#   SUBJECTS='mlp|--workload mlp --mode alternating|600' LIMIT=270 bash benchmarks/cuda.sh pairs
# 600 is enough for starts of up to 16 s; where it is not, the script says so within a minute. With a model in the place of `mlp`:
# --workload lora --model config:qwen2.5-0.5b, whose steps of 0.2 s are too long for slots and not for whole processes.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${1:-overhead-cuda}
python=${PYTHON:-python3}
wheels=${WHEELS:-}
small=${SMALL:-}
quick=${QUICK:-}
limit=${LIMIT:-${quick:+240}}

say() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

if [ -e "$out" ] && [ ! -e "$out/home" ]; then
  echo "$out is there already: name another folder, or move it away" >&2
  exit 2
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)

# An environment of its own, that sees the packages of the given interpreter and changes none of them.
say "installing Glasshouse beside $("$python" -c 'import sys; print(sys.version.split()[0])')"
venv=$out/.venv
"$python" -m venv --clear --without-pip "$venv"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" - "$site" "$here" <<'PY'
import pathlib, site, sys, sysconfig, tomllib
target, source = map(pathlib.Path, sys.argv[1:])
paths = [str(source / "src"), str(source / "bench" / "src"), str(source), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
(target / "glasshouse-bench.pth").write_text("\n".join(dict.fromkeys(paths)) + "\n")
# What an installation of bench/ would leave: its entry points, by which its commands and its verifier are found.
project = tomllib.loads((source / "bench" / "pyproject.toml").read_text())["project"]
info = target / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
info.mkdir()
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
groups = project["entry-points"].items()
(info / "entry_points.txt").write_text(
    "".join(f"[{group}]\n" + "".join(f"{name} = {point}\n" for name, point in points.items()) for group, points in groups)
)
PY
if ! "$venv/bin/python" -c 'import blake3, cryptography, h11, pathspec, platformdirs, psutil, rich, sqlalchemy, starlette, typer, uvicorn' 2>/dev/null; then
  if [ -z "$wheels" ]; then
    echo "this machine lacks what Glasshouse needs: fill a folder of wheels as this script's head says, and name it: WHEELS=DIR" >&2
    exit 2
  fi
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$wheels" --target "$site" \
    'cryptography>=50,<51' blake3 h11 pathspec platformdirs psutil rich sqlalchemy starlette typer uvicorn
fi
gh() { "$venv/bin/glasshouse-bench" "$@"; }
cat > "$venv/bin/glasshouse-bench" <<SH
#!/bin/sh
exec "$venv/bin/python" -I -m glasshouse.cli "\$@"
SH
chmod 755 "$venv/bin/glasshouse-bench"
export GLASSHOUSE_HOME=$out/home
[ -e "$GLASSHOUSE_HOME" ] || gh init >/dev/null

if [ -n "$small" ]; then
  device=cpu
  subjects=("mlp|--workload mlp --mode sequential|90")
  runs=1
else
  device=cuda
  subjects=(
    "mlp|--workload mlp|120"
    "lora-0.5b|--workload lora --model config:qwen2.5-0.5b|150"
    "lora-7b|--workload lora --model config:qwen2.5-7b|210"
  )
  runs=2
fi
if [ -n "$quick" ]; then
  subjects=("mlp|--workload mlp --mode sequential|100")
fi
if [ -n "${SUBJECTS:-}" ]; then
  mapfile -t subjects <<<"$SUBJECTS"
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
  say "$name: $words"
  before=$(gpu_memory)
  # A null beside it takes a third more, and calibration some minutes where a model is large. A machine that is slower than it
  # looked is stopped as by Ctrl-C: what is complete by then is kept and signed.
  most_s=$((2 * time_s + 180))
  if [ -n "$limit" ]; then
    # Ten seconds are for ending and signing.
    left_s=$((limit - SECONDS - 10))
    if [ "$left_s" -lt 1 ]; then
      echo "$name: no time is left for it" >&2
      status=1
      break
    fi
    most_s=$((left_s < most_s ? left_s : most_s))
  fi
  # shellcheck disable=SC2086
  timeout --signal=INT --kill-after=60 "$most_s" "$venv/bin/glasshouse-bench" \
    bench overhead $words --time "${time_s}s" --device "$device" -o "$out/$name" --json >"$out/$name.json" ||
    { code=$?; echo "$name: exit status $code $(grep "^{.error" "$out/$name.json" | head -c 2000)" >&2; status=1; }
  after=$(gpu_memory)
  gpu="$gpu{\"name\":\"$name\",\"used_mib_before\":$before,\"used_mib_after\":$after},"
  if [ -f "$out/$name/statement.json" ]; then
    gh bench report "$out/$name" || status=1
    gh verify "$out/$name" --owner "$out/$name/owner.pub" || true
  fi
done

if [ -z "$quick$limit" ]; then
  say "lifecycle"
  "$venv/bin/python" -I -m benchmarks.lifecycle --runs "$runs" --train-seconds 0 -o "$out/lifecycle.json" || status=1
fi

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
