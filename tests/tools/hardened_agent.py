"""Hardens itself as an agent does, starts a worker, and prints what the checks say about both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from glasshouse.runtime.keys.secret_memory import SecretMemory
from glasshouse.runtime.run import checks, start_processes
from glasshouse.runtime.watchdog import watchdog
from tools.sandboxed import specification, start

WORKER = "import ctypes, sys, time; {dumpable}; print('up', flush=True); time.sleep(30)"
NOT_DUMPABLE = "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)"


def main() -> None:
    dumpable = "dumpable-worker" in sys.argv
    notes = start_processes.harden_agent()
    watcher = watchdog.start()
    secret = SecretMemory(4096)
    worker = start(specification(WORKER.format(dumpable="pass" if dumpable else NOT_DUMPABLE)))
    try:
        worker_stdout = open(worker.stdout, "rb")  # noqa: PTH123, SIM115
        worker_stdout.read(3)
        if "unwatched" not in sys.argv:
            watcher.watch(worker.pid or 0)
        notes += start_processes.seal_agent()
        answer = {
            "agent": checks.observe_agent(watchdog=watcher, secret=secret),
            "worker": checks.observe_worker(worker, watchdog=watcher, secret=secret),
            "details": checks.details(worker),
            "notes": notes,
        }
        sys.stdout.write(json.dumps(answer))
    finally:
        worker.end()
        watcher.stop()


if __name__ == "__main__":
    main()
