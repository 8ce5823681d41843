#!/usr/bin/env bash
# Prints as JSON what a CUDA machine says of its GPUs' confidential computing, in seconds, downloading nothing and changing nothing:
# what `doctor` finds, what the collector of the kind `nvidia` finds missing, whether it gives evidence, and that the GPU still
# multiplies afterwards.
#
#   bash benchmarks/hardware_cuda.sh
#
# PYTHON (python3) and WHEELS are those of benchmarks/cuda.sh. Evidence that was given lies in the file that OUT names, if it does.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT

"$python" -m venv --without-pip "$venv"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" - "$site" "$here" <<'PY'
import pathlib, site, sys, sysconfig
target, source = map(pathlib.Path, sys.argv[1:])
paths = [str(source / "src"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
(target / "glasshouse-here.pth").write_text("\n".join(dict.fromkeys(paths)) + "\n")
PY
needed=('cryptography>=50,<51' blake3 h11 pathspec platformdirs psutil rich sqlalchemy starlette typer uvicorn)
if ! "$venv/bin/python" -c 'import blake3, cryptography, h11, pathspec, platformdirs, psutil, rich, sqlalchemy, starlette, typer, uvicorn' 2>/dev/null; then
  if [ -z "${WHEELS:-}" ]; then
    echo "this machine lacks what Glasshouse needs: fill a folder of wheels as the head of benchmarks/cuda.sh says: WHEELS=DIR" >&2
    exit 2
  fi
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$WHEELS" --target "$site" "${needed[@]}"
fi

exec 3>&1
"$venv/bin/python" -I - "${OUT:-}" >&3 <<'PY'
import json, pathlib, subprocess, sys, time

from glasshouse.attestation.roots.binding import Bound
from glasshouse.errors import GlasshouseError
from glasshouse.runtime import gpus
from glasshouse.runtime.roots import nvidia


def timed(work):
    begun = time.monotonic()
    try:
        said = work()
    except GlasshouseError as error:
        said = {"code": str(error.code), "message": error.message}
    return {"said": said, "seconds": round(time.monotonic() - begun, 3)}


def driver():
    try:
        with gpus.nvml_of(gpus.LIBRARY) as nvml:
            mode, devtools = nvidia._mode(nvml)
            return {"devtools": devtools, "mode": str(mode)}
    except (OSError, AttributeError) as error:
        return str(error)


def collected():
    blob = collector.collect(bound=Bound(composite=bytes(32)), credential=None)
    if sys.argv[1]:
        pathlib.Path(sys.argv[1]).write_bytes(blob)
    return {"bytes": len(blob)}


def multiplied():
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU"
    left, right = (torch.ones(512, 512, device="cuda") for _ in range(2))
    return {"device": torch.cuda.get_device_name(0), "right": bool(((left @ right) == 512).all())}


def doctor():
    done = subprocess.run([sys.executable, "-I", "-m", "glasshouse.cli", "doctor", "--json"], capture_output=True, text=True)
    try:
        return json.loads(done.stdout)
    except ValueError:
        return {"status": done.returncode, "printed": (done.stdout + done.stderr)[-2000:]}


collector = nvidia.NvidiaCollector()
found = {
    "gpus": timed(lambda: [gpu.to_json() for gpu in gpus.in_sight()]),
    "driver": timed(driver),
    "look": timed(collector.look),
    "collect": timed(collected),
    "collect_again": timed(collected),
    "gpu_afterwards": timed(multiplied),
    "doctor": timed(doctor),
}
collector.close()
print(json.dumps(found, indent=1, sort_keys=True))
PY
