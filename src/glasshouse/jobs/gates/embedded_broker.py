"""The program of the embedded broker: `python -I -m glasshouse.jobs.gates.embedded_broker HOME [OPTION...]`.

It ends by itself once no run needs it, also when a supervisor was killed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from glasshouse.broker.serving import main as serve
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.owner.home import Home, socket_folder

# Twice in a row, so that a short request of a command without a run is not interrupted.
LOOK_S = 5.0
_LOOKS = 2


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM, or until no run needs it; return the exit code."""
    life, held = os.pipe()
    os.dup2(life, 0)
    os.close(life)
    home = Home(path=Path(arguments[0]))
    threading.Thread(target=_watch, args=(Embedded(home), held), daemon=True).start()
    code = serve([*arguments[1:], "--stop-at-eof"])
    sockets = socket_folder(home)
    if sockets != home.broker:
        with contextlib.suppress(OSError):
            sockets.rmdir()
    return code


def _watch(broker: Embedded, held: int) -> None:
    unneeded = 0
    while unneeded < _LOOKS or not broker.retire():
        time.sleep(LOOK_S)
        unneeded = 0 if broker.needed() else unneeded + 1
    os.close(held)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
