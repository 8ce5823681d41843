"""Serves a place over standard input and output: ``python -m glasshouse.providers.serve FOLDER NONCE``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from glasshouse.errors import ExitCode, GlasshouseError
from glasshouse.providers.serve.server import OWN_FOLDER, serve


def main(arguments: list[str]) -> int:
    """``python -m glasshouse.providers.serve FOLDER NONCE``; the folder ``-`` is in the user's own data folder."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m glasshouse.providers.serve FOLDER NONCE\n")
        return ExitCode.USAGE
    usual = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "glasshouse-place"
    folder = usual if arguments[0] == OWN_FOLDER else Path(arguments[0]).expanduser().absolute()
    try:
        serve(folder, arguments[1])
    except GlasshouseError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"the folder {folder} there cannot be used: {error.strerror}\n")
        return ExitCode.RUN_FAILED
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
