"""Serves a place over standard input and output: ``python -m glasshouse.providers.serve FOLDER NONCE``."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

from glasshouse.errors import Code, ExitCode, GlasshouseError, UsageError
from glasshouse.providers.protocol.messages import GREETING, OWN_FOLDER, VERSION
from glasshouse.providers.serve.server import PlaceServer

_NONCE = re.compile(r"[0-9a-f]{16,64}")


def main(arguments: list[str]) -> int:
    """``python -m glasshouse.providers.serve FOLDER NONCE``; the folder ``-`` is in the user's own data folder."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m glasshouse.providers.serve FOLDER NONCE\n")
        return ExitCode.USAGE
    usual = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "glasshouse-place"
    folder = usual if arguments[0] == OWN_FOLDER else Path(arguments[0]).expanduser().absolute()
    try:
        if not _NONCE.fullmatch(arguments[1]):
            raise UsageError(Code.USAGE, "a place is served for a program: glasshouse run JOB --on MACHINE")
        place = PlaceServer(folder, reader=0, writer=1)
        os.set_blocking(1, True)
        # On a line of its own, whatever a login has printed before.
        os.write(1, f"\n{GREETING} {VERSION} {arguments[1]}\n".encode())
        os.set_blocking(1, False)
        place.serve()
    except GlasshouseError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"the folder {folder} there cannot be used: {error.strerror}\n")
        return ExitCode.RUN_FAILED
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
