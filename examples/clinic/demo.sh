#!/bin/sh
# A protected LoRA run on this machine, from the sealed job to the verified receipt. `make demo` calls it.
set -eu
cd "$(dirname "$0")/../.."

say() { printf '\n\033[1m$ %s\033[0m\n' "$*"; }
step() { say "$@"; "$@"; }

[ -f .glasshouse/owner.pub ] || step glasshouse init
step glasshouse seal examples/clinic/lora.toml -o .glasshouse/clinic-lora.sealed --force
step glasshouse run .glasshouse/clinic-lora.sealed
step glasshouse verify latest
step glasshouse fetch latest -o .glasshouse/clinic-lora-adapter --force

cat <<'NEXT'

The adapter lies in .glasshouse/clinic-lora-adapter; the run, its event log and its receipt in .glasshouse/runs.
Try next (activate the environment first: . .venv/bin/activate):
  glasshouse logs latest                        what the training printed, decrypted with your key
  glasshouse tamper                             nine attacks on the gate, and who refuses them
  glasshouse run examples/clinic/script.toml    your own kind of script, unchanged
  glasshouse doctor                             what this machine offers, and what its host could still see
NEXT
