#!/bin/sh
# A protected LoRA run on this machine, from the sealed job to the verified receipt. `make demo` calls it.
set -eu
cd "$(dirname "$0")/../.."

say() { printf '\n\033[1m$ %s\033[0m\n' "$*"; }
step() { say "$@"; "$@"; }

# Keys and runs of its own: an identity that you have, or will make, stays as it is.
GLASSHOUSE_HOME="$PWD/.glasshouse/demo"
export GLASSHOUSE_HOME
made=build/demo
mkdir -p "$made"

[ -f "$GLASSHOUSE_HOME/owner.pub" ] || step glasshouse init
step glasshouse seal examples/clinic/lora.toml -o "$made/clinic-lora.sealed" --force
step glasshouse run "$made/clinic-lora.sealed"
step glasshouse verify latest
step glasshouse fetch latest -o "$made/clinic-lora-adapter" --force

cat <<NEXT

The adapter lies in $made/clinic-lora-adapter; keys, run, event log and receipt of this demo in .glasshouse/demo.
Try next (activate the environment first: . .venv/bin/activate):
  glasshouse logs latest --home .glasshouse/demo    what the training printed, decrypted with your key
  glasshouse tamper                                 37 attacks on the gate, and who refuses them
  glasshouse init                                   an identity of your own, in your data folder; then
  glasshouse run examples/clinic/script.toml        your own kind of script, unchanged
  glasshouse doctor                                 what this machine offers, and what its host could still see
NEXT
