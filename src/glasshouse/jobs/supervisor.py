"""The program of a detached run's supervisor: `python -I -m glasshouse.jobs.supervisor HOME RUN`.

The launch file comes by standard input. It says nothing but what its log, mode 0600, may hold: no job's data.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from glasshouse.errors import ExitCode, GlasshouseError
from glasshouse.evidence.events import Event, EventType
from glasshouse.handshake.launch import MAX_LAUNCH_BYTES
from glasshouse.jobs.embedded import Embedded
from glasshouse.jobs.follow import Seen
from glasshouse.jobs.home import Home
from glasshouse.jobs.rundir import RunFolder
from glasshouse.jobs.runner import run_here

__all__ = ["main"]


class _Log:
    """Writes a line for each step."""

    def event(self, event: Event, _seen: Seen) -> None:
        if event.type is EventType.TRANSITION:
            self.line(event.state.value)

    def tick(self, _seen: Seen) -> None:
        pass

    def stopping(self, times: int) -> None:
        self.line(f"asked to stop ({times})")

    def line(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        sys.stderr.write(f"{stamp} {text}\n")
        sys.stderr.flush()


def main(arguments: list[str]) -> int:
    """Supervise one run; return the exit code."""
    home, log = Home(path=Path(arguments[0])), _Log()
    folder = RunFolder(home.runs / arguments[1])
    launch = sys.stdin.buffer.read(MAX_LAUNCH_BYTES + 1)
    if not launch or len(launch) > MAX_LAUNCH_BYTES:
        log.line("no launch file came by standard input")
        return ExitCode.USAGE
    try:
        ended = run_here(folder, launch, home=home, broker=Embedded(home), watcher=log)
    except GlasshouseError as error:
        log.line(str(error))
        return error.exit_code
    except Exception as error:
        # Its kind, never its text or its traceback: nobody knows what they would hold.
        log.line(f"a defect in Glasshouse: {type(error).__name__}")
        return ExitCode.INTERNAL
    log.line(f"{ended.conclusion.outcome.value}, receipt {ended.conclusion.verdict}")
    return ended.conclusion.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
