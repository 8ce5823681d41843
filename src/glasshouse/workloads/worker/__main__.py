"""The worker: one program for the protected and the raw leg of every workload.

Protected: ``worker --fd 3 --workload KIND --workspace DIR``, started by the launcher inside its sandbox;
descriptor 3 leads to the agent.
Raw: ``worker --raw --workload KIND --params FILE --inputs DIR --outputs DIR [--events FILE]``.

The agent waits for `ready`, and every source is compiled anew at every start: so this file imports next
to nothing, and the rest loads while the gate decides.
"""

from __future__ import annotations

import os
import sys

from glasshouse.workloads.process.undumpable import close_to_others


def ready_frame(pid: int) -> bytes:
    """Return ``wire.frames.control({"type": "ready", "pid": pid})`` without loading a JSON library."""
    message = b'{"pid":%d,"type":"ready"}' % pid
    return len(message).to_bytes(4, "big") + b"\x01" + message


def main() -> None:
    """Close this process to others, send `ready`, do the run, and end the process."""
    close_to_others()
    words = sys.argv[1:]
    if "--fd" in words:
        os.write(int(words[words.index("--fd") + 1]), ready_frame(os.getpid()))
    from glasshouse.workloads.worker import worker_run  # while the gate decides

    code = worker_run.run_raw(words) if "--raw" in words else worker_run.run_protected(words)
    sys.stdout.flush()
    sys.stderr.flush()
    # Frameworks take a second to take themselves down, and plaintext would live that much longer.
    os._exit(code)


if __name__ == "__main__":
    main()
